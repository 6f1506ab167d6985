//! The n-gram drafter (prompt lookup): predicts what followed the same tokens earlier in the sequence.
//!
//! The index covers the sequence's prompt and answer; adding a token takes constant time. Each position links
//! to the previous position after the same one to four tokens, as in LZ77. The drafter then measures how much
//! more matches there.
//!
//! The acceptance probability is measured by match length ([`AcceptanceTable`]), for every token of the
//! target, drafted or not. The drafter thus notices without verification that a text starts or stops
//! repeating.

mod acceptance_table;

use std::{collections::HashMap, convert::Infallible};

pub use self::acceptance_table::AcceptanceTable;
use crate::{
    draft::{Draft, DraftToken, MAX_GUESSES},
    tree::{NodeId, TokenTree},
};

/// Longest n-gram in the index.
const MAX_GRAM: usize = 4;

/// Longest match length that is distinguished from a shorter one.
const MAX_MATCH: usize = 32;

/// Maximum number of positions that are compared per n-gram.
const MAX_LINKS: usize = 8;

/// Padding for n-grams shorter than [`MAX_GRAM`]; not a valid token id.
const NONE: u32 = u32::MAX;

/// The last [`MAX_GRAM`] tokens before a position, padded in front with [`NONE`].
type Gram = [u32; MAX_GRAM];

/// A drafter that uses the sequence's own tokens.
#[derive(Debug, Clone)]
pub struct Ngram {
    tokens: Vec<u32>,
    /// For each n-gram, the position of the token after its latest occurrence.
    latest: HashMap<Gram, u32>,
    /// For each position and n-gram length (less one), the position after the previous occurrence; 0 if there
    /// is none, since no n-gram precedes position 0.
    before: Vec<[u32; MAX_GRAM]>,
    survival: AcceptanceTable,
}

/// A token that followed a match.
#[derive(Debug, Clone, Copy)]
struct NgramMatch {
    token: u32,
    /// Number of equal tokens before the position.
    matched: usize,
}

impl Ngram {
    /// Creates a drafter for `prompt` with the acceptance statistics `survival`.
    #[must_use]
    pub fn new(prompt: &[u32], survival: AcceptanceTable) -> Self {
        let mut all = Self { tokens: Vec::new(), latest: HashMap::new(), before: Vec::new(), survival };
        prompt.iter().for_each(|&token| all.push(token));
        all
    }

    /// Returns the acceptance statistics measured so far.
    #[must_use]
    pub fn survival(&self) -> &AcceptanceTable {
        &self.survival
    }

    fn push(&mut self, token: u32) {
        let place = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        let mut before = [0; MAX_GRAM];
        for (length, before) in (1..=self.tokens.len().min(MAX_GRAM)).zip(&mut before) {
            let former = self.latest.insert(gram(&self.tokens, length), place);
            *before = former.unwrap_or(0);
        }
        self.before.push(before);
        self.tokens.push(token);
    }

    /// Returns the tokens that followed the longest matches of the end of `text`, likeliest first.
    fn lookup(&self, text: &[u32]) -> Vec<NgramMatch> {
        let mut found: Vec<NgramMatch> = Vec::new();
        for length in (1..=text.len().min(MAX_GRAM)).rev() {
            let mut place = self.latest.get(&gram(text, length)).copied().unwrap_or(0);
            for _ in 0..MAX_LINKS {
                let Some((&token, behind)) = self.tokens.get(..=place as usize).and_then(<[u32]>::split_last)
                else {
                    break;
                };
                if place == 0 {
                    break;
                }
                let matched = matched(behind, text);
                match found.iter_mut().find(|known| known.token == token) {
                    Some(known) => known.matched = known.matched.max(matched),
                    None => found.push(NgramMatch { token, matched }),
                }
                place = self.before[place as usize][length - 1];
            }
            if found.len() >= MAX_GUESSES {
                break;
            }
        }
        // The sort is stable, so the latest of equal matches stays first.
        found.sort_by_key(|found| std::cmp::Reverse(found.matched));
        found.truncate(MAX_GUESSES);
        found
    }
}

impl Draft for Ngram {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        for &token in tokens {
            let text = &self.tokens[self.tokens.len().saturating_sub(MAX_MATCH)..];
            for (rank, found) in self.lookup(text).iter().enumerate() {
                self.survival.count(found.matched, rank, found.token == token);
            }
            self.push(token);
        }
        Ok(())
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        let mut text = self.tokens[self.tokens.len().saturating_sub(MAX_MATCH)..].to_vec();
        text.extend(at.into_iter().flat_map(|at| tree.path(at).iter()).map(|node| tree.token(node)));
        let mut left = 1.0_f64;
        let guess = |(rank, found): (usize, NgramMatch)| {
            // The draft tokens exclude each other, so their probabilities sum to at most 1.
            let probability = self.survival.of(found.matched, rank).min(left);
            left -= probability;
            DraftToken { token: found.token, probability }
        };
        Ok(self.lookup(&text).into_iter().enumerate().map(guess).collect())
    }
}

/// Returns the last `length` tokens of `text`.
fn gram(text: &[u32], length: usize) -> Gram {
    let mut gram = [NONE; MAX_GRAM];
    gram[MAX_GRAM - length..].copy_from_slice(&text[text.len() - length..]);
    gram
}

/// Returns the number of equal tokens at the ends of `a` and `b`, at most [`MAX_MATCH`].
fn matched(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(MAX_MATCH).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
