//! Token bucket: limits how much a tenant may have in a minute.
//!
//! The bucket holds the allowance of one minute, so a burst of that size goes at once. The cost of a request
//! may be known only at its end. So a request may begin while one unit is left, and a later charge may leave
//! a debt, which time repays.

const MINUTE_US: f64 = 60e6;

/// Bucket that refills with time. Times are microseconds of a monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenBucket {
    per_minute: f64,
    /// Units that may be taken; a negative value is a debt.
    left: f64,
    at_us: u64,
}

/// Error of an empty bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the limit per minute is used up; try again in {wait_us} us")]
pub struct TokensExhausted {
    /// Microseconds until one unit is available again.
    pub wait_us: u64,
}

impl TokenBucket {
    /// Creates a full bucket that gains `per_minute` units per minute, at least one.
    #[must_use]
    pub fn new(per_minute: u64, now_us: u64) -> Self {
        let per_minute = per_minute.max(1) as f64;
        Self { per_minute, left: per_minute, at_us: now_us }
    }

    /// Checks that one unit could be taken.
    ///
    /// # Errors
    /// Returns `TokensExhausted` if less than one unit is left.
    pub fn check(&mut self, now_us: u64) -> Result<(), TokensExhausted> {
        self.fill(now_us);
        if self.left >= 1.0 {
            return Ok(());
        }
        let wait_us = (1.0 - self.left) / self.per_minute * MINUTE_US;
        Err(TokensExhausted { wait_us: wait_us.ceil() as u64 })
    }

    /// Takes `amount` units, even more than are left.
    pub fn consume(&mut self, amount: u64, now_us: u64) {
        self.fill(now_us);
        self.left -= amount as f64;
    }

    fn fill(&mut self, now_us: u64) {
        let passed_us = now_us.saturating_sub(self.at_us);
        self.at_us = self.at_us.max(now_us);
        self.left = (self.left + passed_us as f64 / MINUTE_US * self.per_minute).min(self.per_minute);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_minutes_worth_goes_at_once_and_then_as_it_comes() {
        let mut bucket = TokenBucket::new(60, 0);
        for _ in 0..60 {
            bucket.check(0).unwrap();
            bucket.consume(1, 0);
        }
        assert_eq!(bucket.check(0), Err(TokensExhausted { wait_us: 1_000_000 }));
        assert_eq!(bucket.check(400_000), Err(TokensExhausted { wait_us: 600_000 }));
        bucket.check(1_000_000).unwrap();
    }

    #[test]
    fn what_cost_more_than_was_left_is_paid_before_anything_else_begins() {
        let mut bucket = TokenBucket::new(600, 0);
        bucket.check(0).unwrap();
        bucket.consume(900, 0);
        let TokensExhausted { wait_us } = bucket.check(0).unwrap_err();
        assert!(wait_us.abs_diff(30_100_000) <= 1, "{wait_us}");
        bucket.check(wait_us + 1).unwrap();
    }

    proptest! {
        #[test]
        fn who_waits_as_long_as_is_said_may_and_never_has_more_than_time_brought(
            per_minute in 1..10_000u64, asks in prop::collection::vec((0..5_000_000u64, 1..500u64), 1..100),
        ) {
            let mut bucket = TokenBucket::new(per_minute, 0);
            let (mut now_us, mut begun, mut last) = (0, 0u64, 0);
            for (pause_us, cost) in asks {
                now_us += pause_us;
                if let Err(TokensExhausted { wait_us }) = bucket.check(now_us) {
                    prop_assert!(bucket.check(now_us + wait_us.saturating_sub(2)).is_err() || wait_us <= 2);
                    now_us += wait_us;
                    prop_assert!(bucket.check(now_us + 1).is_ok());
                    now_us += 1;
                }
                bucket.consume(cost, now_us);
                (begun, last) = (begun + cost, cost);
            }
            // At most a minute's allowance, the refill over time and the cost of the last request.
            let most = per_minute as f64 * (1.0 + now_us as f64 / MINUTE_US) + last as f64;
            prop_assert!(begun as f64 <= most + 1.0, "{begun} of {most}");
        }
    }
}
