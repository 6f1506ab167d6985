//! Who drafts for a sequence.

use std::{convert::Infallible, fmt};

use speculation::{
    draft::{Draft, Guess},
    ngram::{Ngram, Survival},
    tree::{NodeId, TokenTree},
};

/// Somebody who drafts for one sequence.
pub trait Author: Draft<Error = Infallible> + Send {
    /// What it has learned about those it drafts for.
    fn learned(&self) -> Option<&Survival> {
        None
    }
}

impl Author for Ngram {
    fn learned(&self) -> Option<&Survival> {
        Some(self.survival())
    }
}

impl Draft for Box<dyn Author> {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.as_mut().accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<Guess>, Infallible> {
        self.as_mut().guesses(tree, at)
    }
}

/// An author, and how much of its sequence it knows.
pub(super) struct Commission {
    pub(super) author: Box<dyn Author>,
    pub(super) known: usize,
}

impl fmt::Debug for Commission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commission").field("known", &self.known).finish_non_exhaustive()
    }
}
