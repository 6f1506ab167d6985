//! Draft tokens that a model predicts for one sequence.

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
    kv_slots::SequenceId,
};

/// Maximum missing tokens that a draft reads itself; [`ModelDraft::read_ahead`] reads only longer tails.
const FEW_TOKENS: usize = 16;

/// Number of tokens of the first read, while no timing is known.
const FIRST_TOKENS: usize = 32;

/// Drafter of one sequence; dropping the value releases its KV blocks.
pub struct ModelDraft<L = ResidentLayers> {
    drafter: Drafter<L>,
    id: SequenceId,
    /// Prompt and tokens that the target has accepted.
    verified: Vec<u32>,
    calibration: Calibration,
    /// Predictions that are not yet compared with accepted tokens.
    asked: Vec<PredictedTokens>,
    /// Computing time since the last `take_spent`.
    spent: Duration,
}

struct PredictedTokens {
    /// Tokens from the verified text to the node.
    way: Vec<u32>,
    /// Predicted tokens with their probabilities.
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
    fn new(drafter: Drafter<L>, id: SequenceId, prompt: &[u32], calibration: Calibration) -> Self {
        let verified = prompt.to_vec();
        Self { drafter, id, verified, calibration, asked: Vec::new(), spent: Duration::ZERO }
    }

    /// Starts another sequence with `prompt`; the calibration stays.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.verified.clear();
        self.verified.extend_from_slice(prompt);
        self.asked.clear();
        self.drafter.lock().forget(self.id);
    }

    /// Returns the seconds of all prefetched predictions of this drafter, or 0 before the first timing.
    #[must_use]
    pub fn owed_s(&self) -> f64 {
        self.drafter.lock().owed_s()
    }

    /// Returns the measured acceptance probabilities of this draft.
    #[must_use]
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// Returns the computing time since the last call of this function.
    pub fn take_spent(&mut self) -> Duration {
        std::mem::take(&mut self.spent)
    }

    /// Reads unread tokens of the sequence, for about `seconds` at most, so that the next draft is fast.
    /// Short tails of up to 16 tokens are left to the draft.
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

    /// Returns the verified text followed by the path to the node `at`.
    fn text(&self, tree: &TokenTree, at: Option<NodeId>) -> Vec<u32> {
        self.verified.iter().copied().chain(way(tree, at)).collect()
    }
}

impl<L: HostLayers<Error = Infallible>> Drafter<L> {
    /// Opens a drafter of one sequence that begins with `prompt`. The first request starts the computation.
    #[must_use]
    pub fn text(&self, prompt: &[u32], calibration: Calibration) -> ModelDraft<L> {
        let id = self.lock().texts.open();
        ModelDraft::new(self.clone(), id, prompt, calibration)
    }
}

/// Returns the tokens of the path below the root, down to `at`.
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
                // The target has not verified this position yet.
                self.asked.push(PredictedTokens { way: rest.to_vec(), said });
            }
        }
        self.verified.extend_from_slice(tokens);
        self.drafter.lock().forget(self.id);
        Ok(())
    }

    /// Returns an empty list if the text is too long for the model or has a token outside its vocabulary.
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
            // The model cannot read this text, so no wait is long enough.
            return Some(f64::INFINITY);
        }
        guessing.seconds_along(guessing.missing(self.id, &text))
    }

    fn usual(&self) -> f64 {
        self.calibration.usual()
    }

    fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>) {
        let (text, mut guessing) = (self.text(tree, at), self.drafter.lock());
        // A long read would delay the predictions of other sequences in the same pass.
        if guessing.can_read(&text) && guessing.missing(self.id, &text) <= FEW_TOKENS {
            guessing.prefetch_logits(self.id, text);
        }
    }
}
