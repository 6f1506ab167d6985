//! The thread that talks to the executor: finds it, asks for a seat, maps what it is handed, and begins anew when it is gone.
//!
//! A seat belongs to one connection to one executor. When either ends, everything of both is forgotten: maps, adapters
//! and the seat itself. So nothing of an executor that was started again is ever mistaken for the one before.

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

/// The pause before the second try to find an executor; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause between two tries.
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// How often what is not used any more is cleared away, at least.
const CLEAR: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Why there is no seat, or no seat any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VisitError {
    /// There is nobody to talk to.
    #[error("{0}")]
    Connect(#[from] ConnectError),
    /// The executor does not want this worker.
    #[error("the executor refuses this worker: {0}")]
    Refused(String),
    /// It ends, and has said so.
    #[error("the executor has ended")]
    Closing,
    /// It ended between the connection and the seat.
    #[error("the executor ended before it gave a seat")]
    NotSeated,
    /// It speaks out of turn.
    #[error("the executor sent {0} where none belongs; use a worker of the executor's version")]
    Unexpected(&'static str),
    /// Its memory is not that of a board.
    #[error("the executor's board cannot be used")]
    Join(#[from] JoinError),
    /// It said something that cannot be understood, or nothing more.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// It cannot be told anything more.
    #[error(transparent)]
    Send(#[from] SendError),
    /// A thread of this process is gone.
    #[error("the worker has stopped by a fault; its log says more, start again")]
    Fault,
}

impl VisitError {
    /// Whether there is no point in trying again.
    fn is_final(&self) -> bool {
        use ConnectError::{Path, Stranger};
        matches!(self, Self::Fault | Self::Connect(Path(_) | Stranger { .. }))
    }

    /// Whether it belongs to the life of a healthy deployment: an executor starts after its workers, or ends before them.
    fn is_expected(&self) -> bool {
        matches!(self, Self::Closing | Self::NotSeated | Self::Connect(ConnectError::Absent(_)))
    }
}

/// Why an adapter that was offered is not mapped.
#[derive(Debug, thiserror::Error)]
enum OfferError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
}

/// What the thread needs.
#[derive(Debug)]
pub(crate) struct Control {
    executor: PathBuf,
    hello: WorkerHello,
    signs: &'static ThreadStatus,
    posts: SyncSender<Result<Assignment, VisitError>>,
    greeting: ReadyNotice,
}

/// Whether whoever started the process has been told that it has a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadyNotice {
    Due,
    Said,
}

impl Control {
    /// For a worker that is sent to its posts by `posts`.
    pub(crate) fn new(
        config: &WorkerConfig,
        signs: &'static ThreadStatus,
        posts: SyncSender<Result<Assignment, VisitError>>,
    ) -> Self {
        // The standard library keys its hashers at random: a number no other start of the process has.
        let instance = RandomState::new().hash_one(std::process::id());
        let hello = WorkerHello::new(instance, config.core.into());
        Self { executor: config.executor.clone(), hello, signs, posts, greeting: ReadyNotice::Due }
    }

    /// Starts the thread. It never ends before the process: to end a thread takes system calls that it gives up.
    pub(crate) fn start(mut self) -> anyhow::Result<()> {
        let run = move || {
            // A panic has been logged, and what it left behind is not looked at any more.
            let why = catch_unwind(AssertUnwindSafe(|| self.run())).unwrap_or(VisitError::Fault);
            // If nobody takes it, the process ends already.
            let _ = self.posts.send(Err(why));
            loop {
                thread::park();
            }
        };
        let started = thread::Builder::new().name("control".to_owned()).spawn(run);
        started.map(drop).context("cannot start the control thread")
    }

    /// Goes from executor to executor; returns only for a reason that stays.
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
            // One that starts together with this process, or anew, is there in a moment.
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

    /// Asks for a seat and stays there until that ends.
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

    /// What the executor answers to a worker that asks for a seat.
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

    /// Tells whoever started the process, the first time, that it has a seat.
    fn say_ready(&mut self) {
        tracing::info!(executor = %self.executor.display(), "seated");
        if self.greeting == ReadyNotice::Due {
            self.greeting = ReadyNotice::Said;
            // It may not be listening any more; that is no reason to stop.
            let _ = writeln!(std::io::stdout(), "ready");
        }
    }
}

/// What never is: an executor does not end well for its workers.
enum Never {}

/// A seat being held.
struct ConsumerSession<'a> {
    connection: &'a WorkerEnd,
    handoff: &'a Handoff,
    library: MappedAdapters,
    signs: &'a ThreadStatus,
}

impl ConsumerSession<'_> {
    /// Does what the executor says until it hangs up.
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

    /// Whether there is nothing to receive for a while.
    fn is_silent(&self) -> bool {
        let mut watched = [PollFd::new(self.connection, PollFlags::IN)];
        matches!(poll(&mut watched, Some(&CLEAR)), Ok(0) | Err(Errno::INTR))
    }

    /// Maps an adapter, and says so once the thread that computes can know it.
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
                tracing::warn!(image, reason, "an adapter is not mapped");
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
        // `receive` has seen to their number.
        for fd in fds {
            let adapter = MappedAdapter::over(&Image::map(fd, bytes)?)?;
            self.library.add(offered.image, adapter)?;
        }
        Ok(())
    }

    /// Makes the library what the thread that computes finds next.
    fn show(&self) {
        self.signs.show(ConsumerStatus::Seated { adapters: self.library.adapters() });
        self.handoff.put(self.library.clone());
    }
}

/// The next message; waits for it.
fn receive(connection: &WorkerEnd) -> Result<(ToWorker, Vec<OwnedFd>), ReceiveError> {
    loop {
        if let Some(received) = connection.receive()? {
            return Ok(received);
        }
    }
}

/// Takes the seat, on the three regions that came with it.
fn join(seated: &SlotGranted, fds: Vec<OwnedFd>) -> Result<Consumer, VisitError> {
    let (Ok([control, x, sums]), Some(worker)) =
        (<[OwnedFd; 3]>::try_from(fds), WorkerNumber::new(seated.worker))
    else {
        return Err(VisitError::Unexpected("a seat that cannot be"));
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
