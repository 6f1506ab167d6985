//! Estimates how many adapters a batch uses (Eq. 3).

use std::{collections::BTreeMap, time::Duration};

use types::AdapterId;

/// Time constant of the decayed request counts.
const WINDOW: Duration = Duration::from_secs(60);
const BATCH_WINDOW: Duration = Duration::from_secs(5);

/// Period of the evaluation, whose time grows with the number of adapters; steps use its last result.
const PERIOD: Duration = Duration::from_millis(100);

/// Recent requests by adapter, and the recent batch size.
#[derive(Debug, Default)]
pub struct AdapterUsage {
    /// Decayed number of requests. The order of the map makes sums equal to the bit in every process.
    requests: BTreeMap<AdapterId, f64>,
    /// Decayed number of all requests, including those for the base model.
    all: f64,
    batch: f64,
    as_of: Duration,
    evaluated_at: Duration,
    required: f64,
}

impl AdapterUsage {
    /// Records a request for an adapter; `None` is the base model.
    pub fn note(&mut self, adapter: Option<AdapterId>) {
        self.all += 1.0;
        if let Some(adapter) = adapter {
            *self.requests.entry(adapter).or_default() += 1.0;
        }
    }

    /// Sets the time and the number of sequences in the batch.
    pub fn advance(&mut self, now: Duration, batch: usize) {
        let passed = now.saturating_sub(self.as_of).as_secs_f64();
        self.as_of = now;
        let kept = (-passed / BATCH_WINDOW.as_secs_f64()).exp();
        self.batch = self.batch * kept + batch as f64 * (1.0 - kept);
        if now >= self.evaluated_at + PERIOD {
            self.fade(now - self.evaluated_at);
            self.evaluated_at = now;
            self.required = self.evaluate();
        }
    }

    fn fade(&mut self, passed: Duration) {
        let faded = (-passed.as_secs_f64() / WINDOW.as_secs_f64()).exp();
        self.all *= faded;
        self.requests.retain(|_, requests| {
            *requests *= faded;
            *requests > 1e-3
        });
    }

    /// Returns `Low`, the expected number of adapters in a batch (sum of `1 - (1 - p)^BS`), at most 100 ms
    /// old.
    #[must_use]
    pub fn required(&self) -> f64 {
        self.required
    }

    /// Returns the most requested adapter among those that pass `is_meant`.
    pub(crate) fn favourite(&self, is_meant: impl Fn(AdapterId) -> bool) -> Option<AdapterId> {
        let meant = self.requests.iter().filter(|(id, _)| is_meant(**id));
        meant.max_by(|one, other| one.1.total_cmp(other.1)).map(|(id, _)| *id)
    }

    fn evaluate(&self) -> f64 {
        if self.all <= 0.0 {
            return 0.0;
        }
        let used = |requests: &f64| 1.0 - (1.0 - (requests / self.all).min(1.0)).powf(self.batch);
        self.requests.values().map(used).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(adapters: u8, batch: usize) -> AdapterUsage {
        let mut usage = AdapterUsage::default();
        for adapter in 0..adapters {
            usage.note(Some(AdapterId([adapter; 32])));
        }
        // The batch average is set directly, and request counts have had no time to decay.
        usage.batch = batch as f64;
        usage
    }

    #[test]
    fn fifty_adapters_asked_for_alike_and_batches_of_16_need_13_8() {
        // The expected value is the worked example of E-08.
        assert!((usage(50, 16).evaluate() - 13.8).abs() < 0.05);
        assert_eq!(AdapterUsage::default().required(), 0.0);
    }

    #[test]
    fn what_nobody_asks_for_any_more_is_forgotten() {
        let mut usage = usage(50, 16);
        usage.advance(Duration::from_secs(3600), 16);
        assert_eq!((usage.required(), usage.requests.len()), (0.0, 0));
    }
}
