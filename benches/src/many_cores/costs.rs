//! Cost of synchronization between threads of the pool, measured between two.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use kernels::ThreadPool;

use super::row;
use crate::report::Comparison;

const CLAIMS: usize = 100_000;
const MAX_TRIES: usize = 20;
const MEETINGS: usize = 1000;
/// Longer than a helper spins before it sleeps.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PoolCosts {
    /// Time that a claim or report occupies a word which another thread used before.
    pub(super) claim: Duration,
    /// From a region's start until a spinning helper can claim.
    pub(super) arrival: Duration,
    /// From a region's start until a sleeping helper can claim.
    pub(super) waking: Duration,
    /// Time of the system call that wakes one helper.
    pub(super) wake_call: Duration,
}

impl PoolCosts {
    pub(super) const NONE: Self = Self {
        claim: Duration::ZERO,
        arrival: Duration::ZERO,
        waking: Duration::ZERO,
        wake_call: Duration::ZERO,
    };

    /// Least disturbed of `runs` measurements on two of `cores`.
    ///
    /// # Errors
    /// If there are not two cores, or no thread can be started.
    pub(super) fn measure(cores: &[usize], runs: usize) -> Result<Self> {
        ensure!(cores.len() > 1, "what two threads cost each other needs two cores: --threads 2");
        let cores = cores[..2].to_vec();
        // A new thread, since a pool pins its caller to a core.
        let measured = thread::spawn(move || -> Result<Self> {
            let mut pool = ThreadPool::new(&cores)?;
            let mut least = |time: fn(&mut ThreadPool) -> Duration| {
                let times = (0..runs).map(|_| time(&mut pool));
                times.min().unwrap_or_default()
            };
            let (claim, met, woken, wake_call) =
                (least(claim), least(meeting), least(woken), least(|_| wake_call()));
            // A meeting ends with a report and the caller's check of it.
            let arrival = |meeting: Duration| meeting.saturating_sub(2 * claim).max(claim);
            Ok(Self { claim, arrival: arrival(met), waking: arrival(woken), wake_call })
        });
        measured.join().unwrap_or_else(|_| Err(anyhow!("measuring the pool panicked")))
    }

    /// Rows of the output, beside the time of a claim.
    ///
    /// # Errors
    /// Never.
    pub(super) fn rows(&self) -> Result<Vec<Comparison>> {
        let ns = |time: Duration| time.as_secs_f64() * 1e9;
        let cases = [
            ("a claim", self.claim),
            ("a helper comes", self.arrival),
            ("a helper is woken", self.waking),
            ("a call to wake", self.wake_call),
        ];
        let row = |(case, time): (&str, _)| {
            row(format!("{case}, 2 threads for real"), "ns", ns(time), ("a claim", ns(self.claim)), None)
        };
        cases.into_iter().map(row).collect()
    }
}

/// Time of one of many empty claims, so that only the word's transfer counts. If another process held the
/// helper's core, the measurement repeats.
fn claim(pool: &mut ThreadPool) -> Duration {
    let caller = thread::current().id();
    let mut took = Duration::ZERO;
    for _ in 0..MAX_TRIES {
        let helped = AtomicUsize::new(0);
        let begin = Instant::now();
        pool.run(CLAIMS, |_| {
            if thread::current().id() != caller {
                helped.fetch_add(1, Ordering::Relaxed);
            }
        });
        took = begin.elapsed() / CLAIMS as u32;
        if helped.into_inner() > CLAIMS / 4 {
            break;
        }
        thread::sleep(50 * PAUSE);
    }
    took
}

/// Time of a region that ends only when both threads are there.
fn meeting(pool: &mut ThreadPool) -> Duration {
    let begin = Instant::now();
    for _ in 0..MEETINGS {
        meet(pool);
    }
    begin.elapsed() / MEETINGS as u32
}

/// Time of such a region when the helper has gone to sleep.
fn woken(pool: &mut ThreadPool) -> Duration {
    let rounds = MEETINGS / 20;
    let after_a_pause = |_| {
        thread::sleep(PAUSE);
        let begin = Instant::now();
        meet(pool);
        begin.elapsed()
    };
    usual((0..rounds).map(after_a_pause))
}

fn usual(times: impl Iterator<Item = Duration>) -> Duration {
    let mut times: Vec<Duration> = times.collect();
    times.sort();
    times[times.len() / 2]
}

/// Time of waking a thread that sleeps as helpers do.
fn wake_call() -> Duration {
    let rounds = MEETINGS / 20;
    let sleeper = thread::spawn(move || (0..rounds).for_each(|_| thread::park()));
    let call = |_| {
        thread::sleep(PAUSE);
        let begin = Instant::now();
        sleeper.thread().unpark();
        begin.elapsed()
    };
    let took = usual((0..rounds).map(call));
    // Repeats the wake-up, in case the sleeper missed it.
    while !sleeper.is_finished() {
        sleeper.thread().unpark();
        thread::yield_now();
    }
    took
}

fn meet(pool: &mut ThreadPool) {
    let here = AtomicUsize::new(0);
    pool.run(2, |_| {
        here.fetch_add(1, Ordering::AcqRel);
        // If another process holds the helper's core, the pool runs without helpers, so the wait is limited.
        let begin = Instant::now();
        while here.load(Ordering::Acquire) < 2 && begin.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
    });
}
