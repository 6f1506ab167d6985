//! The rate limit of worker admissions. A board never reuses a worker's number, and each worker slot begins
//! with memory of its own. A peer that connects and leaves repeatedly must exhaust neither.

use std::time::{Duration, Instant};

/// Number of workers admitted without a pause: all of a machine, restarted many times.
const BURST: u32 = 512;

/// Interval of admissions after the burst. A board of 2^24 numbers then lasts for half a year.
const INTERVAL: Duration = Duration::from_secs(1);

/// Rate limit of worker admissions.
#[derive(Debug)]
pub(super) struct AttachRateLimit {
    /// Time at which all workers so far would be admitted at one per [`INTERVAL`].
    due: Instant,
}

impl AttachRateLimit {
    /// Creates a limit without previous admissions.
    pub(super) fn new(now: Instant) -> Self {
        Self { due: now }
    }

    /// Whether another worker may be admitted.
    pub(super) fn permits(&self, now: Instant) -> bool {
        self.due.saturating_duration_since(now) < INTERVAL * BURST
    }

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
        // Ten admissions per second, for a day.
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
