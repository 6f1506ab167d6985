//! A draft that is told the answer and gets a part of it wrong: what a draft of that quality is worth (CHECKLIST L-19).

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

/// Of second guesses, where the first is wrong, those that are right.
const SECOND: f64 = 0.6;

/// How often first guesses are right where the draft is sure, and where it is not.
const SURE: f64 = 0.97;
const UNSURE: f64 = 0.5;

/// How often first guesses are right. The draft knows: it says so of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quality {
    sure: f64,
    unsure: f64,
    /// Share of places where it is unsure.
    share: f64,
}

impl Quality {
    /// The same everywhere.
    pub(crate) const fn even(correct: f64) -> Self {
        Self { sure: correct, unsure: correct, share: 0.0 }
    }

    /// In the mean: as drafts do, it knows most tokens and is in doubt about the others.
    pub(crate) fn uneven(correct: f64) -> Self {
        Self { sure: SURE, unsure: UNSURE, share: (SURE - correct) / (SURE - UNSURE) }
    }
}

/// See the module. Which guesses are wrong follows from the place and `seed` alone.
#[derive(Debug, Clone)]
pub(crate) struct OracleDraft {
    pub(crate) answer: Arc<[u32]>,
    /// Tokens of it that were said.
    pub(crate) said: usize,
    /// Guesses for each place.
    pub(crate) width: usize,
    pub(crate) quality: Quality,
    pub(crate) seed: u64,
    /// What a guess takes of the thread that asks.
    pub(crate) takes: Duration,
}

impl OracleDraft {
    /// What is guessed at a place of the answer; none behind its end.
    pub(crate) fn at(&self, place: usize) -> Vec<DraftToken> {
        let Some(&truth) = self.answer.get(place) else { return Vec::new() };
        let rng = Rng::seeded(self.seed);
        let below = |draw: usize, share| rng.uniform((3 * place + draw) as u64) < share;
        let Quality { sure, unsure, share } = self.quality;
        let correct = if below(2, share) { unsure } else { sure };
        // Neighbours of a token are other tokens.
        let (first, second) = match (below(0, correct), below(1, SECOND)) {
            (true, _) => (truth, truth ^ 1),
            (false, true) => (truth ^ 1, truth),
            (false, false) => (truth ^ 1, truth ^ 2),
        };
        let guesses = [(first, correct), (second, (1.0 - correct) * SECOND)];
        let guess = |(token, probability)| DraftToken { token, probability };
        guesses.into_iter().take(self.width).map(guess).collect()
    }

    /// Takes the time of a guess.
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

/// A planted draft that guesses where that is worth its time, as an engine takes it.
#[derive(Debug)]
pub(crate) struct PricedOracle {
    planted: OracleDraft,
    price: Option<DraftCost>,
    spent: Duration,
}

impl PricedOracle {
    /// It guesses nothing before it is told what that may cost.
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
