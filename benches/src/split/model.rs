//! A split model that decodes.

use std::{ops::ControlFlow, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use client::{
    generate::{GenerateRequest, Generated},
    masking::Masking,
    session::Session,
    speculative::{ClientDrafter, DraftPolicy},
    split_model::{SplitModel, SplitOptions},
};
use model::{
    client_weights::client_base::ClientBase,
    sampling::{Sampling, SamplingParams},
};

use crate::workload;

#[derive(Debug)]
pub(super) struct Decoder(SplitModel);

impl Decoder {
    /// Takes the client's part of the model from `path` and calls the rest in `session`.
    ///
    /// # Errors
    /// If the session has another base.
    pub(super) fn new(path: &Path, session: Session, masking: Masking) -> Result<Self> {
        Self::with_effort(path, session, masking, DraftPolicy::default())
    }

    /// Creates a decoder that verifies this many draft tokens at once.
    ///
    /// # Errors
    /// If the session has another base.
    pub(super) fn with_effort(
        path: &Path,
        mut session: Session,
        masking: Masking,
        effort: DraftPolicy,
    ) -> Result<Self> {
        let base = ClientBase::open(path).context("the client's part of the model cannot be read")?;
        let mask = masking.prepare(&mut session, &mut |_, _| {}).context("masking cannot be prepared")?;
        let options = SplitOptions { kv_bytes: 32 << 20, effort, ..SplitOptions::default() };
        Ok(Self(SplitModel::new(base, session, mask, &options).context("no split model")?))
    }

    /// Generates exactly `tokens` tokens after a prompt of `prompt` tokens that is unique to `seed`.
    ///
    /// # Errors
    /// Fails if the answer has another number of tokens.
    pub(super) fn generate(&mut self, seed: u64, prompt: usize, tokens: usize) -> Result<Generated> {
        self.answer(workload::prompt(seed, prompt), tokens, 0.0, None)
    }

    /// Generates exactly `tokens` tokens after `prompt` at `temperature`, with a fixed sampling seed;
    /// `guesser` may draft.
    ///
    /// # Errors
    /// Fails if the answer has another number of tokens.
    pub(super) fn answer(
        &mut self,
        prompt: Vec<u32>,
        tokens: usize,
        temperature: f32,
        guesser: Option<ClientDrafter<'_>>,
    ) -> Result<Generated> {
        let request = Sampling { temperature, seed: 1, ..Sampling::default() };
        let sampling = SamplingParams::new(request, self.0.config().vocab_size).context("no sampling")?;
        let task = GenerateRequest { prompt, sampling, max_tokens: tokens, stop_tokens: Vec::new() };
        let mut go_on = |_| ControlFlow::Continue(());
        let generated = match guesser {
            Some(guesser) => self.0.generate_drafted(&task, None, guesser, &mut go_on),
            None => self.0.generate(&task, None, &mut go_on),
        };
        let generated = generated.context("a split client could not generate")?;
        ensure!(generated.tokens.len() == tokens, "a stream ended early; was the model's context too short?");
        Ok(generated)
    }
}

/// Mean time of the tokens after the first.
pub(super) fn time_of_a_token(generated: &Generated) -> Duration {
    let later = u32::try_from(generated.tokens.len()).unwrap_or(u32::MAX).saturating_sub(1);
    (generated.total - generated.first_token) / later.max(1)
}

#[cfg(test)]
mod tests {
    use client::{generate::GenerateFinish, speculative::DraftingStats};

    use super::*;

    #[test]
    fn the_first_token_and_its_prompt_do_not_count() {
        let generated = |tokens: usize| Generated {
            tokens: vec![0; tokens],
            finish: GenerateFinish::Length,
            cached_tokens: 0,
            first_token: Duration::from_millis(70),
            total: Duration::from_millis(100),
            drafted: DraftingStats::default(),
        };
        assert_eq!(time_of_a_token(&generated(4)), Duration::from_millis(10));
        assert_eq!(time_of_a_token(&generated(1)), Duration::from_millis(30));
    }
}
