//! Draft adapters: the first blocks of a base, with deltas of their own, guess what all of it would say.
//!
//! A guess is the likeliest token of a *shortlist*: most of what a small draft costs is the head, and most of a vocabulary is
//! hardly ever said.

use serde::{Deserialize, Serialize};
use text::tokenizer::Tokenizer;

use crate::data::{DataItems, DistillationSample};

/// How large a draft is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftSize {
    /// The blocks that it has.
    pub layers: usize,
    /// The tokens that it may guess; 0 for all.
    pub shortlist: usize,
}

/// A draft that is trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftTraining {
    /// The blocks that it has.
    pub layers: usize,
    /// The tokens that it may guess, ascending; all, if it is empty.
    pub shortlist: Vec<u32>,
}

/// The `size` tokens that a draft of the model with this tokenizer may guess, ascending: those without which some text could
/// not be said (special tokens, and those of one byte), then those that were expected most often in `said`, and of tokens that
/// never were the first, which byte-pair encodings made of the commonest pairs. All tokens, if that is not more: an empty list.
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
    // Stable: of equals the first tokens stay in front.
    ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let mut chosen: Vec<u32> = ranked.into_iter().take(size).map(|(token, _)| token).collect();
    chosen.sort_unstable();
    chosen
}

/// How often each token was to be expected, where answers are: as often as it was said, and where more is known, as often as
/// it was likely.
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

/// What a draft learns from, of data that are what a model said.
#[must_use]
pub fn said(items: &DataItems) -> Option<&[DistillationSample]> {
    match items {
        DataItems::Said(said) => Some(said),
        DataItems::Examples(_) | DataItems::Pairs(_) => None,
    }
}
