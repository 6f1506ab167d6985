//! Counts that another process waits for: spins briefly, then sleeps on the word.

use std::time::{Duration, Instant};

use crate::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::atomic::{AtomicU32, fence, spin_loop};
use crate::futex;

/// Polls of the word between two reads of the clock.
const LOOKS_PER_TICK: u32 = 64;

/// Time after which a sleeper looks again without a wake-up: the process that would wake it may be lost.
const LOOK: Duration = Duration::from_millis(100);

/// A count in shared memory with the number of its sleepers.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedCount<'a> {
    pub(super) count: &'a AtomicU32,
    pub(super) sleepers: &'a AtomicU32,
}

impl SharedCount<'_> {
    /// Publishes `count` and what this thread wrote before, and wakes the sleepers.
    pub(super) fn publish(self, count: u32) {
        // SYNC POINT group: releases the rows and the call, or the results, written before.
        self.count.store(count, Release);
        // Pairs with the fence in `sleep`. One of two fences comes first. If that one does, this thread sees
        // the sleeper. If this one does, the sleeper sees the count and does not sleep.
        fence(SeqCst);
        if self.sleepers.load(Relaxed) != 0 {
            futex::wake(self.count, u32::MAX >> 1);
        }
    }

    /// Returns the count, with all that was written before it was published.
    pub(super) fn get(self) -> u32 {
        // SYNC POINT group: acquires the rows and the call, or the results.
        self.count.load(Acquire)
    }

    /// Waits until `is_reached` holds for the count, and returns the count: spins for at most `spin`, then
    /// sleeps.
    pub(super) fn wait(self, spin: Duration, is_reached: impl Fn(u32) -> bool) -> u32 {
        let look = || Some(self.get()).filter(|&count| is_reached(count));
        if let Some(count) = look() {
            return count;
        }
        let start = (!spin.is_zero()).then(Instant::now);
        while start.is_some_and(|start| start.elapsed() < spin) {
            for _ in 0..LOOKS_PER_TICK {
                spin_loop();
                if let Some(count) = look() {
                    return count;
                }
            }
        }
        loop {
            let seen = self.get();
            if is_reached(seen) {
                return seen;
            }
            self.sleep(seen);
        }
    }

    /// Sleeps until the count is no longer `seen`, at most for [`LOOK`], or spuriously shorter.
    fn sleep(self, seen: u32) {
        self.sleepers.fetch_add(1, Relaxed);
        // Pairs with the fence in `publish`. If the fence there comes after this one, its thread sees the
        // sleeper. Otherwise the kernel, which compares the word before the sleep, sees the new count.
        fence(SeqCst);
        futex::wait(self.count, seen, LOOK);
        self.sleepers.fetch_sub(1, Relaxed);
    }
}
