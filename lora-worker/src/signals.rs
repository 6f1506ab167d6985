//! The thread that ends the process on a signal and reports the worker's status to systemd.
//!
//! A worker has nothing to save, since its executor takes unfinished slices back. The current slice gets a
//! moment to finish, which spares the executor that work. Then the process exits, whether the other threads
//! sleep, connect or compute.

use std::{
    io::{PipeReader, pipe, stdin},
    process::exit,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{
    confine::{Thread, confine},
    systemd,
    thread_status::{ConsumerStatus, ThreadStatus},
};

/// Time that the current slice gets to finish.
const GRACE: Duration = Duration::from_millis(50);

/// Maximum interval between two status reports to systemd.
const LOOK: Duration = Duration::from_secs(1);

/// The parent process whose end also ends the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParentWatch {
    None,
    /// The process that holds the other end of standard input.
    Stdin,
}

/// Starts to watch for SIGTERM, SIGINT and the end of the parent.
///
/// # Errors
/// If signals cannot be received, or the thread cannot start.
pub(crate) fn start(signs: &'static ThreadStatus, lifeline: ParentWatch) -> anyhow::Result<()> {
    let (signals, caught) = pipe().context("cannot make a pipe for signals")?;
    for (signal, name) in [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT")] {
        let caught = caught.try_clone().context("cannot make a pipe for signals")?;
        let registered = signal_hook::low_level::pipe::register(signal, caught);
        registered.with_context(|| format!("cannot receive {name}"))?;
    }
    // Read here, because the check uses the process id, which the thread's filter denies.
    let watchdog = sd_notify::watchdog_enabled();
    let watch = move || ShutdownWatch { signals, lifeline, watchdog, signs }.run();
    thread::Builder::new().name("watch".to_owned()).spawn(watch).context("cannot start the watch thread")?;
    Ok(())
}

struct ShutdownWatch {
    signals: PipeReader,
    lifeline: ParentWatch,
    /// Watchdog interval of systemd, if enabled.
    watchdog: Option<Duration>,
    signs: &'static ThreadStatus,
}

impl ShutdownWatch {
    fn run(self) -> ! {
        confine(Thread::Watch);
        let patience = self.watchdog.map_or(LOOK, |limit| (limit / 4).clamp(Duration::from_millis(1), LOOK));
        let (mut turns, mut seating) = (0, ConsumerStatus::Waiting);
        while !self.is_asked_to_end(patience) {
            let now = (self.signs.turns(), self.signs.seating());
            if self.watchdog.is_some() && now.0 != turns {
                systemd::alive();
            }
            if now.1 != seating {
                systemd::status(now.1);
            }
            (turns, seating) = now;
        }
        failpoint::pass("worker.leaving");
        systemd::stopping();
        self.signs.announce_exit();
        thread::park_timeout(GRACE);
        exit(0)
    }

    /// Waits at most `patience` for a reason to exit.
    fn is_asked_to_end(&self, patience: Duration) -> bool {
        let standard_input = stdin();
        let mut watched = vec![PollFd::new(&self.signals, PollFlags::IN)];
        if self.lifeline == ParentWatch::Stdin {
            watched.push(PollFd::new(&standard_input, PollFlags::IN));
        }
        match poll(&mut watched, Timespec::try_from(patience).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // A process without signals could not be ended in order, so it exits now.
            Err(error) => {
                tracing::error!(%error, "cannot watch for signals; start again");
                exit(1);
            }
        }
        let happened: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
        match happened.as_slice() {
            [true, ..] => true,
            // A terminal whose other end is closed reports an error repeatedly.
            [_, true] => match rustix::io::read(&standard_input, &mut [0; 512]) {
                Ok(bytes) => bytes == 0,
                Err(error) => !matches!(error, Errno::INTR | Errno::AGAIN),
            },
            _ => false,
        }
    }
}
