//! Vectors that a request asks for instead of a completion: an embedding of its prompt, the logits of given
//! tokens after the prompt, or the logits of an adapter's labels.

use std::sync::Arc;

use model::{adapter::ClassificationHead, forward::LogitRows};

/// How the passes over a prompt become one vector.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::engine) enum PoolingSpec {
    /// Hidden state of the last token.
    Last,
    /// Mean of all hidden states.
    Mean,
    /// Logits of these tokens after the last token.
    TokenLogits(Vec<u32>),
    /// Logits of the head's labels for the hidden state of the last token.
    ClassLogits(Arc<ClassificationHead>),
}

/// The output of a sequence's passes so far, as its vector needs it.
#[derive(Debug)]
pub(super) struct PoolingState {
    spec: PoolingSpec,
    /// Sum of the states in 64 bits, added in order, so the result does not depend on the chunks of a prompt.
    sum: Vec<f64>,
    rows: usize,
    /// Logits of the requested tokens.
    logits: Vec<f32>,
}

impl PoolingState {
    pub(super) fn new(spec: PoolingSpec) -> Self {
        Self { spec, sum: Vec::new(), rows: 0, logits: Vec::new() }
    }

    /// Whether every row is needed, so that none may come from the prefix cache.
    pub(super) fn takes_all(&self) -> bool {
        self.spec == PoolingSpec::Mean
    }

    /// Returns the output needed of the next `count` of `pending` tokens, without `skipped` virtual tokens.
    pub(super) fn wanted(&self, count: usize, pending: usize, skipped: usize) -> LogitRows {
        let is_last = count == pending;
        match self.spec {
            PoolingSpec::Mean if skipped < count => LogitRows::States { from: skipped },
            PoolingSpec::Last | PoolingSpec::ClassLogits(_) if is_last => {
                LogitRows::States { from: count - 1 }
            }
            PoolingSpec::TokenLogits(_) if is_last => LogitRows::Last,
            _ => LogitRows::None,
        }
    }

    pub(super) fn add_state(&mut self, state: &[f32]) {
        self.sum.resize(state.len(), 0.0);
        self.sum.iter_mut().zip(state).for_each(|(sum, &value)| *sum += f64::from(value));
        self.rows += 1;
    }

    /// Takes the logits after the last token, one for each token of the vocabulary.
    pub(super) fn take_logits(&mut self, row: &[f32]) {
        if let PoolingSpec::TokenLogits(tokens) = &self.spec {
            self.logits = tokens.iter().map(|&token| row[token as usize]).collect();
        }
    }

    /// Drops all output, which will be computed again.
    pub(super) fn clear(&mut self) {
        self.sum.clear();
        self.logits.clear();
        self.rows = 0;
    }

    /// Returns the vector; `None` if it is not finite.
    pub(super) fn pooled(&self) -> Option<Vec<f32>> {
        let vector = match &self.spec {
            PoolingSpec::Last | PoolingSpec::Mean => self.mean(),
            PoolingSpec::TokenLogits(_) => self.logits.clone(),
            PoolingSpec::ClassLogits(head) => head.logits(&self.mean()),
        };
        vector.iter().all(|value| value.is_finite()).then_some(vector)
    }

    /// Returns the mean of the states; of a single state, its own bits.
    fn mean(&self) -> Vec<f32> {
        let rows = self.rows as f64;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
        let mean = self.sum.iter().map(|sum| (sum / rows) as f32).collect();
        mean
    }
}
