//! Tracks the load of an executor, request by request, and the mean length of answers.

use std::collections::BTreeMap;

use crate::perf::serving::RequestLoad;

/// First value of [`MeanAnswer`] in tokens: the mean answer of Alpaca (C-15).
pub const FIRST_MEAN: f64 = 58.0;

/// Weight of the first mean, in answers.
const FIRST_COUNT: f64 = 16.0;

/// Maximum weight of past answers, so the mean follows changes.
const MAX_COUNT: f64 = 1_024.0;

/// Running mean of the tokens per answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeanAnswer {
    mean: f64,
    count: f64,
}

impl Default for MeanAnswer {
    fn default() -> Self {
        Self { mean: FIRST_MEAN, count: FIRST_COUNT }
    }
}

impl MeanAnswer {
    /// Records an answer of `tokens`.
    pub fn observe(&mut self, tokens: u64) {
        self.count = (self.count + 1.0).min(MAX_COUNT);
        self.mean += (tokens as f64 - self.mean) / self.count;
    }

    /// Returns the mean in tokens.
    #[must_use]
    pub fn tokens(&self) -> f64 {
        self.mean
    }
}

/// Load of one stage of an executor. A request must leave with the rank and promise with which it entered.
#[derive(Debug, Clone, Default)]
pub struct InFlightLoad {
    by_rank: BTreeMap<u64, u64>,
    /// Number of requests for each promised time per token, in microseconds.
    by_promise: BTreeMap<u64, u64>,
    /// Sums over all requests; `max_rank` is not maintained.
    sums: RequestLoad,
}

impl InFlightLoad {
    /// Adds a request with `tokens` tokens.
    pub fn add_request(&mut self, rank: u64, promised_tpot_us: Option<u64>, tokens: u64) {
        *self.by_rank.entry(rank).or_default() += 1;
        self.sums.requests += 1;
        self.sums.ranks += rank;
        if let Some(promised_us) = promised_tpot_us {
            *self.by_promise.entry(promised_us).or_default() += 1;
        }
        self.grow(rank, tokens);
    }

    /// Adds `tokens` to a request of this `rank`.
    pub fn grow(&mut self, rank: u64, tokens: u64) {
        self.sums.tokens += tokens;
        self.sums.token_ranks += rank * tokens;
    }

    /// Removes a request that has `tokens` tokens by now.
    pub fn remove_request(&mut self, rank: u64, promised_tpot_us: Option<u64>, tokens: u64) {
        take_one(&mut self.by_rank, rank);
        // The subtraction saturates, so a caller's wrong count has a bounded effect.
        self.sums.requests = self.sums.requests.saturating_sub(1);
        self.sums.ranks = self.sums.ranks.saturating_sub(rank);
        if let Some(promised_us) = promised_tpot_us {
            take_one(&mut self.by_promise, promised_us);
        }
        self.sums.tokens = self.sums.tokens.saturating_sub(tokens);
        self.sums.token_ranks = self.sums.token_ranks.saturating_sub(rank * tokens);
    }

    /// Returns the load of all requests.
    #[must_use]
    pub fn load(&self) -> RequestLoad {
        RequestLoad { max_rank: self.by_rank.last_key_value().map_or(0, |(rank, _)| *rank), ..self.sums }
    }

    /// Returns the shortest promised time per token among the requests, in microseconds.
    #[must_use]
    pub fn promised_tpot_us(&self) -> Option<u64> {
        self.by_promise.first_key_value().map(|(promised_us, _)| *promised_us)
    }
}

fn take_one(counts: &mut BTreeMap<u64, u64>, key: u64) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_says_what_those_who_are_in_it_come_to() {
        let mut ledger = InFlightLoad::default();
        ledger.add_request(32, Some(500), 10);
        ledger.add_request(64, None, 20);
        ledger.add_request(32, Some(400), 5);
        ledger.grow(32, 2);
        ledger.grow(64, 1);
        let load =
            RequestLoad { requests: 3, ranks: 128, max_rank: 64, tokens: 38, token_ranks: 17 * 32 + 21 * 64 };
        assert_eq!(ledger.load(), load);
        assert_eq!(ledger.promised_tpot_us(), Some(400));
        ledger.remove_request(64, None, 21);
        ledger.remove_request(32, Some(400), 5);
        assert_eq!(ledger.load(), RequestLoad::of(32, 12));
        assert_eq!(ledger.promised_tpot_us(), Some(500));
        ledger.remove_request(32, Some(500), 12);
        assert_eq!((ledger.load(), ledger.promised_tpot_us()), (RequestLoad::default(), None));
    }

    #[test]
    fn the_mean_begins_where_alpaca_is_and_follows_what_comes() {
        let mut mean = MeanAnswer::default();
        assert_eq!(mean.tokens(), 58.0);
        (0..10_000).for_each(|_| mean.observe(200));
        assert!((mean.tokens() - 200.0).abs() < 0.1, "{mean:?}");
        // The mean forgets: a thousand other answers move it by more than half.
        (0..1_000).for_each(|_| mean.observe(20));
        assert!(mean.tokens() < 110.0, "{mean:?}");
    }
}
