//! A pinned thread pool with little overhead and no unbounded spinning.
//!
//! A parallel region is a number of *chunks*. Threads, the caller included, *claim* chunks one at a time, so
//! a thread that the kernel has descheduled delays one chunk, not its share of the region. Waiting spins for
//! a bounded time and then parks on a futex, so other processes get the core.
//!
//! A chunk of a descheduled helper stalls the region for a scheduler's slice, a hundred times a region's
//! length. After a stall the caller works alone for a pause, so that the other process and the caller each
//! have a core. Pauses grow while the stalls go on.
//!
//! [`shared`] contains the claiming of chunks and the waiting; [`simulated_pool`] measures how work would be
//! divided among more threads than the machine has.

mod shared;
mod simulated_pool;

use std::{
    fmt, io,
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::thread::{CpuSet, sched_setaffinity};

pub use simulated_pool::ParallelRegion;

use shared::{PoolShared, WOKEN_AT_ONCE};
use simulated_pool::SimulatedPool;

/// Threshold of a stall: the last chunks take this much longer than the caller's own. A thread that passes a
/// message takes a core for less; a busy process takes it for some milliseconds.
const STALL: Duration = Duration::from_micros(1000);

/// Pause after a stall, during which the caller works alone: first and maximum length.
const SHORTEST_PAUSE: Duration = Duration::from_millis(3);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A stall this soon after a pause means that the other process is still active.
const SOON: Duration = Duration::from_millis(10);

/// Threads that compute together; one of them is the caller of [`ThreadPool::run`].
pub struct ThreadPool {
    shared: Arc<PoolShared>,
    helpers: Vec<JoinHandle<()>>,
    /// Number of the helpers on borrowed cores, which come last.
    lent: usize,
    borrowed: BorrowedCores,
    /// Core of the thread that calls [`ThreadPool::run`]; taken at the first call.
    callers_core: Option<usize>,
    help: HelperPause,
    rehearsal: Option<SimulatedPool>,
}

/// Whether the helpers on borrowed cores take part in regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BorrowedCores {
    /// The lenders compute there, so the helpers wait.
    Returned,
    /// The lenders sleep, so the helpers take part.
    Used,
}

/// Decides whether helpers are worth their stalls.
#[derive(Debug)]
struct HelperPause {
    is_paused: bool,
    pause_until: Instant,
    pause: Duration,
}

impl HelperPause {
    fn new() -> Self {
        Self { is_paused: false, pause_until: Instant::now(), pause: SHORTEST_PAUSE }
    }

    fn is_paused(&mut self) -> bool {
        self.is_paused = self.is_paused && Instant::now() < self.pause_until;
        self.is_paused
    }

    /// Records a stall by a helper. Stalls in close succession lengthen the pauses.
    fn stalled(&mut self) {
        let now = Instant::now();
        let again = now - self.pause_until < SOON;
        self.pause = if again { (2 * self.pause).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE };
        self.pause_until = now + self.pause;
        self.is_paused = true;
    }
}

impl ThreadPool {
    /// Creates a pool on `cores`: the first caller of [`ThreadPool::run`] is pinned to the first, helpers to
    /// the others.
    ///
    /// # Errors
    /// Fails if the operating system refuses a thread.
    pub fn new(cores: &[usize]) -> io::Result<Self> {
        Self::with_borrowed(cores, &[])
    }

