//! Socket options for connections between hosts: data is sent at once, and vanished peers are detected.

use std::{io, os::fd::AsFd, time::Duration};

use rustix::net::sockopt;

/// Idle time after which the kernel sends the first keepalive probe.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(20);
/// Interval between two keepalive probes.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
/// Number of unanswered probes after which the connection is closed.
const KEEPALIVE_PROBES: u32 = 4;
/// Maximum time that sent bytes may stay unacknowledged, in milliseconds.
const UNACKNOWLEDGED_MS: u32 = 20_000;

/// Sets the options for a TCP connection.
///
/// # Errors
/// Fails if the system refuses an option.
pub fn prepare(socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd();
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_AFTER)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    sockopt::set_tcp_user_timeout(socket, UNACKNOWLEDGED_MS)?;
    Ok(())
}
