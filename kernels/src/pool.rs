//! A pinned thread pool with little overhead and no unbounded spinning.
//!
//! A parallel region is a number of *chunks*. Threads, the caller among them, *claim* chunks one at a time, so a
//! thread that the kernel has descheduled holds back one chunk, not its share of the region. Waiting spins for a
//! bounded time and then parks on a futex, so a busy neighbour gets the core.
//!
//! A chunk that a descheduled helper holds stalls the region for a scheduler's slice, a hundred times a region's length.
//! Once that happens the caller works alone for a while: a neighbour then has a core, and so has the caller. The
//! helpers are tried again after pauses that grow while the stalls go on.
//!
//! The state word holds the region's number in its upper half and the chunks left to claim in its lower half. A
//! claim is a compare-and-swap that takes one chunk, so whoever succeeds knows that the region is still open, and
//! it stays open until that chunk is reported done: only then may the job be read.

use std::{
    cell::UnsafeCell,
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::thread::{CpuSet, futex, sched_setaffinity};

/// How long an idle helper looks for the next region before it parks. Regions of a step follow each other within tens
/// of microseconds; between steps others (a gateway) want the core more than a spinning helper does.
const IDLE_SPIN: Duration = Duration::from_micros(60);

/// How much of that a helper has its core to itself; then it lets others have the core between two looks. A split client on
/// a helper's core would otherwise often wait for the spin's end before each of its calls (docs/performance/split.md).
const SELFISH_SPIN: Duration = Duration::from_micros(10);

/// How long the caller looks for the last chunk of a region before it parks.
const JOIN_SPIN: Duration = Duration::from_micros(100);

/// A region is stalled if its last chunks take this much longer than the caller's own. A thread that only passes a
/// message takes a core for less; a neighbour that computes takes it for a scheduler's slice of some milliseconds.
const STALL: Duration = Duration::from_micros(1000);

/// How long the caller works alone after a stall: at first, and at most.
const SHORTEST_PAUSE: Duration = Duration::from_millis(3);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A stall so soon after a pause says that the neighbour is still there.
const SOON: Duration = Duration::from_millis(10);

/// Threads that compute together; one of them is the caller of [`Pool::run`].
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Where the thread that calls [`Pool::run`] goes; taken at its first call.
    callers_core: Option<usize>,
    help: Help,
}

/// Whether the helpers are worth their stalls.
#[derive(Debug)]
struct Help {
    is_paused: bool,
    /// End of the present or the last pause.
    pause_until: Instant,
    /// Length of the present or the last pause.
    pause: Duration,
}

impl Help {
    fn new() -> Self {
        Self { is_paused: false, pause_until: Instant::now(), pause: SHORTEST_PAUSE }
    }

    /// Whether the caller works alone now.
    fn is_paused(&mut self) -> bool {
        self.is_paused = self.is_paused && Instant::now() < self.pause_until;
        self.is_paused
    }

    /// A helper held the region up. Stalls that follow each other closely lengthen the pauses.
    fn stalled(&mut self) {
        let now = Instant::now();
        let again = now - self.pause_until < SOON;
        self.pause = if again { (2 * self.pause).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE };
        self.pause_until = now + self.pause;
        self.is_paused = true;
    }
}

/// A region's work: a function of the chunk's index.
type Job = *const (dyn Fn(usize) + Sync);

#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    /// `region << 32 | chunks left to claim`.
    state: Padded<AtomicU64>,
    /// Chunks claimed or claimable but not yet done. The caller waits for 0.
    pending: Padded<AtomicU32>,
    /// The caller is parked on `pending`.
    caller_parked: AtomicBool,
    /// Bumped at each region; helpers park on it.
    doorbell: Padded<AtomicU32>,
    parked_helpers: AtomicU32,
    /// The open region's work and its number of chunks.
    job: UnsafeCell<Option<(Job, usize)>>,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is written only while no chunk is claimable and read only by holders of a claimed chunk; everything
