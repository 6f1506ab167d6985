//! A drafter that knows the answer and is wrong at a chosen rate, to measure the value of that quality
//!.

use std::{
    convert::Infallible,
    hint,
    sync::Arc,
    time::{Duration, Instant},
};

use base_executor::drafter::SequenceDrafter;
use scheduling::random::Rng;
use speculation::{
    draft::{Draft, DraftToken},
    hybrid_drafter::DraftCost,
    tree::{NodeId, TokenTree},
};

/// Probability that the second draft token is right where the first is wrong.
const SECOND: f64 = 0.6;

/// Probability that the first draft token is right, where the drafter is sure and where it is not.
const SURE: f64 = 0.97;
const UNSURE: f64 = 0.5;

/// Probability of right first draft tokens; the drafter reports it with each token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quality {
    sure: f64,
    unsure: f64,
    /// Share of positions where the drafter is unsure.
    share: f64,
}

impl Quality {
    pub(crate) const fn even(correct: f64) -> Self {
        Self { sure: correct, unsure: correct, share: 0.0 }
    }

    /// Quality `correct` on average: as real drafters, sure of most tokens and in doubt about the others.
    pub(crate) fn uneven(correct: f64) -> Self {
        Self { sure: SURE, unsure: UNSURE, share: (SURE - correct) / (SURE - UNSURE) }
    }
}

/// Drafter of chosen quality. The position and `seed` alone decide which draft tokens are wrong.
#[derive(Debug, Clone)]
pub(crate) struct OracleDraft {
    pub(crate) answer: Arc<[u32]>,
    pub(crate) said: usize,
    pub(crate) width: usize,
    pub(crate) quality: Quality,
    pub(crate) seed: u64,
    /// Time that drafting takes on the calling thread.
    pub(crate) takes: Duration,
}

impl OracleDraft {
    /// Draft tokens at a position of the answer; none after its end.
    pub(crate) fn at(&self, place: usize) -> Vec<DraftToken> {
        let Some(&truth) = self.answer.get(place) else { return Vec::new() };
        let rng = Rng::seeded(self.seed);
        let below = |draw: usize, share| rng.uniform((3 * place + draw) as u64) < share;
        let Quality { sure, unsure, share } = self.quality;
        let correct = if below(2, share) { unsure } else { sure };
        // The neighbours of a token id are other tokens.
        let (first, second) = match (below(0, correct), below(1, SECOND)) {
            (true, _) => (truth, truth ^ 1),
            (false, true) => (truth ^ 1, truth),
            (false, false) => (truth ^ 1, truth ^ 2),
        };
        let guesses = [(first, correct), (second, (1.0 - correct) * SECOND)];
        let guess = |(token, probability)| DraftToken { token, probability };
        guesses.into_iter().take(self.width).map(guess).collect()
    }

    pub(crate) fn work(&self) {
        let begun = Instant::now();
        while begun.elapsed() < self.takes {
            hint::spin_loop();
        }
    }
}

impl Draft for OracleDraft {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.said += tokens.len();
        Ok(())
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        self.work();
        Ok(self.at(self.said + tree.depth(at)))
    }
}

/// An oracle drafter that drafts where this is worth its time, in the engine's interface.
#[derive(Debug)]
pub(crate) struct PricedOracle {
    planted: OracleDraft,
    price: Option<DraftCost>,
    spent: Duration,
}

impl PricedOracle {
    /// Starts with a budget of zero, so that nothing is drafted before the engine sets it.
    pub(crate) fn new(planted: OracleDraft) -> Self {
        Self { planted, price: None, spent: Duration::ZERO }
    }
}

impl Draft for PricedOracle {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.planted.accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        let Quality { sure, unsure, share } = self.planted.quality;
        let usual = sure * (1.0 - share) + unsure * share;
        let (takes_s, gain) = (self.planted.takes.as_secs_f64(), tree.confidence(at) * usual);
        if !self.price.as_mut().is_some_and(|price| price.pay(Some(takes_s), (tree, at), gain)) {
            return Ok(Vec::new());
        }
        let begun = Instant::now();
        let guesses = self.planted.guesses(tree, at);
        self.spent += begun.elapsed();
        guesses
    }

    fn takes_time(&self) -> bool {
        true
    }
}

impl SequenceDrafter for PricedOracle {
    fn set_price(&mut self, price: DraftCost) {
        self.price = Some(price);
    }

    fn take_spent(&mut self) -> Duration {
        std::mem::take(&mut self.spent)
    }

    fn is_of_model(&self, _: &TokenTree, _: NodeId) -> bool {
        true
    }
}
