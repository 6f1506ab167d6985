//! Who guesses.

use crate::tree::{NodeId, TokenTree};

/// Most guesses for one place.
pub const MAX_GUESSES: usize = 4;

/// A token that may come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftToken {
    /// Its id in the vocabulary.
    pub token: u32,
    /// How often such guesses come true, 0 to 1.
    pub probability: f64,
}

/// Somebody who guesses what the target will say.
pub trait Draft {
    /// Why there are no guesses; `Infallible` for a table.
    type Error;

    /// The sequence goes on with `tokens`, which the target said: what is guessed from now on comes behind the last of them.
    ///
    /// # Errors
    /// The draft cannot take them in.
    fn accept(&mut self, tokens: &[u32]) -> Result<(), Self::Error>;

    /// What may come behind `at` (`None`: behind the root), the likeliest first, each token once, at most
    /// [`MAX_GUESSES`]. Empty: nobody knows.
    ///
    /// # Errors
    /// The draft cannot say.
    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Self::Error>;

    /// Whether guessing takes time, so that it is done while there is nothing else to do, and what was guessed is kept. A table
    /// is asked when everything is known that there is to know.
    fn takes_time(&self) -> bool {
        false
    }
}

/// A draft that takes time to ask.
pub trait CostedDraft: Draft {
    /// Seconds that asking behind `at` would take; `None` if nobody has timed it yet.
    fn guess_s(&self, tree: &TokenTree, at: Option<NodeId>) -> Option<f64>;

    /// The chance that the likeliest guess of a place comes true of which nothing is known yet.
    fn usual(&self) -> f64;

    /// It is about to be asked what comes behind `at`, and may answer that along with what else is foreseen.
    fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>) {
        let _ = (tree, at);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::convert::Infallible;

    use scheduling::random::Rng;

    use super::*;

    /// A draft that guesses by a hash of the way: the same way, the same guesses.
    #[derive(Debug)]
    pub(crate) struct HashedDraft {
        /// Guesses for each place.
        pub(crate) width: usize,
        /// Places that it was asked about.
        pub(crate) runs: Vec<Option<NodeId>>,
    }

    impl Draft for HashedDraft {
        type Error = Infallible;

        fn accept(&mut self, _: &[u32]) -> Result<(), Infallible> {
            Ok(())
        }

        fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
            self.runs.push(at);
            let way =
                at.into_iter().flat_map(|at| tree.path(at).iter()).map(|node| u64::from(tree.token(node)));
            let rng = Rng::seeded(way.fold(7, |hash, token| Rng::keyed(hash).bits(token)));
            let mut left = 1.0;
            Ok((0..self.width)
                .map(|rank| {
                    let probability = left * (0.3 + 0.6 * rng.uniform(rank as u64));
                    left -= probability;
                    DraftToken { token: rank as u32, probability }
                })
                .collect())
        }
    }
}
