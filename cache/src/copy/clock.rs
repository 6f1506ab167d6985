//! The time a copy engine lives by, so that tests need none of their own.

use std::{
    fmt, thread,
    time::{Duration, Instant},
};

/// Shortest sleep. Pieces of an emulated link are due every few hundred microseconds; a thread that wakes for each of them
/// takes a sixth of the core that the base computes on. What is late by this much is late once, not once a piece.
const SHORTEST_SLEEP: Duration = Duration::from_micros(500);

/// A clock that never goes back.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since the clock began.
    fn now(&self) -> Duration;

    /// Returns at `at` or soon after; at once if that is past.
    fn sleep_until(&self, at: Duration);
}

/// The machine's clock.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// A clock that begins now.
    #[must_use]
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep_until(&self, at: Duration) {
        // The schedule is absolute, so lateness does not add up.
        while let Some(left) = at.checked_sub(self.now()).filter(|left| !left.is_zero()) {
            thread::sleep(left.max(SHORTEST_SLEEP));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_clock_never_returns_before_its_time() {
        let clock = SystemClock::new();
        for wait_us in [0, 10, 200, 2_000] {
            let at = clock.now() + Duration::from_micros(wait_us);
            clock.sleep_until(at);
            assert!(clock.now() >= at);
        }
    }
}
