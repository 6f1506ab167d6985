//! Copy thread: its steps, and the state that it shares with the engine's handle and the tickets.
//!
//! Loads and callbacks are foreign code: they run without the lock, and their panics do not stop other jobs.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use scheduling::{
    background_io::{BackgroundThrottle, ForegroundIo},
    clock::Clock,
};

use super::{
    BytesPerSecond, CopyEnd, CopyPriority, CopySource, CopyStats, SubmitError, Ticket,
    link::LinkSchedule,
    queue::{CopyQueue, DoneCallback, JobId, NextPiece, Submission},
};

/// Longest sleep before the thread checks whether the engine is being dropped.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

pub(super) struct CopyShared {
    queue: Mutex<CopyQueue>,
    /// Signals that there is work.
    pub(super) work: Condvar,
    /// Signals that a job has ended.
    settled: Condvar,
    closing: AtomicBool,
    copied_bytes: AtomicU64,
    busy_ns: AtomicU64,
    clock: Box<dyn Clock>,
    /// Origin of all times.
    began: Instant,
}

impl fmt::Debug for CopyShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("clock", &self.clock).finish_non_exhaustive()
    }
}

impl CopyShared {
    pub(super) fn new(max_jobs: usize, clock: Box<dyn Clock>) -> Self {
        Self {
            queue: Mutex::new(CopyQueue::new(max_jobs)),
            work: Condvar::new(),
            settled: Condvar::new(),
            closing: AtomicBool::new(false),
            copied_bytes: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            began: clock.now(),
            clock,
        }
    }

