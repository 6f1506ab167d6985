//! The control thread: finds the executor, asks for a worker slot, maps adapters, and retries when the
//! executor is gone.
//!
//! A slot belongs to one connection to one executor. When either ends, the slot, its maps and its adapters
//! are dropped, so a restarted executor is never mistaken for its predecessor.

use std::{
    hash::{BuildHasher as _, RandomState},
    io::Write as _,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Arc, mpsc::SyncSender},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use settings::exit::in_one_line;
use shmproto::{
    board::{Consumer, ConsumerFds, JoinError, SlotNumber, WorkerNumber},
    fd_passing::{
        AdapterOffered, AdapterRejected, ConnectError, FromWorker, ReceiveError, SendError, SlotGranted,
        ToWorker, WorkerEnd, WorkerHello, bounded_text, connect,
    },
    image::{Image, ImageError},
};

use crate::{
    assignment::Assignment,
    config::WorkerConfig,
    confine::{Thread, confine},
    library::{AdapterError, Handoff, MappedAdapter, MappedAdapters},
    thread_status::{ConsumerStatus, ThreadStatus},
};

/// Pause before the second attempt to find an executor; the pause doubles per attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Maximum interval between two cleanups of unused libraries.
const CLEAR: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The reason why the worker has no slot, or lost its slot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VisitError {
    #[error("{0}")]
    Connect(#[from] ConnectError),
    #[error("the executor refuses this worker: {0}")]
    Refused(String),
    /// The executor announced its exit.
    #[error("the executor has ended")]
    Closing,
    /// The executor ended after the connection and before the slot.
    #[error("the executor ended before it assigned a worker slot")]
    NotSeated,
    /// The message is not allowed at this point.
    #[error("the executor sent {0} at the wrong time; use a worker of the executor's version")]
    Unexpected(&'static str),
    /// The memory is not that of a board.
    #[error("cannot use the executor's board")]
    Join(#[from] JoinError),
    /// The message is unreadable, or the connection ended.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error(transparent)]
    Send(#[from] SendError),
    /// A thread of this process has panicked.
    #[error("a thread of the worker panicked; see its log and restart it")]
    Fault,
}

impl VisitError {
    /// Whether another attempt is pointless.
    fn is_final(&self) -> bool {
        use ConnectError::{Path, Stranger};
        matches!(self, Self::Fault | Self::Connect(Path(_) | Stranger { .. }))
    }

    /// Whether the error is normal: executors may start after their workers or end before them.
    fn is_expected(&self) -> bool {
        matches!(self, Self::Closing | Self::NotSeated | Self::Connect(ConnectError::Absent(_)))
    }
}

/// The reason why an offered adapter is not mapped.
#[derive(Debug, thiserror::Error)]
enum OfferError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
}

/// The control thread's state.
#[derive(Debug)]
pub(crate) struct Control {
    executor: PathBuf,
    hello: WorkerHello,
    signs: &'static ThreadStatus,
    posts: SyncSender<Result<Assignment, VisitError>>,
    greeting: ReadyNotice,
}

/// Whether the line "ready" was printed for the parent process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadyNotice {
    Due,
    Said,
}

impl Control {
    pub(crate) fn new(
        config: &WorkerConfig,
        signs: &'static ThreadStatus,
        posts: SyncSender<Result<Assignment, VisitError>>,
    ) -> Self {
        // The standard library seeds its hashers at random, so each process start gets another number.
        let instance = RandomState::new().hash_one(std::process::id());
        let hello = WorkerHello::new(instance, config.core.into());
        Self { executor: config.executor.clone(), hello, signs, posts, greeting: ReadyNotice::Due }
    }

    /// Starts the thread, which never returns: its filter denies the system calls that ending it takes.
    pub(crate) fn start(mut self) -> anyhow::Result<()> {
        let run = move || {
            // The panic was logged, and the state it left is not used again.
            let why = catch_unwind(AssertUnwindSafe(|| self.run())).unwrap_or(VisitError::Fault);
            // A missing receiver means that the process is already exiting.
            let _ = self.posts.send(Err(why));
            loop {
                thread::park();
            }
        };
        let started = thread::Builder::new().name("control".to_owned()).spawn(run);
        started.map(drop).context("cannot start the control thread")
    }

    /// Visits one executor after another; returns only an error that cannot be retried.
    fn run(&mut self) -> VisitError {
        confine(Thread::Control);
        let (mut pause, mut said) = (FIRST_PAUSE, String::new());
        loop {
            let Err(error) = self.visit(&mut pause);
            self.signs.show(ConsumerStatus::Waiting);
            if error.is_final() {
                return error;
            }
            let why = in_one_line(&error);
            if pause == FIRST_PAUSE {
                said.clear();
            }
            // An executor that is just starting is available soon, so no message is logged yet.
            let is_early =
                pause < LAST_PAUSE && matches!(error, VisitError::Connect(ConnectError::Absent(_)));
            if !is_early && why != said {
                match error.is_expected() {
                    true => tracing::info!("{why}; waiting for an executor"),
                    false => tracing::warn!("{why}; waiting for an executor"),
                }
                said = why;
            }
            thread::park_timeout(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// Asks for a slot and keeps it until the executor or the connection ends.
    fn visit(&mut self, pause: &mut Duration) -> Result<Never, VisitError> {
        let connection = Arc::new(connect(&self.executor)?);
        failpoint::pass("worker.connected");
        let seat = match self.ask(&connection)? {
            (ToWorker::Seated(seated), fds) => join(&seated, fds)?,
            (ToWorker::Refused(reason), _) => return Err(VisitError::Refused(reason)),
            (other, _) => return Err(VisitError::Unexpected(name(&other))),
        };
        failpoint::pass("worker.seated");
        let handoff = Arc::new(Handoff::default());
        let post = Assignment::new(seat, Arc::clone(&handoff), Arc::clone(&connection));
        let _end = post.end();
        self.posts.send(Ok(post)).map_err(|_| VisitError::Fault)?;
        *pause = FIRST_PAUSE;
        self.say_ready();
        let library = MappedAdapters::default();
        ConsumerSession { connection: &connection, handoff: &handoff, library, signs: self.signs }.run()
    }

    /// Returns the executor's answer to the worker's hello.
    fn ask(&self, connection: &WorkerEnd) -> Result<(ToWorker, Vec<OwnedFd>), VisitError> {
        let asked = connection.send(&FromWorker::Hello(self.hello.clone()), &[]);
        failpoint::pass("worker.hello");
        match asked.map_err(VisitError::from).and_then(|()| Ok(receive(connection)?)) {
            Err(VisitError::Send(SendError::Closed) | VisitError::Receive(ReceiveError::Closed)) => {
                Err(VisitError::NotSeated)
            }
            answer => answer,
        }
    }

    /// Prints "ready" for the parent process when the worker gets its first slot.
    fn say_ready(&mut self) {
        tracing::info!(executor = %self.executor.display(), "seated");
        if self.greeting == ReadyNotice::Due {
            self.greeting = ReadyNotice::Said;
            // The parent may have closed the pipe; the worker continues.
            let _ = writeln!(std::io::stdout(), "ready");
        }
    }
}

/// An uninhabited type: a session ends only with an error.
enum Never {}

/// A worker slot in use.
struct ConsumerSession<'a> {
    connection: &'a WorkerEnd,
    handoff: &'a Handoff,
    library: MappedAdapters,
    signs: &'a ThreadStatus,
}

impl ConsumerSession<'_> {
    /// Handles the executor's messages until the connection ends.
    fn run(mut self) -> Result<Never, VisitError> {
        self.show();
        loop {
            if self.is_silent() {
                self.handoff.clear();
                continue;
            }
            match receive(self.connection)? {
                (ToWorker::AdapterOffered(offered), fds) => self.map_adapter(&offered, fds)?,
                (ToWorker::AdapterWithdrawn(image), _) => {
                    failpoint::pass("worker.image_withdrawn");
                    self.library.remove(image);
                    self.show();
                }
                (ToWorker::Closing, _) => return Err(VisitError::Closing),
                (other, _) => return Err(VisitError::Unexpected(name(&other))),
            }
        }
    }

    /// Waits for a message; true if none came for a while.
    fn is_silent(&self) -> bool {
        let mut watched = [PollFd::new(self.connection, PollFlags::IN)];
        matches!(poll(&mut watched, Some(&CLEAR)), Ok(0) | Err(Errno::INTR))
    }

    /// Maps an adapter, and answers once the compute thread can see it.
    fn map_adapter(&mut self, offered: &AdapterOffered, fds: Vec<OwnedFd>) -> Result<(), VisitError> {
        failpoint::pass("worker.image_received");
        let image = offered.image;
        let answer = match self.map(offered, fds) {
            Ok(()) => {
                self.show();
                FromWorker::AdapterMapped(image)
            }
            Err(error) => {
                let reason = in_one_line(&error);
                tracing::warn!(image, reason, "cannot map an adapter");
                FromWorker::AdapterRejected(AdapterRejected {
                    image,
                    reason: bounded_text(&reason).to_owned(),
                })
            }
        };
        failpoint::pass("worker.image_mapped");
        Ok(self.connection.send(&answer, &[])?)
    }

    fn map(&mut self, offered: &AdapterOffered, fds: Vec<OwnedFd>) -> Result<(), OfferError> {
        let bytes = usize::try_from(offered.bytes).unwrap_or(usize::MAX);
        // `receive` has checked the number of descriptors.
        for fd in fds {
            let adapter = MappedAdapter::over(&Image::map(fd, bytes)?)?;
            self.library.add(offered.image, adapter)?;
        }
        Ok(())
    }

    /// Publishes the library for the compute thread.
    fn show(&self) {
        self.signs.show(ConsumerStatus::Seated { adapters: self.library.adapters() });
        self.handoff.put(self.library.clone());
    }
}

/// Waits for the next message.
fn receive(connection: &WorkerEnd) -> Result<(ToWorker, Vec<OwnedFd>), ReceiveError> {
    loop {
        if let Some(received) = connection.receive()? {
            return Ok(received);
        }
    }
}

/// Joins the board on the three regions of the message.
fn join(seated: &SlotGranted, fds: Vec<OwnedFd>) -> Result<Consumer, VisitError> {
    let (Ok([control, x, sums]), Some(worker)) =
        (<[OwnedFd; 3]>::try_from(fds), WorkerNumber::new(seated.worker))
    else {
        return Err(VisitError::Unexpected("an invalid worker slot"));
    };
    Ok(Consumer::join(ConsumerFds { control, x, sums }, SlotNumber(seated.seat), worker)?)
}

fn name(message: &ToWorker) -> &'static str {
    match message {
        ToWorker::Seated(_) => "a seat",
        ToWorker::Refused(_) => "a refusal",
        ToWorker::AdapterOffered(_) => "an adapter",
        ToWorker::AdapterWithdrawn(_) => "a withdrawal",
        ToWorker::Closing => "a farewell",
    }
}
