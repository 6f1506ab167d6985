//! The thread that ends the process when it is asked to, wherever the others are, and tells systemd how they are.
//!
//! A worker has nothing to save: what it leaves half done its executor takes back. So it is given a moment to end the
//! slice it is at, which spares the executor that, and then the process ends: from a sleep on the board, from a pause
//! between two tries to connect, from a slice that takes too long.

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

/// How long the slice at hand may take to end.
const GRACE: Duration = Duration::from_millis(50);

/// How often systemd is told what has changed, at least.
const LOOK: Duration = Duration::from_secs(1);

/// Whose end also ends the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParentWatch {
    /// Nobody's.
    None,
    /// That of whoever holds the other end of standard input.
    Stdin,
}

/// Watches, from now on, for SIGTERM, SIGINT and the end of the lifeline.
///
/// # Errors
/// If signals cannot be received, or no thread started.
pub(crate) fn start(signs: &'static ThreadStatus, lifeline: ParentWatch) -> anyhow::Result<()> {
    let (signals, caught) = pipe().context("cannot make a pipe for signals")?;
    for (signal, name) in [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT")] {
        let caught = caught.try_clone().context("cannot make a pipe for signals")?;
        let registered = signal_hook::low_level::pipe::register(signal, caught);
        registered.with_context(|| format!("cannot receive {name}"))?;
    }
    // Asked for here: it takes a look at the process id, which the thread may not take any more.
    let watchdog = sd_notify::watchdog_enabled();
    let watch = move || ShutdownWatch { signals, lifeline, watchdog, signs }.run();
    thread::Builder::new().name("watch".to_owned()).spawn(watch).context("cannot start the watch thread")?;
    Ok(())
}

struct ShutdownWatch {
    signals: PipeReader,
    lifeline: ParentWatch,
    /// How long systemd waits for a sign of life, if it does.
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

    /// Waits for a reason to end, at most as long as `patience`.
    fn is_asked_to_end(&self, patience: Duration) -> bool {
        let standard_input = stdin();
        let mut watched = vec![PollFd::new(&self.signals, PollFlags::IN)];
        if self.lifeline == ParentWatch::Stdin {
            watched.push(PollFd::new(&standard_input, PollFlags::IN));
        }
        match poll(&mut watched, Timespec::try_from(patience).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // A process that nobody could end must not go on.
            Err(error) => {
                tracing::error!(%error, "cannot watch for signals; start again");
                exit(1);
            }
        }
        let happened: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
        match happened.as_slice() {
            [true, ..] => true,
            // A terminal whose other end is closed says so with an error, and would say it again and again.
            [_, true] => match rustix::io::read(&standard_input, &mut [0; 512]) {
                Ok(bytes) => bytes == 0,
                Err(error) => !matches!(error, Errno::INTR | Errno::AGAIN),
            },
            _ => false,
        }
    }
}
