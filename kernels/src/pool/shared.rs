//! Shared state of a pool's threads: the open region, the claiming of its chunks, and waiting.
//!
//! The state word holds the number of chunks in its upper half and the next chunk to claim in its lower half.
//! A claim is one addition, which never has to be retried under contention. A claimed number below the number
//! of chunks proves that the region is open, and the region stays open until that chunk is reported done.
//! Only in that time may a thread read the job. A thread reports all its chunks at once, when no more are
//! left. Each woken thread wakes some others. Measurements and alternatives: docs/performance/many-cores.md.

use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use rustix::thread::futex;

use super::BorrowedCores;

/// Time that an idle helper polls before it parks. Regions of a step follow each other within tens of
/// microseconds; between steps other processes (a gateway) need the core more than a spinning helper does.
const IDLE_SPIN: Duration = Duration::from_micros(60);

/// Time from the beginning of [`IDLE_SPIN`] in which a helper does not yield; later the helper yields between
/// polls. Otherwise a split client on a helper's core would often wait for the end of the spin before each of
/// its calls (docs/performance/split.md).
const SELFISH_SPIN: Duration = Duration::from_micros(10);

/// A yield longer than this gave the core to another computing process. The scheduler lets that process run
/// for milliseconds at any priority, while the step waits or loses the helper.
const LONG_YIELD: Duration = Duration::from_micros(300);

/// Time after a long yield in which a helper does not yield.
const NO_YIELD: Duration = Duration::from_millis(50);

/// Time that the caller polls for the last chunk of a region before it parks.
const JOIN_SPIN: Duration = Duration::from_micros(100);

/// Threads that one thread wakes. Each wake-up call takes a microsecond, and a thread needs several to run.
/// So the caller wakes few threads, which wake the others.
pub(super) const WOKEN_AT_ONCE: u32 = 8;

/// A region's work: a function of the chunk's index.
type RegionJob = *const (dyn Fn(usize) + Sync);

#[repr(align(128))]
struct Padded<T>(T);

/// Wakes some of the helpers.
pub(super) struct HelperBell {
    /// Incremented at each region of these helpers; they park on it.
    doorbell: Padded<AtomicU32>,
    parked: AtomicU32,
}

impl HelperBell {
    fn new() -> Self {
        Self { doorbell: Padded(AtomicU32::new(0)), parked: AtomicU32::new(0) }
    }

    pub(super) fn ring(&self) {
        // SeqCst on both sides: either the helper sees the new doorbell before it parks, or it is counted here.
        self.doorbell.0.fetch_add(1, Ordering::SeqCst);
        self.wake_some();
    }

    /// Wakes a few parked helpers, each of which wakes as many, so that the caller need not wake all in turn.
    fn wake_some(&self) {
        if self.parked.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.doorbell.0, futex::Flags::PRIVATE, WOKEN_AT_ONCE);
        }
    }
}

pub(super) struct PoolShared {
    /// `chunks << 32 | next to claim`; the lower half exceeds the upper by one for each late claim.
    state: Padded<AtomicU64>,
    /// Chunks not yet reported done. The caller waits for 0.
    pending: Padded<AtomicU32>,
    /// Whether the caller is parked on `pending`.
    caller_parked: AtomicBool,
    /// Bell of the helpers on the pool's own cores.
    pub(super) own: HelperBell,
    /// Bell of the helpers on borrowed cores.
    pub(super) borrowed: HelperBell,
    job: UnsafeCell<Option<RegionJob>>,
    pub(super) panicked: AtomicBool,
    pub(super) stop: AtomicBool,
}

// SAFETY: `job` is written only while no chunk is claimable and read only by holders of a claimed chunk; all other
// fields are atomic.
unsafe impl Sync for PoolShared {}
// SAFETY: the job pointer is only followed under the conditions of `Sync` above.
unsafe impl Send for PoolShared {}

impl PoolShared {
    pub(super) fn new() -> Self {
        Self {
            state: Padded(AtomicU64::new(0)),
            pending: Padded(AtomicU32::new(0)),
            caller_parked: AtomicBool::new(false),
            own: HelperBell::new(),
            borrowed: HelperBell::new(),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        }
    }

