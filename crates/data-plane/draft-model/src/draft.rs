//! What a model guesses for one text.

use std::{convert::Infallible, fmt, time::Duration};

use model::{
    forward::LogitRows,
    weights::{ResidentLayers, host::HostLayers},
};
use speculation::{
    calibration::Calibration,
    draft::{CostedDraft, Draft, DraftToken},
    tree::{NodeId, TokenTree},
};

use crate::{
    drafter::{CHUNK_TOKENS, Drafter},
    kv_slots::TextId,
};

/// Tokens that are read along with a guess; more are read ahead, as time allows.
const FEW_TOKENS: usize = 16;

/// Tokens of the first reading, whose length is not known before.
const FIRST_TOKENS: usize = 32;

/// See the module. Dropped, its keys and values are given back.
pub struct ModelDraft<L = ResidentLayers> {
    drafter: Drafter<L>,
    id: TextId,
    /// What the target has said and was asked.
    verified: Vec<u32>,
    calibration: Calibration,
    /// What the model said behind the last of them.
    asked: Vec<PredictedTokens>,
    /// Time that it has taken since somebody asked for that.
    spent: Duration,
}

/// What the model said at a place.
struct PredictedTokens {
    /// The tokens on the way there.
    way: Vec<u32>,
    /// Tokens, and the probabilities that it gives them.
    said: Vec<(u32, f64)>,
}

impl<L> fmt::Debug for ModelDraft<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelDraft").field("tokens", &self.verified.len()).finish_non_exhaustive()
    }
}

impl<L> Drop for ModelDraft<L> {
    fn drop(&mut self) {
        self.drafter.lock().close(self.id);
    }
}

impl<L: HostLayers<Error = Infallible>> ModelDraft<L> {
    fn new(drafter: Drafter<L>, id: TextId, prompt: &[u32], calibration: Calibration) -> Self {
        let verified = prompt.to_vec();
        Self { drafter, id, verified, calibration, asked: Vec::new(), spent: Duration::ZERO }
    }

    /// Another text begins, with `prompt`. What was learned stays.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.verified.clear();
        self.verified.extend_from_slice(prompt);
        self.asked.clear();
        self.drafter.lock().forget(self.id);
    }

    /// Seconds that all takes that was foreseen, for this text and others; 0 where nobody has timed it yet.
    #[must_use]
    pub fn owed_s(&self) -> f64 {
        self.drafter.lock().owed_s()
    }

    /// How far it is to be trusted by now.
    #[must_use]
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// Time that it has taken since this was asked last.
    pub fn take_spent(&mut self) -> Duration {
        std::mem::take(&mut self.spent)
    }

    /// Reads what of the text a guess would have to read first, if that is much, for about as many seconds at most.
    pub fn read_ahead(&mut self, seconds: f64) {
        let mut guessing = self.drafter.lock();
        if !guessing.can_read(&self.verified) {
            return;
        }
        let mut left_s = seconds;
        loop {
            let missing = guessing.missing(self.id, &self.verified);
            if missing <= FEW_TOKENS {
                return;
            }
            let wanted = missing.min(CHUNK_TOKENS);
            let tokens = match (guessing.seconds(0), guessing.seconds(wanted)) {
                (Some(fixed_s), Some(all_s)) if all_s > left_s => {
                    ((left_s - fixed_s) / (all_s - fixed_s).max(f64::MIN_POSITIVE) * wanted as f64) as usize
                }
                (Some(_), _) => wanted,
                (None, _) => wanted.min(FIRST_TOKENS),
            };
            if tokens < FEW_TOKENS || left_s <= 0.0 {
                return;
            }
            let end = self.verified.len() - missing + tokens;
            let (is_read, took) = guessing.read(self.id, &self.verified[..end], LogitRows::None);
            self.spent += took;
            left_s -= took.as_secs_f64();
            if !is_read {
                return;
            }
        }
    }

    /// The text as far as `at`.
    fn text(&self, tree: &TokenTree, at: Option<NodeId>) -> Vec<u32> {
        self.verified.iter().copied().chain(way(tree, at)).collect()
    }
}

impl<L: HostLayers<Error = Infallible>> Drafter<L> {
    /// Guesses for a text that begins with `prompt`, trusted as `calibration` says. Nothing is read before it is asked.
    #[must_use]
    pub fn text(&self, prompt: &[u32], calibration: Calibration) -> ModelDraft<L> {
        let id = self.lock().texts.open();
        ModelDraft::new(self.clone(), id, prompt, calibration)
    }
}

/// The tokens from behind the root to `at`.
fn way(tree: &TokenTree, at: Option<NodeId>) -> impl Iterator<Item = u32> {
    at.into_iter().flat_map(|at| tree.path(at).iter()).map(|node| tree.token(node))
}

impl<L: HostLayers<Error = Infallible>> Draft for ModelDraft<L> {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        for PredictedTokens { way, said } in std::mem::take(&mut self.asked) {
            if let Some(&truth) = tokens.strip_prefix(&way[..]).and_then(<[u32]>::first) {
                self.calibration.count(&said, truth);
            } else if let Some(rest) = way.strip_prefix(tokens) {
                // Nobody knows yet: the target has not come so far.
                self.asked.push(PredictedTokens { way: rest.to_vec(), said });
            }
        }
        self.verified.extend_from_slice(tokens);
        self.drafter.lock().forget(self.id);
        Ok(())
    }

    /// None where the text is too long for the model, or has a token that it does not know.
    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        let text = self.text(tree, at);
        let mut guessing = self.drafter.lock();
        if !guessing.can_read(&text) {
            return Ok(Vec::new());
        }
        let (said, took) = guessing.said(self.id, &text);
        drop(guessing);
        self.spent += took;
        let guesses = self.calibration.guesses(said.iter().copied()).collect();
        self.asked.push(PredictedTokens { way: way(tree, at).collect(), said });
        Ok(guesses)
    }

    fn takes_time(&self) -> bool {
        true
    }
}

impl<L: HostLayers<Error = Infallible>> CostedDraft for ModelDraft<L> {
    fn guess_s(&self, tree: &TokenTree, at: Option<NodeId>) -> Option<f64> {
        let (text, guessing) = (self.text(tree, at), self.drafter.lock());
        if !guessing.can_read(&text) {
            // It will not come, however long one waits.
            return Some(f64::INFINITY);
        }
        guessing.seconds_along(guessing.missing(self.id, &text))
    }

    fn usual(&self) -> f64 {
        self.calibration.usual()
    }

    fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>) {
        let (text, mut guessing) = (self.text(tree, at), self.drafter.lock());
        // Of what takes long to read, others would wait for their answers.
        if guessing.can_read(&text) && guessing.missing(self.id, &text) <= FEW_TOKENS {
            guessing.prefetch_logits(self.id, text);
        }
    }
}