    fn now(&self) -> Duration {
        self.clock.now().saturating_duration_since(self.began)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, CopyQueue> {
        // No foreign code runs under the lock, so a panic elsewhere leaves the queue consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn submit(
        self: &Arc<Self>,
        class: CopyPriority,
        load: Box<dyn CopySource>,
        done: DoneCallback,
    ) -> Result<Ticket, SubmitError> {
        let ended = Arc::new(AtomicBool::new(false));
        let next_bytes = load.next_bytes();
        let submission = Submission { class, load, done, ended: Arc::clone(&ended) };
        // On a full queue the lock goes before `submission`, whose drop is foreign code.
        let mut queue = self.lock();
        queue.check_room()?;
        let job = queue.push(submission, next_bytes, self.now());
        drop(queue);
        self.work.notify_one();
        Ok(Ticket { shared: Arc::clone(self), job, ended })
    }

    pub(super) fn cancel(&self, job: JobId) {
        let mut queue = self.lock();
        if let Some(load) = queue.cancel(job) {
            drop(queue);
            discard(load);
            self.end(job, CopyEnd::Cancelled);
            self.work.notify_one();
            return;
        }
        while queue.lives(job) {
            queue = self.settled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end(&self, job: JobId, end: CopyEnd) {
        self.lock().end(job, end);
        self.settled.notify_all();
    }

    /// Cancels every job and ends the thread.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        // Locking once ensures that the thread cannot miss the flag between its check and its wait.
        drop(self.lock());
        self.work.notify_all();
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(super) fn stats(&self) -> CopyStats {
        let queue = self.lock();
        let ended = queue.ended();
        CopyStats {
            copied_bytes: self.copied_bytes.load(Ordering::Relaxed),
            copy_us: self.busy_ns.load(Ordering::Relaxed) / 1_000,
            done: ended.done,
            cancelled: ended.cancelled,
            failed: ended.failed,
            queued: CopyPriority::ALL.map(|class| queue.queued(class)),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerStep {
    Worked,
    /// All work yields to foreground reads; the next check is due after this time.
    GaveWay(Duration),
    /// There is no work until an owner submits a job.
    Idle,
    /// The engine was dropped and no job is left.
    Closed,
}

pub(super) struct CopyWorker {
    shared: Arc<CopyShared>,
    link: Option<LinkSchedule>,
    /// Foreground reads of the disk, and the debt to them.
    first: Option<(Arc<dyn ForegroundIo>, BackgroundThrottle)>,
    /// Time at which the last piece had been copied.
    busy_until: Duration,
}

impl CopyWorker {
    pub(super) fn new(shared: Arc<CopyShared>, bandwidth: Option<BytesPerSecond>) -> Self {
        Self { shared, link: bandwidth.map(LinkSchedule::new), first: None, busy_until: Duration::ZERO }
    }

    /// Lets jobs without a waiting request yield to the foreground reads `first`.
    pub(super) fn behind(self, first: Arc<dyn ForegroundIo>) -> Self {
        Self { first: Some((first, BackgroundThrottle::default())), ..self }
    }

    pub(super) fn run(&mut self) {
        loop {
            match self.step() {
                WorkerStep::Worked => {}
                WorkerStep::GaveWay(wait) => self.give_way(wait),
                WorkerStep::Idle => self.wait(),
                WorkerStep::Closed => return,
            }
        }
    }

    /// Sleeps until there is work: an owner to call, a piece to copy, or the end.
    fn wait(&self) {
        let mut queue = self.shared.lock();
        while !(queue.has_work() || self.shared.is_closing() && queue.is_empty()) {
            queue = self.shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Sleeps for `wait`, or until there is work that does not yield.
    fn give_way(&self, wait: Duration) {
        let queue = self.shared.lock();
        if queue.gives_way() && !self.shared.is_closing() {
            let _ = self.shared.work.wait_timeout(queue, wait);
        }
    }

    /// Returns how long a piece must still yield.
    fn remaining_wait(&mut self, piece: &NextPiece) -> Duration {
        let now = self.shared.clock.now();
        let wait = self.first.as_mut().map(|(first, deference)| deference.wait(&**first, now));
        wait.filter(|_| piece.gives_way()).unwrap_or_default()
    }

    /// Calls one owner, copies one piece, or drops one cancelled load.
    pub(super) fn step(&mut self) -> WorkerStep {
        let shared = Arc::clone(&self.shared);
        let mut queue = shared.lock();
        if let Some((done, end)) = queue.farewell() {
            drop(queue);
            // A faulty callback must not stop other jobs.
            let _ = catch_unwind(AssertUnwindSafe(|| done(end)));
            return WorkerStep::Worked;
        }
        let first = queue.first();
        let empty = queue.is_empty();
        drop(queue);
        match first {
            Some(piece) if shared.is_closing() => shared.cancel(piece.job),
            Some(piece) => match self.remaining_wait(&piece) {
                Duration::ZERO => self.deliver(piece),
                wait => return WorkerStep::GaveWay(wait),
            },
            None if empty && shared.is_closing() => return WorkerStep::Closed,
            None => return WorkerStep::Idle,
        }
        WorkerStep::Worked
    }

    fn deliver(&mut self, piece: NextPiece) {
        let Some(bytes) = piece.bytes else { return self.finish(piece.job) };
        // A piece that was queued behind the last one has waited since then, any other since its submission.
        let began = piece.ready.max(self.busy_until);
        let arrival = self.link.as_mut().map(|link| link.send(piece.ready, bytes));
        if let Some(arrival) = arrival {
            self.wait_on_link(arrival);
        }
        let begun = self.shared.now();
        if !self.shared.is_closing() {
            self.copy(piece.job, bytes);
        }
        self.busy_until = self.shared.now();
        if let Some((first, deference)) = &mut self.first {
            deference.add_debt(&**first, bytes, self.busy_until.saturating_sub(begun));
        }
        let busy = self.busy_until.saturating_sub(began);
        self.shared.busy_ns.fetch_add(u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Ends a job that had nothing to copy.
    fn finish(&self, job: JobId) {
        let load = self.shared.lock().take(job);
        if let Some(load) = load {
            discard(load);
            self.shared.end(job, CopyEnd::Done);
        }
    }

    /// Waits until a piece arrives. The queue holds the load meanwhile, so the job can be cancelled.
    fn wait_on_link(&self, arrival: Duration) {
        let CopyShared { clock, began, .. } = &*self.shared;
        let mut now = self.shared.now();
        while now < arrival && !self.shared.is_closing() {
            clock.sleep_until(*began + arrival.min(now + LONGEST_SLEEP));
            now = self.shared.now();
        }
    }

    fn copy(&self, job: JobId, bytes: usize) {
        // The load is gone if the job was cancelled during the wait.
        let Some(mut load) = self.shared.lock().take(job) else { return };
        let copied = catch_unwind(AssertUnwindSafe(|| {
            load.copy_next();
            load.next_bytes()
        }));
        if copied.is_ok() {
            self.shared.copied_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        let (load, end) = match copied {
            Ok(Some(next_bytes)) => {
                let unwanted = self.shared.lock().put_back(job, load, next_bytes);
                let Some(load) = unwanted else { return };
                (load, CopyEnd::Cancelled)
            }
            Ok(None) => (load, CopyEnd::Done),
            Err(_) => (load, CopyEnd::Failed),
        };
        discard(load);
        self.shared.end(job, end);
    }
}

/// Drops a load; a panic in its drop must not stop other jobs.
fn discard(load: Box<dyn CopySource>) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(load)));
}
