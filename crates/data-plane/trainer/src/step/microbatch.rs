//! Microbatches: the examples that go through the model together.

use model::backward::{self, Dropout};

use super::{BATCH_ROWS, microbatch_pool::RowCount};
use crate::data::Example;

/// Cuts `all` into microbatches of at most [`BATCH_ROWS`] rows, or of one element.
pub(super) fn parts<T>(all: &[T], rows: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut rest = all;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fits = |one: &&T| {
            sum += rows(one);
            sum <= BATCH_ROWS
        };
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (part, behind) = rest.split_at(count);
        rest = behind;
        (!part.is_empty()).then_some(part)
    })
}

/// Returns the rows of an example: the last token has no target and needs no row.
pub(super) fn rows(example: &&Example) -> usize {
    example.tokens.len() - 1
}

/// Examples in the model's format.
pub(super) struct Inputs {
    tokens: Vec<Vec<u32>>,
    targets: Vec<Vec<Option<u32>>>,
    /// Weights of the targets, example after example.
    pub(super) weights: Vec<f32>,
    /// Number of targets of each example.
    pub(super) counts: Vec<usize>,
    /// Dropout of each example; empty without dropout.
    dropouts: Vec<Dropout>,
}

impl Inputs {
    pub(super) fn of(examples: &[&Example]) -> Self {
        let targets = |example: &&Example| -> Vec<Option<u32>> {
            let pairs = example.tokens[1..].iter().zip(&example.weights);
            pairs.map(|(&token, &weight)| (weight != 0.0).then_some(token)).collect()
        };
        let counted = |weight: &f32| *weight != 0.0;
        Self {
            tokens: examples.iter().map(|example| example.tokens[..rows(example)].to_vec()).collect(),
            targets: examples.iter().map(targets).collect(),
            weights: examples.iter().flat_map(|of| of.weights.iter().copied().filter(counted)).collect(),
            counts: examples
                .iter()
                .map(|of| of.weights.iter().filter(|weight| counted(weight)).count())
                .collect(),
            dropouts: Vec::new(),
        }
    }

    /// Sets the dropout of each example; an empty iterator means none.
    pub(super) fn dropping(self, dropouts: impl Iterator<Item = Dropout>) -> Self {
        Self { dropouts: dropouts.collect(), ..self }
    }

    pub(super) fn examples(&self) -> Vec<backward::Example<'_>> {
        let dropouts = self.dropouts.iter().copied().map(Some).chain(std::iter::repeat(None));
        let all = self.tokens.iter().zip(&self.targets).zip(dropouts);
        all.map(|((tokens, targets), dropout)| backward::Example { tokens, targets, dropout }).collect()
    }
}

impl RowCount for Inputs {
    fn rows(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }
}
