//! Measures the rate of service in tokens per second, only while requests wait.

/// Time in seconds after which an observation counts a third of a new one.
const MEMORY_S: f64 = 30.0;
/// Shortest busy time in seconds that gives a rate.
const LEAST_S: f64 = 0.2;

/// Decayed rate of served tokens. Times are microseconds of a monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ServiceRate {
    tokens: f64,
    seconds: f64,
    at_us: u64,
    /// Whether a request has waited since `at_us`; otherwise the rate would measure demand, not capacity.
    is_busy: bool,
}

impl ServiceRate {
    /// Records `tokens` served since the last call; `is_busy` says whether requests wait from now on.
    pub fn observe(&mut self, tokens: u64, is_busy: bool, now_us: u64) {
        let passed_s = now_us.saturating_sub(self.at_us) as f64 * 1e-6;
        if self.is_busy {
            let kept = (-passed_s / MEMORY_S).exp();
            self.tokens = self.tokens * kept + tokens as f64;
            self.seconds = self.seconds * kept + passed_s;
        }
        self.at_us = self.at_us.max(now_us);
        self.is_busy = is_busy;
    }

    /// Predicts the time for `tokens` in microseconds; `None` while the observed busy time is too short.
    #[must_use]
    pub fn wait_us(&self, tokens: u64) -> Option<u64> {
        let is_known = self.seconds >= LEAST_S && self.tokens > 0.0;
        is_known.then(|| (tokens as f64 / self.tokens * self.seconds * 1e6) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_time_in_which_somebody_waited() {
        let mut rate = ServiceRate::default();
        rate.observe(1_000, true, 5_000_000);
        assert_eq!(rate.wait_us(100), None, "nobody waited for these");
        for second in 6..=10 {
            rate.observe(500, second < 10, second * 1_000_000);
        }
        let wait_us = rate.wait_us(1_000).unwrap();
        assert!(wait_us.abs_diff(2_000_000) < 100_000, "500 a second: {wait_us}");
        rate.observe(1, true, 3_600_000_000);
        assert_eq!(rate.wait_us(1_000), Some(wait_us), "an idle hour says nothing");
    }

    #[test]
    fn what_was_long_ago_counts_less() {
        let mut rate = ServiceRate::default();
        (0..200).for_each(|second| rate.observe(100, true, second * 1_000_000));
        (200..400).for_each(|second| rate.observe(1_000, true, second * 1_000_000));
        let wait_us = rate.wait_us(1_000).unwrap();
        assert!(wait_us.abs_diff(1_000_000) < 20_000, "{wait_us}");
    }
}
