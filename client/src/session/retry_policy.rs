//! Duration and frequency of retries.

use std::time::{Duration, Instant};

/// First pause between attempts; each later pause doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Maximum pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A time limit for retries, with growing pauses.
#[derive(Debug)]
pub(super) struct RetryPolicy {
    limit: Duration,
    since: Option<Instant>,
    pause: Duration,
}

impl RetryPolicy {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, since: None, pause: FIRST_PAUSE }
    }

    /// Sleeps before the next attempt, at least `at_least_ms`; false at once if that exceeds the limit.
    pub(super) fn wait(&mut self, at_least_ms: u32) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let pause = self.pause.max(Duration::from_millis(at_least_ms.into()));
        if since.elapsed() + pause > self.limit {
            return false;
        }
        std::thread::sleep(pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        true
    }

    /// Returns the milliseconds since the first failure.
    pub(super) fn waited_ms(&self) -> u64 {
        let waited = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        u64::try_from(waited.as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_and_is_not_slept_beyond() {
        let mut patience = RetryPolicy::new(Duration::from_millis(100));
        assert!(!patience.wait(101), "a pause that does not fit is not begun");
        assert!(patience.wait(0) && patience.wait(30));
        let begun = Instant::now();
        while patience.wait(0) {
            assert!(begun.elapsed() < Duration::from_secs(10), "the time is over some day");
        }
        assert!(patience.waited_ms() >= 50);
    }
}
