//! Who drafts for a sequence.

use std::{convert::Infallible, fmt};

use model::sweep::PIPELINE;
use shmproto::message::SpeculationStats;
use speculation::{
    ahead::{Ahead, Settled},
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

    /// Whether guessing takes time, so that it is done while there is nothing else to do, and what was guessed is kept. A table
    /// is asked when everything is known that there is to know.
    fn takes_time(&self) -> bool {
        true
    }
}

impl Author for Ngram {
    fn takes_time(&self) -> bool {
        false
    }

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
    /// What it drafted, of which a part is being verified.
    pub(super) ahead: Option<Ahead>,
}

impl Commission {
    /// Takes in what `text` has become; what it drafted behind the end of that.
    pub(super) fn settle(&mut self, text: &[u32], stats: &mut SpeculationStats) -> Settled {
        let said = &text[self.known..];
        let settled = self.ahead.take().map(|ahead| ahead.settle(said)).unwrap_or_default();
        if settled.kept + settled.discarded > 0 {
            tracing::trace!(target: PIPELINE, kept = settled.kept, discarded = settled.discarded, "keep");
        }
        stats.kept += settled.kept as u64;
        let Ok(()) = self.author.accept(said);
        self.known = text.len();
        settled
    }
}

impl fmt::Debug for Commission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commission").field("known", &self.known).finish_non_exhaustive()
    }
}
