//! Embeddings: the hidden states of a prompt, pooled into one vector.

use shmproto::message::Pooling;

use model::forward::LogitRows;

/// Pooled hidden states of a sequence so far.
#[derive(Debug)]
pub(super) struct PoolingState {
    pooling: Pooling,
    /// Sum of the rows in 64 bits, added in order, so the result does not depend on the chunks of a prompt.
    sum: Vec<f64>,
    rows: usize,
}

impl PoolingState {
    pub(super) fn new(pooling: Pooling) -> Self {
        Self { pooling, sum: Vec::new(), rows: 0 }
    }

    /// Whether every row is needed, so that none may come from the prefix cache.
    pub(super) fn takes_all(&self) -> bool {
        self.pooling == Pooling::Mean
    }

    /// Returns the states needed of the next `count` of `pending` tokens, without `skipped` virtual tokens.
    pub(super) fn wanted(&self, count: usize, pending: usize, skipped: usize) -> LogitRows {
        let from = match self.pooling {
            Pooling::Mean => skipped.min(count),
            Pooling::Last if count == pending => count - 1,
            Pooling::Last => count,
        };
        if from < count { LogitRows::States { from } } else { LogitRows::None }
    }

    pub(super) fn add(&mut self, state: &[f32]) {
        self.sum.resize(state.len(), 0.0);
        self.sum.iter_mut().zip(state).for_each(|(sum, &value)| *sum += f64::from(value));
        self.rows += 1;
    }

    /// Drops all rows, which will be computed again.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.pooling);
    }

    /// Returns the mean of the rows; `None` if it is not finite.
    pub(super) fn pooled(&self) -> Option<Vec<f32>> {
        let rows = self.rows as f64;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
        let mean: Vec<f32> = self.sum.iter().map(|sum| (sum / rows) as f32).collect();
        mean.iter().all(|value| value.is_finite()).then_some(mean)
    }
}
