//! How often workers are seated. A board has a number for each worker it ever seats and never uses one twice, and each
//! seat begins with memory of its own: whoever says hello and leaves, over and over, must not use up either.

use std::time::{Duration, Instant};

/// Workers that are seated without a pause: all of a machine, started again many times.
const BURST: u32 = 512;

/// After those, one in so long. A board of 2^24 numbers then lasts for half a year of nothing else.
const INTERVAL: Duration = Duration::from_secs(1);

/// The rate at which workers are seated.
#[derive(Debug)]
pub(super) struct AttachRateLimit {
    /// When all that were seated so far would be, one in an [`INTERVAL`].
    due: Instant,
}

impl AttachRateLimit {
    /// Nobody was seated before `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self { due: now }
    }

    /// Whether another may be seated.
    pub(super) fn permits(&self, now: Instant) -> bool {
        self.due.saturating_duration_since(now) < INTERVAL * BURST
    }

    /// Another was seated.
    pub(super) fn count(&mut self, now: Instant) {
        self.due = self.due.max(now) + INTERVAL;
    }
}

#[cfg(test)]
mod tests {
    use shmproto::board::WorkerNumber;

    use super::*;

    #[test]
    fn whoever_says_hello_without_end_does_not_use_up_the_numbers_of_a_board() {
        let begin = Instant::now();
        let (mut rate, mut seated) = (AttachRateLimit::new(begin), 0);
        let day = 24 * 3600;
        // Ten a second, for a day.
        for tenth in 0..10 * day {
            let now = begin + Duration::from_millis(100 * u64::from(tenth));
            if rate.permits(now) {
                rate.count(now);
                seated += 1;
            }
        }
        assert!((day..=BURST + day).contains(&seated), "{seated}");
        assert!(WorkerNumber::LAST.get() / seated > 180, "days");
        assert!(!rate.permits(begin + Duration::from_secs(u64::from(day) - 1)));
        assert!(
            rate.permits(begin + Duration::from_secs(u64::from(day + 1))),
            "an honest one waits a second"
        );
    }
}
