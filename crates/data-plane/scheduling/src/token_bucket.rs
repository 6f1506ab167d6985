//! How much somebody may have in a minute: a bucket that fills as time passes.
//!
//! It holds what a minute brings, so that a burst of that much goes at once. What something costs may be known only when it is
//! over: somebody begins as long as anything is left, and what is taken later may leave a debt, which time pays.

/// Microseconds of a minute.
const MINUTE_US: f64 = 60e6;

/// See the module. Times are microseconds of a clock that never goes back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenBucket {
    per_minute: f64,
    /// What may be taken; below 0 it is a debt.
    left: f64,
    at_us: u64,
}

/// Nothing is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("nothing is left of what there is in a minute; some is again in {wait_us} us")]
pub struct TokensExhausted {
    /// After so long there is.
    pub wait_us: u64,
}

impl TokenBucket {
    /// A full one, of at least one a minute.
    #[must_use]
    pub fn new(per_minute: u64, now_us: u64) -> Self {
        let per_minute = per_minute.max(1) as f64;
        Self { per_minute, left: per_minute, at_us: now_us }
    }

    /// Fails unless one could be taken.
    ///
    /// # Errors
    /// Nothing is left.
    pub fn check(&mut self, now_us: u64) -> Result<(), TokensExhausted> {
        self.fill(now_us);
        if self.left >= 1.0 {
            return Ok(());
        }
        let wait_us = (1.0 - self.left) / self.per_minute * MINUTE_US;
        Err(TokensExhausted { wait_us: wait_us.ceil() as u64 })
    }

    /// Takes so much, also what is not there.
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
            // A minute's worth at first, what time brought, and what the last one cost.
            let most = per_minute as f64 * (1.0 + now_us as f64 / MINUTE_US) + last as f64;
            prop_assert!(begun as f64 <= most + 1.0, "{begun} of {most}");
        }
    }
}