    /// Creates a pool like [`ThreadPool::new`], with further helpers on cores of other processes. These take
    /// part while [`ThreadPool::use_borrowed`] says so, because the other processes sleep then.
    ///
    /// # Errors
    /// Fails if the operating system refuses a thread.
    pub fn with_borrowed(cores: &[usize], borrowed: &[usize]) -> io::Result<Self> {
        // If a later thread is refused, dropping the pool ends the earlier ones.
        let mut pool = Self {
            shared: Arc::new(PoolShared::new()),
            helpers: Vec::new(),
            lent: borrowed.len(),
            borrowed: BorrowedCores::Returned,
            callers_core: cores.first().copied(),
            help: HelperPause::new(),
            rehearsal: None,
        };
        let own = cores.iter().skip(1).map(|&core| (core, false));
        for (core, is_borrowed) in own.chain(borrowed.iter().map(|&core| (core, true))) {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("compute-{core}"));
            pool.helpers.push(builder.spawn(move || {
                let _ = pin(core);
                shared.help(if is_borrowed { &shared.borrowed } else { &shared.own });
            })?);
        }
        Ok(pool)
    }

    /// Number of helpers that the caller wakes, and that each woken helper wakes.
    pub const WOKEN_AT_ONCE: usize = WOKEN_AT_ONCE as usize;

    /// Creates a pool without helpers that divides work as `threads` threads would, and times it.
    #[must_use]
    pub fn rehearsal(threads: usize) -> Self {
        Self {
            shared: Arc::new(PoolShared::new()),
            helpers: Vec::new(),
            lent: 0,
            borrowed: BorrowedCores::Returned,
            callers_core: None,
            help: HelperPause::new(),
            rehearsal: Some(SimulatedPool::new(threads)),
        }
    }

    /// Returns the regions timed since the last call; empty unless the pool is a rehearsal.
    pub fn take_regions(&mut self) -> Vec<ParallelRegion> {
        self.rehearsal.as_mut().map(SimulatedPool::take).unwrap_or_default()
    }

    /// Lets the helpers on borrowed cores take part in later regions, or not; returns the earlier choice. A
    /// late helper may still take a chunk of a region without them.
    pub fn use_borrowed(&mut self, borrowed: BorrowedCores) -> BorrowedCores {
        std::mem::replace(&mut self.borrowed, borrowed)
    }

    /// Returns the number of threads that take part, the caller included; a rehearsal has a simulated number.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.rehearsal.as_ref().map_or(self.active_helpers() + 1, |rehearsal| rehearsal.threads)
    }

    fn active_helpers(&self) -> usize {
        match self.borrowed {
            BorrowedCores::Used => self.helpers.len(),
            BorrowedCores::Returned => self.helpers.len() - self.lent,
        }
    }

    /// Runs `work(0)` to `work(chunks - 1)`, each once, on all threads, and returns when all are done.
    ///
    /// # Panics
    /// Panics if `work` panicked for some chunk.
    pub fn run<W: Fn(usize) + Sync>(&mut self, chunks: usize, work: W) {
        if let Some(core) = self.callers_core.take() {
            // A core that this process may not use costs speed, not correctness.
            let _ = pin(core);
        }
        if let Some(rehearsal) = &mut self.rehearsal {
            return rehearsal.run(chunks, work);
        }
        if chunks <= 1 || self.active_helpers() == 0 || self.help.is_paused() {
            return alone(chunks, &work);
        }
        // The upper half of the range is reserved for late claims.
        let count = u32::try_from(chunks).ok().filter(|&chunks| chunks <= u32::MAX / 2);
        let count = count.expect("a region has fewer than 2^31 chunks");
        self.shared.open(&work, count, self.borrowed);
        let begin = Instant::now();
        self.shared.work_until_none_is_left();
        let own = begin.elapsed();
        // A helper claimed its last chunk no later than the caller's last, and chunks have similar lengths.
        if self.shared.join() > 2 * own + STALL {
            self.help.stalled();
        }
        assert!(
            !self.shared.panicked.swap(false, Ordering::Relaxed),
            "a chunk of a parallel region panicked"
        );
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.own.ring();
        self.shared.borrowed.ring();
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
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
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn pool(threads: usize) -> ThreadPool {
        ThreadPool::new(&vec![0; threads]).expect("threads on core 0")
    }

    #[test]
    fn every_chunk_runs_exactly_once() {
        for threads in [1, 2, 4, 9, 20] {
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
    fn helpers_on_borrowed_cores_take_part_while_they_are_used() {
        let mut pool = ThreadPool::with_borrowed(&[0], &[0, 0]).expect("threads on core 0");
        for (borrowed, threads) in
            [(BorrowedCores::Returned, 1), (BorrowedCores::Used, 3), (BorrowedCores::Returned, 1)]
        {
            pool.use_borrowed(borrowed);
            assert_eq!(pool.threads(), threads);
            let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            let caller = std::thread::current().id();
            let others = AtomicUsize::new(0);
            for _ in 0..50 {
                pool.run(100, |chunk| {
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                    others.fetch_add(usize::from(std::thread::current().id() != caller), Ordering::Relaxed);
                });
            }
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 50));
            if threads == 1 {
                assert_eq!(others.load(Ordering::Relaxed), 0, "the caller works alone");
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
    fn a_rehearsal_runs_every_chunk_of_each_region_in_order_on_the_caller() {
        let mut pool = ThreadPool::rehearsal(64);
        assert_eq!(pool.threads(), 64);
        let ran = std::sync::Mutex::new(Vec::new());
        for chunks in [3, 0, 2] {
            pool.run(chunks, |chunk| ran.lock().unwrap().push(chunk));
        }
        assert_eq!(ran.into_inner().unwrap(), [0, 1, 2, 0, 1]);
        let regions = pool.take_regions();
        assert_eq!(regions.iter().map(|region| region.chunks.len()).collect::<Vec<_>>(), [3, 0, 2]);
        assert!(pool.take_regions().is_empty() && self::pool(2).take_regions().is_empty());
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
