//! The worker process: returns the rows it receives, through the board or through a socket.
//!
//! The harness starts this program again with [`COMMAND`] as first argument. Standard input is a socket that
//! either receives the worker's end of the board or carries rows and sums. The worker ends when the socket
//! closes.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size},
};
use shmproto::{
    board::{Consumer, ConsumerFds, SlotNumber, WakeReason, WorkerNumber},
    fd_passing::{ToWorker, WorkerEnd},
};

use crate::machine::pin;

/// First argument of a worker process; only the harness passes it.
pub(crate) const COMMAND: &str = "board-worker";

/// Default spin time of `lora-worker`.
const SPIN: Duration = Duration::from_micros(50);

/// Socket buffer size that holds a whole message, if the system grants it.
const BUFFER_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WorkerRole {
    pub(super) channel: Channel,
    /// Core of the worker; `None` lets the kernel choose.
    pub(super) core: Option<usize>,
    /// Bytes per received message, only through a socket.
    pub(super) receives: usize,
    /// Bytes per sent message, only through a socket.
    pub(super) sends: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channel {
    Board,
    Socket,
}

/// Worker process that ends when its socket closes; dropping this waits for the end.
#[derive(Debug)]
pub(super) struct WorkerProcess(Child);

impl WorkerProcess {
    pub(super) fn start(role: WorkerRole, socket: OwnedFd) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program to start workers")?;
        let channel = match role.channel {
            Channel::Board => "board",
            Channel::Socket => "socket",
        };
        let core = role.core.map_or("any".to_owned(), |core| core.to_string());
        let child = Command::new(program)
            .args([COMMAND, channel, &core, &role.receives.to_string(), &role.sends.to_string()])
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start a worker")?;
        Ok(Self(child))
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // A worker at the board checks its socket ten times per second; a longer wait is a fault of this
        // harness.
        for _ in 0..100 {
            if matches!(self.0.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a worker with the `arguments` after [`COMMAND`].
///
/// # Errors
/// If the arguments or the received descriptors are invalid.
pub(crate) fn main(arguments: impl Iterator<Item = String>) -> Result<()> {
    let role = WorkerRole::parse(&arguments.collect::<Vec<_>>())?;
    if let Some(core) = role.core {
        pin(core)?;
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input is not a socket")?;
    match role.channel {
        Channel::Board => at_the_board(socket),
        Channel::Socket => through_a_socket(UnixStream::from(socket), role),
    }
}

impl WorkerRole {
    fn parse(arguments: &[String]) -> Result<Self> {
        let [channel, core, receives, sends] = arguments else {
            bail!("a worker takes channel, core and two sizes, not {arguments:?}");
        };
        let channel = match channel.as_str() {
            "board" => Channel::Board,
            "socket" => Channel::Socket,
            other => bail!("{other} is no channel"),
        };
        let number = |text: &str| text.parse::<usize>().with_context(|| format!("{text} is no number"));
        let core = if core == "any" { None } else { Some(number(core)?) };
        Ok(Self { channel, core, receives: number(receives)?, sends: number(sends)? })
    }
}

/// Claims slices until the harness closes the socket: copies the rows and returns some of them as sums.
fn at_the_board(socket: OwnedFd) -> Result<()> {
    let executor = WorkerEnd::over(socket);
    let mut seat = sit_down(&executor)?;
    let mut x = vec![0.0f32; seat.geometry().x_elements];
    loop {
        match seat.wait(SPIN) {
            WakeReason::Job => {
                while let Some(claim) = seat.claim(|_, _| true) {
                    let rows = &mut x[..claim.slice().x_elements()];
                    claim.read_x(rows);
                    let sums = claim.slice().sums_elements as usize;
                    claim.done(&x[..sums]);
                }
            }
            WakeReason::Fenced => return Ok(()),
            WakeReason::Rest if is_closed(&executor) => return Ok(()),
            WakeReason::Rest => {}
        }
    }
}

fn sit_down(executor: &WorkerEnd) -> Result<Consumer> {
    let received = executor.receive().map_err(|error| anyhow!("no seat was handed over: {error}"))?;
    let Some((ToWorker::Seated(seated), fds)) = received else { bail!("a seat was expected") };
    let [control, x, sums] =
        <[OwnedFd; 3]>::try_from(fds).map_err(|_| anyhow!("a seat has three regions"))?;
    let worker = WorkerNumber::new(seated.worker).context("a worker has a number")?;
    let fds = ConsumerFds { control, x, sums };
    Consumer::join(fds, SlotNumber(seated.seat), worker).context("the board cannot be joined")
}

fn is_closed(executor: &WorkerEnd) -> bool {
    let mut fds = [PollFd::new(executor, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Enlarges both socket buffers, so that a writer need not wait for its reader within a message.
pub(super) fn widen(socket: &UnixStream) {
    // The system may grant less; then writer and reader alternate, as with any socket.
    let _ = set_socket_send_buffer_size(socket, BUFFER_BYTES);
    let _ = set_socket_recv_buffer_size(socket, BUFFER_BYTES);
}

/// Reads rows and writes some of them back until the harness closes the socket.
fn through_a_socket(mut socket: UnixStream, role: WorkerRole) -> Result<()> {
    widen(&socket);
    let mut x = vec![0u8; role.receives.max(role.sends)];
    loop {
        match socket.read_exact(&mut x[..role.receives]) {
            Ok(()) => socket.write_all(&x[..role.sends]).context("the harness is gone in the middle")?,
            Err(_) => return Ok(()),
        }
    }
}
