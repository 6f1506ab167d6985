//! Token ids that a draft model can read and predict.

use std::sync::Arc;

/// Maps token ids of the base to those of the model and back.
#[derive(Debug, Clone)]
pub(crate) struct Vocabulary {
    /// The model reads tokens below this id.
    read: usize,
    said: RowVocabulary,
}

#[derive(Debug, Clone)]
enum RowVocabulary {
    /// The tokens below this id.
    First(usize),
    Listed(Arc<[u32]>),
}

impl Vocabulary {
    /// Returns the vocabulary of two models that share their first `tokens` tokens.
    pub(crate) fn shared(tokens: usize) -> Self {
        Self { read: tokens, said: RowVocabulary::First(tokens) }
    }

    /// Returns the vocabulary of a model that reads `tokens` tokens and predicts those of `list` (or all).
    pub(crate) fn listed(tokens: usize, list: Option<&Arc<[u32]>>) -> Self {
        Self {
            read: tokens,
            said: list.map_or(RowVocabulary::First(tokens), |list| RowVocabulary::Listed(Arc::clone(list))),
        }
    }

    pub(crate) fn reads(&self, token: u32) -> bool {
        (token as usize) < self.read
    }

    pub(crate) fn token(&self, index: u32) -> Option<u32> {
        match &self.said {
            RowVocabulary::First(tokens) => ((index as usize) < *tokens).then_some(index),
            RowVocabulary::Listed(list) => list.get(index as usize).copied(),
        }
    }
}
