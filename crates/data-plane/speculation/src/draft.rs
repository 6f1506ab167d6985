//! Drafter traits.

use crate::tree::{NodeId, TokenTree};

/// Maximum number of draft tokens that a drafter returns for one position.
pub const MAX_GUESSES: usize = 4;

/// A draft token and its acceptance probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftToken {
    /// Token id in the vocabulary.
    pub token: u32,
    /// Measured acceptance probability of such draft tokens, 0 to 1.
    pub probability: f64,
}

/// A drafter: predicts the target's next tokens.
pub trait Draft {
    /// Error of the drafter; `Infallible` for a table.
    type Error;

    /// Appends `tokens`, which the target emitted. Later draft tokens continue after the last of them.
    ///
    /// # Errors
    /// The drafter cannot process the tokens.
    fn accept(&mut self, tokens: &[u32]) -> Result<(), Self::Error>;

    /// Returns draft tokens that may follow node `at` (`None`: the root), likeliest first, without
    /// duplicates, at most [`MAX_GUESSES`]. An empty result means that the drafter has no prediction.
    ///
    /// # Errors
    /// The drafter cannot compute a prediction.
    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Self::Error>;

    /// Whether prediction takes time. The caller then drafts during idle time and keeps the results. A table
    /// is asked only when all tokens before the position are known.
    fn takes_time(&self) -> bool {
        false
    }
}

/// A drafter whose predictions take time.
pub trait CostedDraft: Draft {
    /// Returns the seconds that a prediction after `at` would take; `None` before the first measurement.
    fn guess_s(&self, tree: &TokenTree, at: Option<NodeId>) -> Option<f64>;

    /// Returns the acceptance probability of the likeliest draft token at a position still unknown.
    fn usual(&self) -> f64;

    /// Announces a question about `at`, so that the drafter may compute announced positions together.
    fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>) {
        let _ = (tree, at);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::convert::Infallible;

    use scheduling::random::Rng;

    use super::*;

    /// A drafter that predicts by a hash of the token path, so equal paths get equal draft tokens.
    #[derive(Debug)]
    pub(crate) struct HashedDraft {
        pub(crate) width: usize,
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
