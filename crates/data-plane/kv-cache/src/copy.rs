//! The copy engine: one thread that moves everything between tiers, piece by piece.
//!
//! Before each piece the engine looks again at who is first, so what a request waits for ([`CopyPriority::Demand`])
//! overtakes at the next piece whatever is brought in ahead of its need. Where a link is emulated, a piece is copied
//! only when its time on that link is over: it is never seen sooner than it could have arrived. Where somebody comes first at the
//! disk that copies share, those that nobody waits for give way ([`scheduling::background_io`]).
//!
//! # Layout
//!
//! - `queue`: whose turn it is, and who has ended.
//! - `worker`: the thread's steps, and what it shares with engine and tickets.
//! - `link`: when a piece arrives on an emulated link.
//!
//! A load ends in exactly one way ([`CopyEnd`]), and whoever submitted it is told on the engine's thread.

mod link;
mod queue;
#[cfg(test)]
mod tests;
mod worker;

pub use self::link::BytesPerSecond;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use scheduling::{
    background_io::ForegroundIo,
    clock::{Clock, SystemClock},
};
use thiserror::Error;

use self::{
    queue::JobId,
    worker::{CopyShared, CopyWorker},
};

/// Jobs an engine keeps at most.
pub const MAX_JOBS: usize = 4096;

/// How urgent a job is; the first is the most urgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopyPriority {
    /// A request waits for it.
    Demand,
    /// A policy has decided that it will be used.
    SwapIn,
    /// It may be used.
    Preload,
}

impl CopyPriority {
    /// All classes, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Demand, Self::SwapIn, Self::Preload];
}

/// Something to copy, piece by piece.
pub trait CopySource: Send {
    /// Bytes of the next piece; `None` when nothing is left. The same at every call until the piece is copied.
    fn next_bytes(&self) -> Option<usize>;

    /// Copies the next piece; others may see it as soon as this returns. It must not wait for the engine.
    fn copy_next(&mut self);
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEnd {
    /// All of it was copied.
    Done,
    /// It was cancelled, or the engine was dropped, before all of it was copied.
    Cancelled,
    /// It panicked.
    Failed,
}

/// Why a job was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("the copy engine has {limit} jobs and takes no more; submit again when one has ended")]
    Full {
        /// Jobs it keeps at most.
        limit: usize,
    },
}

/// Figures of an engine since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// Time in which there was a piece to copy, an emulated link's time included, in microseconds.
    pub copy_us: u64,
    /// Jobs that ended [`CopyEnd::Done`].
    pub done: u64,
    /// Jobs that ended [`CopyEnd::Cancelled`].
    pub cancelled: u64,
    /// Jobs that ended [`CopyEnd::Failed`].
    pub failed: u64,
    /// Jobs that have not ended, in the order of [`CopyPriority::ALL`].
    pub queued: [usize; 3],
}

/// See the module. Dropping it cancels what is left and ends its thread.
#[derive(Debug)]
pub struct CopyEngine {
    shared: Arc<CopyShared>,
    bandwidth: Option<BytesPerSecond>,
    thread: Option<JoinHandle<()>>,
}

impl CopyEngine {
    /// Starts the thread. With a `link`, copying takes as long as a link of that bandwidth would.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(link: Option<BytesPerSecond>) -> io::Result<Self> {
        Self::with_clock(link, MAX_JOBS, Box::new(SystemClock))
    }

    /// Starts the thread at a disk at which somebody else comes `first`, but for what a request waits for.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start_behind(first: Arc<dyn ForegroundIo>) -> io::Result<Self> {
        let shared = Arc::new(CopyShared::new(MAX_JOBS, Box::new(SystemClock)));
        Self::run(CopyWorker::new(Arc::clone(&shared), None).behind(first), shared, None)
    }

    /// As [`start`](Self::start), with another clock and at most `max_jobs` jobs that have not ended.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn with_clock(
        link: Option<BytesPerSecond>,
        max_jobs: usize,
        clock: Box<dyn Clock>,
    ) -> io::Result<Self> {
        let shared = Arc::new(CopyShared::new(max_jobs, clock));
        Self::run(CopyWorker::new(Arc::clone(&shared), link), shared, link)
    }

    fn run(
        mut courier: CopyWorker,
        shared: Arc<CopyShared>,
        bandwidth: Option<BytesPerSecond>,
    ) -> io::Result<Self> {
        let thread = thread::Builder::new().name("copy".to_owned()).spawn(move || courier.run())?;
        Ok(Self { shared, bandwidth, thread: Some(thread) })
    }

    /// Takes a job. `done` is called once, on the engine's thread, after the load was dropped; it may submit and
    /// cancel others, but whatever it waits for, all other jobs wait for too.
    ///
    /// # Errors
    /// If the queue is full; then `load` and `done` are dropped and `done` is not called.
    pub fn submit(
        &self,
        class: CopyPriority,
        load: Box<dyn CopySource>,
        done: Box<dyn FnOnce(CopyEnd) + Send>,
    ) -> Result<Ticket, SubmitError> {
        self.shared.submit(class, load, done)
    }

    /// The bandwidth of the emulated link.
    #[must_use]
    pub fn link(&self) -> Option<BytesPerSecond> {
        self.bandwidth
    }

    /// Figures since the start.
    #[must_use]
    pub fn stats(&self) -> CopyStats {
        self.shared.stats()
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        self.shared.close();
        // A callback may hold the last handle: the thread cannot wait for itself, and ends after it.
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// A job's owner holds it. Dropping it leaves the job alone.
#[derive(Debug, Clone)]
pub struct Ticket {
    shared: Arc<CopyShared>,
    job: JobId,
    ended: Arc<AtomicBool>,
}

impl Ticket {
    /// Makes the job more urgent: it goes behind those that are in `class` already. Never makes it less urgent.
    pub fn raise(&self, class: CopyPriority) {
        self.shared.lock().raise(self.job, class);
        self.shared.work.notify_one();
    }

    /// Ends the job. When this returns the engine has dropped the load; that takes no longer than copying the piece
    /// that is being copied, however slow an emulated link is. Must not be called by a load.
    pub fn cancel(&self) {
        self.shared.cancel(self.job);
    }

    /// Whether the job has ended, in whatever way. Its owner was told, or is about to be.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}
