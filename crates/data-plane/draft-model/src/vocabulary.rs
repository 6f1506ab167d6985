//! Which tokens a model that drafts knows.

use std::sync::Arc;

/// From the base's ids to the model's, and back.
#[derive(Debug, Clone)]
pub(crate) struct Vocabulary {
    /// Tokens below this are read.
    read: usize,
    said: RowVocabulary,
}

/// What the model's rows of logits are about.
#[derive(Debug, Clone)]
enum RowVocabulary {
    /// The first so many tokens.
    First(usize),
    /// These.
    Listed(Arc<[u32]>),
}

impl Vocabulary {
    /// That of two models which share their first `tokens` tokens.
    pub(crate) fn shared(tokens: usize) -> Self {
        Self { read: tokens, said: RowVocabulary::First(tokens) }
    }

    /// That of a model which reads `tokens` tokens and says only those of a list, if there is one.
    pub(crate) fn listed(tokens: usize, list: Option<&Arc<[u32]>>) -> Self {
        Self {
            read: tokens,
            said: list.map_or(RowVocabulary::First(tokens), |list| RowVocabulary::Listed(Arc::clone(list))),
        }
    }

    /// Whether the model can read a token.
    pub(crate) fn reads(&self, token: u32) -> bool {
        (token as usize) < self.read
    }

    /// The token that a row's logit is about.
    pub(crate) fn token(&self, index: u32) -> Option<u32> {
        match &self.said {
            RowVocabulary::First(tokens) => ((index as usize) < *tokens).then_some(index),
            RowVocabulary::Listed(list) => list.get(index as usize).copied(),
        }
    }
}