// else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: the job pointer is only followed under the protocol above.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool on `cores`: the thread that first calls [`Pool::run`] is pinned to the first, a helper to each other.
    ///
    /// # Errors
    ///
    /// The operating system refuses a thread.
    pub fn new(cores: &[usize]) -> io::Result<Self> {
        // Should a later thread be refused, dropping the pool ends those there are.
        let mut pool = Self {
            shared: Arc::new(Shared::new()),
            helpers: Vec::new(),
            callers_core: cores.first().copied(),
            help: Help::new(),
        };
        for &core in cores.iter().skip(1) {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("compute-{core}"));
            pool.helpers.push(builder.spawn(move || {
                let _ = pin(core);
                shared.help();
            })?);
        }
        Ok(pool)
    }

    /// Threads that compute, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work(0)` to `work(chunks - 1)`, each once, on all threads, and returns when all are done.
    ///
    /// # Panics
    ///
    /// If `work` panicked for some chunk.
    pub fn run<W: Fn(usize) + Sync>(&mut self, chunks: usize, work: W) {
        if let Some(core) = self.callers_core.take() {
            // A core this process may not use costs speed, not correctness.
            let _ = pin(core);
        }
        if chunks <= 1 || self.helpers.is_empty() || self.help.is_paused() {
            return alone(chunks, &work);
        }
        let count = u32::try_from(chunks).expect("a region has fewer than 2^32 chunks");
        self.shared.open(&work, count);
        let begin = Instant::now();
        self.shared.work_until_none_is_left();
        let own = begin.elapsed();
        // Whatever the helper claimed, it did not claim it later than the caller's last chunk, and chunks are alike.
        if self.shared.join() > 2 * own + STALL {
            self.help.stalled();
        }
        assert!(
            !self.shared.panicked.swap(false, Ordering::Relaxed),
            "a chunk of a parallel region panicked"
        );
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.ring();
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

impl Shared {
    fn new() -> Self {
        Self {
            state: Padded(AtomicU64::new(0)),
            pending: Padded(AtomicU32::new(0)),
            caller_parked: AtomicBool::new(false),
            doorbell: Padded(AtomicU32::new(0)),
            parked_helpers: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        }
    }

    /// Publishes a region. Only the pool's owner calls this, and only when no region is open.
    fn open<'a>(&self, work: &'a (dyn Fn(usize) + Sync + 'a), chunks: u32) {
        // SAFETY: the lifetime is erased; `run` does not return before every chunk is done, and the pointer is only
        // followed by holders of a chunk.
        let job: Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + 'a), Job>(work) };
        // SAFETY: no chunk is claimable, so nobody reads the cell.
        unsafe { *self.job.get() = Some((job, chunks as usize)) };
        self.pending.0.store(chunks, Ordering::Relaxed);
        let region = (self.state.0.load(Ordering::Relaxed) >> 32) + 1;
        // SYNC POINT region-open: releases the job and `pending` to whoever claims a chunk.
        self.state.0.store(region << 32 | u64::from(chunks), Ordering::Release);
        self.ring();
    }

    /// Tells helpers that there is something to see.
    fn ring(&self) {
        // SeqCst on both sides: either the helper sees the new doorbell before it parks, or it is counted here.
        self.doorbell.0.fetch_add(1, Ordering::SeqCst);
        if self.parked_helpers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.doorbell.0, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }

    /// Takes one chunk of the open region: how many were left, this one included.
    fn claim(&self) -> Option<usize> {
        let mut state = self.state.0.load(Ordering::Acquire);
        loop {
            let left = state & u64::from(u32::MAX);
            if left == 0 {
                return None;
            }
            // SYNC POINT region-open: acquires the job.
            match self.state.0.compare_exchange_weak(state, state - 1, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(left as usize),
                Err(now) => state = now,
            }
        }
    }

    fn work_until_none_is_left(&self) {
        while let Some(left) = self.claim() {
            // SAFETY: a chunk is held, so the region is open and its job stays where it is.
            let (work, chunks) = unsafe {
                let (job, chunks) = (*self.job.get()).expect("an open region has a job");
                (&*job, chunks)
            };
            // In ascending order, so that what a thread asks memory for ahead of its chunk is soon needed.
            let chunk = chunks - left;
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(chunk))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            // SYNC POINT chunk-done: releases what the chunk wrote to the caller.
            if self.pending.0.fetch_sub(1, Ordering::SeqCst) == 1 && self.caller_parked.load(Ordering::SeqCst)
            {
                let _ = futex::wake(&self.pending.0, futex::Flags::PRIVATE, 1);
            }
        }
    }

    /// Waits until every chunk is done; says how long that took.
    fn join(&self) -> Duration {
        let begin = Instant::now();
        // SYNC POINT chunk-done: acquires what the chunks wrote.
        if spin_until(JOIN_SPIN, || self.pending.0.load(Ordering::Acquire) == 0) {
            return begin.elapsed();
        }
        self.caller_parked.store(true, Ordering::SeqCst);
        loop {
            let pending = self.pending.0.load(Ordering::SeqCst);
            if pending == 0 {
                break;
            }
            // A bound on every wait: should a wake-up ever be lost, it costs a millisecond.
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let _ = futex::wait(&self.pending.0, futex::Flags::PRIVATE, pending, Some(&timeout));
        }
        self.caller_parked.store(false, Ordering::SeqCst);
        begin.elapsed()
    }

    /// A helper's life.
    fn help(&self) {
        let mut seen = 0;
        while !self.stop.load(Ordering::SeqCst) {
            let look = || self.doorbell.0.load(Ordering::SeqCst) != seen;
            let rung =
                spin_until(SELFISH_SPIN, look) || yield_until(IDLE_SPIN.saturating_sub(SELFISH_SPIN), look);
            if !rung {
                self.parked_helpers.fetch_add(1, Ordering::SeqCst);
                let _ = futex::wait(&self.doorbell.0, futex::Flags::PRIVATE, seen, None);
                self.parked_helpers.fetch_sub(1, Ordering::SeqCst);
            }
            seen = self.doorbell.0.load(Ordering::SeqCst);
            self.work_until_none_is_left();
        }
    }
}

