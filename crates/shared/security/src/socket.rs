//! Options of connections between hosts: no waiting for more to send, and peers that vanish are noticed.

use std::{io, os::fd::AsFd, time::Duration};

use rustix::net::sockopt;

/// Silence after which the kernel asks whether the peer is there.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(20);
/// Between two questions.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
/// Questions without an answer until the peer counts as gone.
const KEEPALIVE_PROBES: u32 = 4;
/// How long sent bytes may stay unacknowledged.
const UNACKNOWLEDGED_MS: u32 = 20_000;

/// Sets them for a TCP connection.
///
/// # Errors
/// If the system refuses one.
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
