//! Source of time, which tests and simulations can replace.

use std::{
    fmt, thread,
    time::{Duration, Instant},
};

/// Shortest sleep. Pieces of an emulated link are due every few hundred microseconds, and a thread that wakes
/// for each takes a sixth of the core that computes the base. The delay does not add up over pieces.
const SHORTEST_SLEEP: Duration = Duration::from_micros(500);

/// Monotonic clock, which a test can replace.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Returns the current time.
    fn now(&self) -> Instant;

    /// Sleeps until `at` or slightly longer; returns at once if `at` is past.
    fn sleep_until(&self, at: Instant) {
        // The deadline is absolute, so delays do not add up.
        while let Some(left) = at.checked_duration_since(self.now()).filter(|left| !left.is_zero()) {
            thread::sleep(left.max(SHORTEST_SLEEP));
        }
    }
}

/// Clock of the machine, based on [`Instant`].
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