/// Looks until `done` or the time is over; says which.
fn spin_until(limit: Duration, done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // The clock costs as much as dozens of looks.
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

/// As [`spin_until`], but whoever else wants this core has it between two looks.
fn yield_until(limit: Duration, done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() <= limit {
        for _ in 0..8 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
    }
    false
}

/// Runs every chunk on this thread; panics at the end if one of them did.
fn alone(chunks: usize, work: &(impl Fn(usize) + Sync)) {
    let panicked = |chunk| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(chunk))).is_err();
    let panics = (0..chunks).filter(|&chunk| panicked(chunk)).count();
    assert!(panics == 0, "a chunk of a parallel region panicked");
}

fn pin(core: usize) -> io::Result<()> {
    if core >= CpuSet::MAX_CPU {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no core {core}")));
    }
    let mut set = CpuSet::new();
    set.set(core);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    fn pool(threads: usize) -> Pool {
        Pool::new(&vec![0; threads]).expect("threads on core 0")
    }

    #[test]
    fn every_chunk_runs_exactly_once() {
        for threads in [1, 2, 4] {
            let mut pool = pool(threads);
            for chunks in [0, 1, 2, 3, 17, 1000] {
                let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(chunks, |chunk| {
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {chunks} chunks"
                );
            }
        }
    }

    #[test]
    fn many_short_regions_with_pauses_lose_no_wakeup() {
        let mut pool = pool(3);
        let total = AtomicUsize::new(0);
        for round in 0..2000 {
            pool.run(3, |_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            if round % 200 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(total.load(Ordering::Relaxed), 6000);
    }

    #[test]
    fn a_panic_in_a_chunk_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = pool(2);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, |chunk| assert_ne!(chunk, 3, "this chunk panics on purpose"));
        }));
        assert!(outcome.is_err());
        let ran = AtomicUsize::new(0);
        pool.run(8, |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.load(Ordering::Relaxed), 8);
    }
}
