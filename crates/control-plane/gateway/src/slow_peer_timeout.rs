//! Time limit for a slow peer that sends a form or reads an answer.

use std::time::Duration;

/// Time that a peer may still keep this process waiting. The budget starts at `limit`, shrinks by the time
/// waited, and grows by the time that the moved bytes take at the minimum rate, up to `limit`. So a peer at
/// the minimum rate never times out, and a slower peer does, however short its pauses are.
#[derive(Debug)]
pub(crate) struct PeerTimeBudget {
    limit: Duration,
    left: Duration,
    least_bytes_per_s: u64,
}

impl PeerTimeBudget {
    pub(crate) fn new(limit: Duration, least_bytes_per_s: u64) -> Self {
        Self { limit, left: limit, least_bytes_per_s }
    }

    /// Time that the next wait may take.
    pub(crate) fn left(&self) -> Duration {
        self.left
    }

    /// Records that the peer moved `bytes` during a wait of `waited`.
    pub(crate) fn moved(&mut self, waited: Duration, bytes: u64) {
        let gained = Duration::from_micros(bytes.saturating_mul(1_000_000) / self.least_bytes_per_s);
        self.left = self.limit.min(self.left.saturating_add(gained).saturating_sub(waited));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_peer_at_the_least_rate_is_waited_for_without_end() {
        let mut budget = PeerTimeBudget::new(LIMIT, 1000);
        for _ in 0..100_000 {
            budget.moved(SECOND, 1000);
            assert_eq!(budget.left(), LIMIT);
        }
    }

    #[test]
    fn a_peer_that_drips_is_given_up_also_after_it_was_fast() {
        let mut budget = PeerTimeBudget::new(LIMIT, 1000);
        budget.moved(SECOND, 1 << 30);
        assert_eq!(budget.left(), LIMIT, "nobody saves time up");
        let drips = (1..).find(|_| {
            budget.moved(SECOND, 1);
            budget.left().is_zero()
        });
        assert_eq!(drips, Some(31));
    }
}
