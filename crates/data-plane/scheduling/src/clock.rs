//! Where the time comes from, so that tests and simulations can set it.

use std::{
    fmt, thread,
    time::{Duration, Instant},
};

/// Shortest sleep. Pieces of an emulated link are due every few hundred microseconds; a thread that wakes for each of them
/// takes a sixth of the core that the base computes on. What is late by this much is late once, not once a piece.
const SHORTEST_SLEEP: Duration = Duration::from_micros(500);

/// A clock that never goes back.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The time now.
    fn now(&self) -> Instant;

    /// Returns at `at` or soon after; at once if that is past.
    fn sleep_until(&self, at: Instant) {
        // The schedule is absolute, so lateness does not add up.
        while let Some(left) = at.checked_duration_since(self.now()).filter(|left| !left.is_zero()) {
            thread::sleep(left.max(SHORTEST_SLEEP));
        }
    }
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_clock_never_returns_before_its_time() {
        for wait_us in [0, 10, 200, 2_000] {
            let at = SystemClock.now() + Duration::from_micros(wait_us);
            SystemClock.sleep_until(at);
            assert!(SystemClock.now() >= at);
        }
    }
}
