//! Sampling of a sequence's next token, from logits or by the pass.

use std::time::Instant;

use kv_cache::Cache;
use model::sampling::{self, Drawn, Probability, TokenDraw};
use shmproto::message::{ErrorCode, TokenOutput, WireError};
use speculation::tree::{NodeId, TokenTree};

use super::Sequence;
use crate::constrained_decoding::{AllowedTokens, GrammarState, GrammarStateError};

impl<A> Sequence<A> {
    /// Sets the grammar of a structured output.
    pub(in crate::engine) fn guided(self, guide: Option<GrammarState>) -> Self {
        Self { guide, ..self }
    }

    /// Whether neither a compilation nor a late mask is pending.
    pub(in crate::engine) fn knows_its_grammar(&mut self) -> bool {
        self.guide.as_mut().is_none_or(GrammarState::is_ready)
    }

    /// Whether the sequence waits for a late mask, and so skips steps.
    pub(in crate::engine) fn sits_out(&self) -> bool {
        self.guide.as_ref().is_some_and(GrammarState::is_late)
    }

    /// Whether a pass over the next `count` tokens samples one.
    fn draws(&self, count: usize) -> bool {
        self.grown.is_some() || count == self.pending()
    }

    /// Requests the mask, if a pass over the next `count` tokens samples a token.
    pub(in crate::engine) fn ask_guide(&mut self, count: usize) {
        let draws = self.draws(count);
        if let Some(guide) = self.guide.as_mut().filter(|_| draws) {
            let tree = self.grown.as_ref().map_or_else(TokenTree::new, |grown| grown.tree().clone());
            guide.request_mask(&self.tokens, tree);
        }
    }

    /// Waits until `until` for the mask, if the pass over `count` tokens needs one; false if it is late.
    pub(in crate::engine) fn has_looked(&mut self, count: usize, until: Instant) -> bool {
        let draws = self.draws(count);
        self.guide.as_mut().filter(|_| draws).is_none_or(|guide| guide.has_looked(until))
    }

    /// Takes only the mask-independent part of a pass over `count` tokens. The sampling token is computed
    /// again in a later step, with the same bits. Returns the number of tokens that stay computed.
    pub(in crate::engine) fn sit_out(&mut self, count: usize, kv: &mut Cache) -> usize {
        // Prompt scores need the logits of all tokens, and a tree depends on the pending one.
        let kept = if self.scores_prompt() || self.has_grown() { 0 } else { count - 1 };
        self.prune(kv);
        self.keep(kept, kv);
        kept
    }

    /// Returns the masks after the last token and after each draft token; `None` without a grammar.
    pub(super) fn allowed(&mut self) -> Result<Option<AllowedTokens>, WireError> {
        let allowed = self.guide.as_mut().map(GrammarState::allowed).transpose();
        allowed.map_err(|error| refused(&error))
    }

    /// Returns the parameters for sampling by the pass, if no option needs the logits.
    pub(super) fn draw(&self) -> Option<TokenDraw> {
        let is_banning = self.generated() < self.task.min_tokens && !self.task.stop_tokens.is_empty();
        let probability = match self.task.logprobs {
            None => Probability::Unwanted,
            Some(0) => Probability::Wanted,
            Some(_) => return None,
        };
        let draw = self.task.sampling.draw(self.tokens.len() as u64, probability);
        draw.filter(|_| !is_banning && self.guide.is_none())
    }

    /// Appends the token that the pass sampled.
    pub(super) fn append_drawn(&mut self, drawn: Drawn) -> TokenOutput {
        self.tokens.push(drawn.token);
        let logprob = self.task.logprobs.map_or(0.0, |_| drawn.logprob);
        TokenOutput { token: drawn.token, logprob, top: Vec::new() }
    }

    /// Samples the next token from those allowed after `at`, and appends it.
    pub(super) fn choose(
        &mut self,
        row: &mut [f32],
        (allowed, at): (&Option<AllowedTokens>, Option<NodeId>),
    ) -> Result<TokenOutput, WireError> {
        // The first finite logit ends the search, so only a row without any is read whole.
        if !row.iter().any(|logit| logit.is_finite()) {
            return Err(self.not_finite());
        }
        // Log-probabilities belong to the model's own distribution, which sampling changes.
        let model = self.task.logprobs.map(|_| row.to_vec());
        let mut banned =
            if self.generated() < self.task.min_tokens { &self.task.stop_tokens[..] } else { &[] };
        if let Some(allowed) = allowed {
            let allowed = allowed.at(at).map_err(|error| refused(&error))?;
            sampling::restrict(row, allowed.words());
            if !row.iter().any(|logit| logit.is_finite()) {
                return Err(self.not_finite());
            }
            if !allowed.has_others_than(banned) {
                // At the end of a grammar, only stop tokens are allowed.
                banned = &[];
            }
        }
        let position = self.tokens.len() as u64;
        let token = sampling::sample(row, &self.task.sampling, &self.counts, position, banned);
        self.tokens.push(token);
        if self.task.sampling.needs_history() {
            self.counts.push_completion(token);
        }
        let (logprob, top) = match (model, self.task.logprobs) {
            (Some(model), Some(top)) => sampling::logprobs(&model, token, top),
            _ => (0.0, Vec::new()),
        };
        Ok(TokenOutput { token, logprob, top })
    }

    /// Returns the error for a row without a finite logit.
    pub(super) fn not_finite(&self) -> WireError {
        let whose =
            if self.adapted.is_some() { "the adapter's weights overflow" } else { "the model overflows" };
        let message = format!(
            "the logits after {} tokens are not numbers: {whose}; test it with `holobiont adapters check \
             --probe`",
            self.tokens.len() - self.task.virtual_tokens
        );
        WireError { code: ErrorCode::NotFinite, message }
    }
}

/// Returns the error for a sequence whose grammar failed.
fn refused(error: &GrammarStateError) -> WireError {
    let code = match error {
        GrammarStateError::Grammar(_) | GrammarStateError::Match(_) => ErrorCode::InvalidRequest,
        GrammarStateError::Fault => ErrorCode::Internal,
    };
    WireError { code, message: error.to_string() }
}
