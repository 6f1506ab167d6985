//! A draft without a model: what came the last time these tokens came (prompt lookup).
//!
//! Texts quote: code that is edited, documents that are summed up, JSON of one shape. The index is over the sequence's own
//! tokens, prompt and answer, and each token costs the same, however many there are. Tokens are chained back to where the same
//! one to four tokens stood last, as in LZ77; what matched there is followed back to see how much more is equal.
//!
//! How sure a guess is says no model, so it is counted: how often what followed a match of this length came again
//! ([`AcceptanceTable`]). It is counted for every token that the target says, drafted or not, so it costs no verification to find
//! out that a text does not repeat, or that it has begun to.

mod acceptance_table;

use std::{collections::HashMap, convert::Infallible};

pub use self::acceptance_table::AcceptanceTable;
use crate::{
    draft::{Draft, DraftToken, MAX_GUESSES},
    tree::{NodeId, TokenTree},
};

/// Longest run of tokens that is looked up at once.
const MAX_GRAM: usize = 4;

/// Longest match that is told from a shorter one.
const MAX_MATCH: usize = 32;

/// Most places that are looked at for one run of tokens.
const MAX_LINKS: usize = 8;

/// No token's id: fills up what is shorter than [`MAX_GRAM`].
const NONE: u32 = u32::MAX;

/// The last tokens before a place, at most [`MAX_GRAM`], behind as many [`NONE`] as are missing.
type Gram = [u32; MAX_GRAM];

/// A sequence's own past as a draft.
#[derive(Debug, Clone)]
pub struct Ngram {
    tokens: Vec<u32>,
    /// Where the token behind each run of tokens stands that came last.
    latest: HashMap<Gram, u32>,
    /// For each token and length of run (less one): where the token behind the same run stood before; 0, which no run
    /// stands before, if nowhere.
    before: Vec<[u32; MAX_GRAM]>,
    survival: AcceptanceTable,
}

/// What stood behind a match.
#[derive(Debug, Clone, Copy)]
struct NgramMatch {
    token: u32,
    /// Tokens that are equal.
    matched: usize,
}

impl Ngram {
    /// Behind `prompt`, trusted as `survival` says.
    #[must_use]
    pub fn new(prompt: &[u32], survival: AcceptanceTable) -> Self {
        let mut all = Self { tokens: Vec::new(), latest: HashMap::new(), before: Vec::new(), survival };
        prompt.iter().for_each(|&token| all.push(token));
        all
    }

    /// How far it is to be trusted by now.
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

    /// What stood behind the longest matches of the end of `text`, the likeliest first.
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
        // Stable: of equal matches the latest first.
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
            // They exclude each other.
            let probability = self.survival.of(found.matched, rank).min(left);
            left -= probability;
            DraftToken { token: found.token, probability }
        };
        Ok(self.lookup(&text).into_iter().enumerate().map(guess).collect())
    }
}

/// The last `length` tokens of `text`.
fn gram(text: &[u32], length: usize) -> Gram {
    let mut gram = [NONE; MAX_GRAM];
    gram[MAX_GRAM - length..].copy_from_slice(&text[text.len() - length..]);
    gram
}

/// How many tokens before the ends of both are equal, at most [`MAX_MATCH`].
fn matched(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(MAX_MATCH).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
