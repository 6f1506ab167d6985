//! Copy engine: one thread that moves blocks and adapters between memory tiers, piece by piece.
//!
//! Before each piece the engine selects the most urgent job again. So a job for which a request waits
//! ([`CopyPriority::Demand`]) overtakes swap-ins and preloads at the next piece. On an emulated link, a piece
//! is copied only when its time on that link is over, so no reader sees it earlier than it could have
//! arrived. If copies share a disk with foreground reads, jobs without a waiting request yield to those reads
//! ([`scheduling::background_io`]).
//!
//! # Layout
//!
//! - `queue`: orders the jobs and reports their ends.
//! - `worker`: the thread's steps, and the state that it shares with engine and tickets.
//! - `link`: computes when a piece arrives on an emulated link.
//!
//! A job ends in exactly one way ([`CopyEnd`]), which its owner's callback receives on the engine's thread.

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

/// Maximum number of jobs in an engine.
pub const MAX_JOBS: usize = 4096;

/// Urgency of a copy job; the first is the most urgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopyPriority {
    /// A request waits for the copied data.
    Demand,
    /// A policy predicts that the data will be used.
    SwapIn,
    /// The data may be used later.
    Preload,
}

impl CopyPriority {
    /// All priorities, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Demand, Self::SwapIn, Self::Preload];
}

/// Data to copy, piece by piece.
pub trait CopySource: Send {
    /// Returns the size of the next piece in bytes, the same until it is copied; `None` if nothing is left.
    fn next_bytes(&self) -> Option<usize>;

    /// Copies the next piece, which others may see on return. The method must not wait for the engine.
    fn copy_next(&mut self);
}

/// Result of a copy job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEnd {
    /// All pieces were copied.
    Done,
    /// The job was cancelled, or the engine was dropped, before all pieces were copied.
    Cancelled,
    /// The copy source panicked during the copy.
    Failed,
}

/// Error of a job that was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("the copy engine has {limit} jobs, which is the limit; submit again when one has ended")]
    Full {
        /// Maximum number of jobs in the engine.
        limit: usize,
    },
}

/// Statistics of an engine since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Number of bytes that were copied.
    pub copied_bytes: u64,
    /// Time in which there was a piece to copy, in microseconds, including an emulated link's time.
    pub copy_us: u64,
    /// Number of jobs that ended [`CopyEnd::Done`].
    pub done: u64,
    /// Number of jobs that ended [`CopyEnd::Cancelled`].
    pub cancelled: u64,
    /// Number of jobs that ended [`CopyEnd::Failed`].
    pub failed: u64,
    /// Number of unfinished jobs by priority, in the order of [`CopyPriority::ALL`].
    pub queued: [usize; 3],
}

/// Handle of the copy thread. Dropping it cancels all jobs and ends the thread.
#[derive(Debug)]
pub struct CopyEngine {
    shared: Arc<CopyShared>,
    bandwidth: Option<BytesPerSecond>,
    thread: Option<JoinHandle<()>>,
}

impl CopyEngine {
    /// Starts the thread. With a `link`, copies take as long as on a link of that bandwidth.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub fn start(link: Option<BytesPerSecond>) -> io::Result<Self> {
        Self::with_clock(link, MAX_JOBS, Box::new(SystemClock))
    }

    /// Starts the thread on a disk where foreground reads `first` precede jobs without a waiting request.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub fn start_behind(first: Arc<dyn ForegroundIo>) -> io::Result<Self> {
        let shared = Arc::new(CopyShared::new(MAX_JOBS, Box::new(SystemClock)));
        Self::run(CopyWorker::new(Arc::clone(&shared), None).behind(first), shared, None)
    }

    /// Starts as [`start`](Self::start), with another clock and at most `max_jobs` unfinished jobs.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
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

    /// Queues a job. `done` is called once, on the engine's thread, after `load` was dropped. The callback
    /// may submit and cancel jobs, but all other jobs wait while it runs.
    ///
    /// # Errors
    /// Returns an error if the queue is full; then `load` and `done` are dropped without a call.
    pub fn submit(
        &self,
        class: CopyPriority,
        load: Box<dyn CopySource>,
        done: Box<dyn FnOnce(CopyEnd) + Send>,
    ) -> Result<Ticket, SubmitError> {
        self.shared.submit(class, load, done)
    }

    /// Returns the bandwidth of the emulated link.
    #[must_use]
    pub fn link(&self) -> Option<BytesPerSecond> {
        self.bandwidth
    }

    /// Returns statistics since the start.
    #[must_use]
    pub fn stats(&self) -> CopyStats {
        self.shared.stats()
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        self.shared.close();
        // A callback may hold the last handle: the thread cannot join itself, and ends after the callback.
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// Handle of a job for its owner. Dropping it does not affect the job.
#[derive(Debug, Clone)]
pub struct Ticket {
    shared: Arc<CopyShared>,
    job: JobId,
    ended: Arc<AtomicBool>,
}

impl Ticket {
    /// Moves the job to the end of the more urgent class `class`; never lowers its urgency.
    pub fn raise(&self, class: CopyPriority) {
        self.shared.lock().raise(self.job, class);
        self.shared.work.notify_one();
    }

    /// Cancels the job and waits until the engine has dropped the load. The wait is at most the copy of the
    /// current piece, however slow an emulated link is. A load must not call this method.
    pub fn cancel(&self) {
        self.shared.cancel(self.job);
    }

    /// Whether the job has ended, in any way. The owner's callback was called, or is about to be.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}