    /// Publishes a region, and wakes the helpers on borrowed cores if they take part. Only the pool's owner
    /// calls this, and only when no region is open.
    pub(super) fn open<'a>(
        &self,
        work: &'a (dyn Fn(usize) + Sync + 'a),
        chunks: u32,
        borrowed: BorrowedCores,
    ) {
        // SAFETY: the lifetime is erased; `run` does not return before every chunk is done, and the pointer is only
        // followed by holders of a chunk.
        let job: RegionJob =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + 'a), RegionJob>(work) };
        // SAFETY: no chunk is claimable, so no thread reads the cell.
        unsafe { *self.job.get() = Some(job) };
        self.pending.0.store(chunks, Ordering::Relaxed);
        // SYNC POINT region-open: releases the job and `pending` to the thread that claims a chunk.
        self.state.0.store(u64::from(chunks) << 32, Ordering::Release);
        self.own.ring();
        if borrowed == BorrowedCores::Used {
            self.borrowed.ring();
        }
    }

    /// Claims one chunk of the open region. Chunks ascend, so that memory prefetched beyond a chunk is soon
    /// used.
    fn claim(&self) -> Option<usize> {
        let chunk = |state: u64| {
            let (chunks, next) = (state >> 32, state & u64::from(u32::MAX));
            (next < chunks).then_some(next as usize)
        };
        // A load alone leaves the cache line with the threads that claim.
        chunk(self.state.0.load(Ordering::Relaxed))?;
        // SYNC POINT region-open: acquires the job.
        chunk(self.state.0.fetch_add(1, Ordering::Acquire))
    }

    pub(super) fn work_until_none_is_left(&self) {
        let mut done = 0;
        while let Some(chunk) = self.claim() {
            // SAFETY: this thread holds a chunk, so the region is open and its job stays valid.
            let work = unsafe { &*(*self.job.get()).expect("an open region has a job") };
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(chunk))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            done += 1;
        }
        // SYNC POINT chunk-done: releases the writes of the chunks to the caller.
        if done > 0
            && self.pending.0.fetch_sub(done, Ordering::SeqCst) == done
            && self.caller_parked.load(Ordering::SeqCst)
        {
            let _ = futex::wake(&self.pending.0, futex::Flags::PRIVATE, 1);
        }
    }

    /// Waits until every chunk is done, and returns the time taken.
    pub(super) fn join(&self) -> Duration {
        let begin = Instant::now();
        // SYNC POINT chunk-done: acquires the writes of the chunks.
        if spin_until(JOIN_SPIN, || self.pending.0.load(Ordering::Acquire) == 0) {
            return begin.elapsed();
        }
        self.caller_parked.store(true, Ordering::SeqCst);
        loop {
            let pending = self.pending.0.load(Ordering::SeqCst);
            if pending == 0 {
                break;
            }
            // A bound on every wait: a lost wake-up would cost only a millisecond.
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let _ = futex::wait(&self.pending.0, futex::Flags::PRIVATE, pending, Some(&timeout));
        }
        self.caller_parked.store(false, Ordering::SeqCst);
        begin.elapsed()
    }

    /// Runs a helper thread, which hears `bell`, until the pool stops.
    pub(super) fn help(&self, bell: &HelperBell) {
        let (mut seen, mut last_long_yield) = (0, None);
        while !self.stop.load(Ordering::SeqCst) {
            let look = || bell.doorbell.0.load(Ordering::SeqCst) != seen;
            let rest = IDLE_SPIN.saturating_sub(SELFISH_SPIN);
            let rung = spin_until(SELFISH_SPIN, look)
                || if last_long_yield.is_some_and(|at: Instant| at.elapsed() < NO_YIELD) {
                    spin_until(rest, look)
                } else {
                    yield_until(rest, &mut last_long_yield, look)
                };
            if !rung {
                bell.parked.fetch_add(1, Ordering::SeqCst);
                let _ = futex::wait(&bell.doorbell.0, futex::Flags::PRIVATE, seen, None);
                bell.parked.fetch_sub(1, Ordering::SeqCst);
                bell.wake_some();
            }
            seen = bell.doorbell.0.load(Ordering::SeqCst);
            self.work_until_none_is_left();
        }
    }
}

/// Polls `done` until it is true or the time is over; returns the last result.
fn spin_until(limit: Duration, done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // Reading the clock costs as much as dozens of polls.
        for _ in 0..64 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > limit {
            return false;
        }
    }
}

/// Polls like [`spin_until`], but yields between polls. Returns after a long yield, whose time is recorded.
fn yield_until(limit: Duration, last_long_yield: &mut Option<Instant>, done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    let mut now = start;
    while now - start <= limit {
        for _ in 0..8 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
        let before = std::mem::replace(&mut now, Instant::now());
        if now - before > LONG_YIELD {
            *last_long_yield = Some(now);
            break;
        }
    }
    done()
}
