//! How fast those who wait are served: tokens a second, seen while somebody waits.

/// Seconds after which what was seen counts a third of what is seen now.
const MEMORY_S: f64 = 30.0;
/// Nothing is said from less than so many seconds.
const LEAST_S: f64 = 0.2;

/// Times are microseconds of a clock that never goes back.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ServiceRate {
    tokens: f64,
    seconds: f64,
    at_us: u64,
    /// Whether somebody has waited since then: with nobody waiting, what is served is what was asked for.
    is_busy: bool,
}

impl ServiceRate {
    /// So many tokens were served by now; from now on somebody waits, or nobody.
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

    /// How long `tokens` take, in microseconds; `None` as long as too little was seen.
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
