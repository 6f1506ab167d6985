//! Draft adapters: the first blocks of a base, with their own deltas, predict the tokens of the whole base.
//!
//! Predictions come from a *shortlist* of tokens, because the head is most of a small draft's cost, and most
//! tokens of a vocabulary are rare.

use serde::{Deserialize, Serialize};
use text::tokenizer::Tokenizer;

use crate::data::DistillationSample;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftSize {
    /// Number of blocks that the draft runs.
    pub layers: usize,
    /// Number of tokens that the draft may predict; 0 for all.
    pub shortlist: usize,
}

/// A draft in training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftTraining {
    /// Number of blocks that the draft runs.
    pub layers: usize,
    /// Tokens that the draft may predict, ascending; empty for all.
    pub shortlist: Vec<u32>,
}

/// Returns the `size` tokens that a draft of the model with this tokenizer may predict, ascending. An empty
/// list means all tokens.
///
/// Special tokens and single-byte tokens come first, because some texts need them. Then come the tokens
/// expected most often in `said`. Tokens that `said` never expects are taken by ascending id, because
/// byte-pair encodings give low ids to common pairs.
#[must_use]
pub fn shortlist(
    said: &[DistillationSample],
    tokenizer: &Tokenizer,
    vocabulary: usize,
    size: usize,
) -> Vec<u32> {
    if size == 0 || size >= vocabulary {
        return Vec::new();
    }
    let mut expected = expected(said, vocabulary);
    for (token, expected) in (0..).zip(&mut expected) {
        if tokenizer.is_special(token) || tokenizer.token_bytes(token).is_some_and(|bytes| bytes.len() == 1) {
            *expected = f64::INFINITY;
        }
    }
    let mut ranked: Vec<(u32, f64)> = (0..).zip(expected).collect();
    // The sort is stable, so of equal tokens those with lower ids stay in front.
    ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let mut chosen: Vec<u32> = ranked.into_iter().take(size).map(|(token, _)| token).collect();
    chosen.sort_unstable();
    chosen
}

/// Returns the expected count of each token in the answers: its occurrences plus its recorded probabilities.
fn expected(said: &[DistillationSample], vocabulary: usize) -> Vec<f64> {
    let mut expected = vec![0.0; vocabulary];
    for DistillationSample { example, likely, .. } in said {
        let answer = example.tokens[1..].iter().zip(&example.weights).filter(|(_, weight)| **weight > 0.0);
        for (&token, _) in answer {
            expected[token as usize] += 1.0;
        }
        for &(token, probability) in likely.iter().flatten() {
            expected[token as usize] += f64::from(probability);
        }
    }
    expected
}
