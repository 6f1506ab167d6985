//! An embedding: the hidden states of a prompt, pooled into one vector.

use shmproto::message::Pooling;

use model::forward::LogitRows;

/// The states of a sequence that were pooled so far.
#[derive(Debug)]
pub(super) struct PoolingState {
    pooling: Pooling,
    /// Of the rows so far, in 64 bits: however a prompt is cut into chunks, rows are added one after the other.
    sum: Vec<f64>,
    rows: usize,
}

impl PoolingState {
    /// Of nothing yet.
    pub(super) fn new(pooling: Pooling) -> Self {
        Self { pooling, sum: Vec::new(), rows: 0 }
    }

    /// Whether every row is wanted, and none may come out of a cache.
    pub(super) fn takes_all(&self) -> bool {
        self.pooling == Pooling::Mean
    }

    /// The states wanted of the next `count` tokens of `pending`, of which the first `skipped` are nobody's prompt.
    pub(super) fn wanted(&self, count: usize, pending: usize, skipped: usize) -> LogitRows {
        let from = match self.pooling {
            Pooling::Mean => skipped.min(count),
            Pooling::Last if count == pending => count - 1,
            Pooling::Last => count,
        };
        if from < count { LogitRows::States { from } } else { LogitRows::None }
    }

    /// Adds a row.
    pub(super) fn add(&mut self, state: &[f32]) {
        self.sum.resize(state.len(), 0.0);
        self.sum.iter_mut().zip(state).for_each(|(sum, &value)| *sum += f64::from(value));
        self.rows += 1;
    }

    /// Forgets all rows: they will come again.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.pooling);
    }

    /// The mean of the rows; `None` if it is no numbers.
    pub(super) fn pooled(&self) -> Option<Vec<f32>> {
        let rows = self.rows as f64;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
        let mean: Vec<f32> = self.sum.iter().map(|sum| (sum / rows) as f32).collect();
        mean.iter().all(|value| value.is_finite()).then_some(mean)
    }
}
