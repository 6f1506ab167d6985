//! Where the compute thread reads the time, so that tests can set it.

use std::time::Instant;

/// A source of the time.
pub trait Clock: Send {
    /// The time now.
    fn now(&self) -> Instant;
}

/// The time of the machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
