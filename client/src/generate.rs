//! One sequence: prompt in, tokens out, drawn as the resident engine draws them.
//!
//! A seed and a position fix a draw, and a pass over the same tokens gives the same logits; so the answer is that of the
//! resident engine, token for token. Full blocks of keys and values stay behind for the next prompt that begins alike.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use cache::{Cursor, Namespace};
use ids::{BlockId, TenantId};
use model::{
    forward::{BLOCK_TOKENS, LogitRows, SequenceSlice},
    sampling::{SamplingParams, TokenCounts, sample},
};

use crate::{
    error::CallError,
    split_model::{OwnAdapter, SplitModel},
};

/// What stands in a sequence for an adapter's virtual tokens; the pass does not look at it.
const VIRTUAL_TOKEN: u32 = 0;

/// What is to be generated.
#[derive(Debug, Clone)]
pub struct Task {
    /// Tokens to go on from, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Most tokens to generate; with 0 nothing is computed.
    pub max_tokens: usize,
    /// Tokens that end the answer; the last one is part of it.
    pub stop_tokens: Vec<u32>,
}

/// Why generating stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token came.
    Stop,
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// The caller wanted no more.
    Stopped,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Generated {
    /// The tokens generated.
    pub tokens: Vec<u32>,
    /// Why they end.
    pub finish: Finish,
    /// Prompt tokens whose keys and values were kept from before.
    pub cached_tokens: usize,
    /// From the beginning to the first token.
    pub first_token: Duration,
    /// From the beginning to the end.
    pub total: Duration,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The executor is gone, or refuses.
    #[error(transparent)]
    Call(#[from] CallError),
    /// There is nothing to go on from.
    #[error("the prompt is empty: write something")]
    EmptyPrompt,
    /// A token that the model does not have.
    #[error("token {token} is not of this model, whose vocabulary has {vocab_size}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens there are.
        vocab_size: usize,
    },
    /// No token fits behind the prompt.
    #[error("the prompt has {prompt} tokens and the context holds {context_length}: shorten it")]
    PromptTooLong {
        /// Tokens of the prompt, with those of the adapter.
        prompt: usize,
        /// Tokens of the context.
        context_length: usize,
    },
    /// The KV pool is too small.
    #[error(
        "the sequence needs {needed} KV blocks and there are {total}: raise --kv-bytes or lower --max-tokens"
    )]
    PoolTooSmall {
        /// Blocks it needs at its end.
        needed: usize,
        /// Blocks there are.
        total: usize,
    },
    /// What was computed are no numbers.
    #[error(
        "what was computed after {tokens} tokens are no numbers: the adapter's weights, or the model, overflow"
    )]
    NotFinite {
        /// Tokens before.
        tokens: usize,
    },
}

/// A sequence on its way.
struct Sequence<'a> {
    adapter: Option<&'a OwnAdapter>,
    /// Virtual tokens, prompt, completion.
    tokens: Vec<u32>,
    /// How many of them have keys and values.
    computed: usize,
    blocks: Vec<BlockId>,
    /// Behind the last full block that was offered to later sequences.
    cursor: Cursor,
}

impl SplitModel {
    /// Generates what `task` asks for and tells `on_token` each token.
    ///
    /// # Errors
    /// The task cannot be done, or the executor is gone. The model may be used again.
    pub fn generate(
        &mut self,
        task: &Task,
        adapter: Option<&OwnAdapter>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        let begun = Instant::now();
        let end = self.check(task, adapter)?;
        if task.max_tokens == 0 {
            let (tokens, total) = (Vec::new(), begun.elapsed());
            return Ok(Generated {
                tokens,
                finish: Finish::Length,
                cached_tokens: 0,
                first_token: total,
                total,
            });
        }
        let mut sequence = self.enter(task, adapter)?;
        let first = sequence.tokens.len();
        let cached_tokens = sequence.computed.saturating_sub(first - task.prompt.len());
        let outcome = self.go_on(&mut sequence, task, end, begun, on_token);
        self.cache.release(&sequence.blocks);
        let (finish, first_token) = outcome?;
        let tokens = sequence.tokens.split_off(first);
        Ok(Generated { tokens, finish, cached_tokens, first_token, total: begun.elapsed() })
    }

    /// The length at which the sequence ends.
    fn check(&self, task: &Task, adapter: Option<&OwnAdapter>) -> Result<usize, GenerateError> {
        let (vocab_size, context_length) = (self.config().vocab_size, self.config().context_length);
        if task.prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        if let Some(&token) = task.prompt.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(GenerateError::UnknownToken { token, vocab_size });
        }
        let prompt = task.prompt.len() + adapter.map_or(0, |adapter| adapter.prepared.virtual_tokens());
        if prompt >= context_length {
            return Err(GenerateError::PromptTooLong { prompt, context_length });
        }
        let end = prompt.saturating_add(task.max_tokens).min(context_length);
        // The last token is never computed, so it needs no place.
        let needed = self.cache.blocks_for(end.saturating_sub(1));
        let total = self.cache.available();
        if needed > total { Err(GenerateError::PoolTooSmall { needed, total }) } else { Ok(end) }
    }

    /// Takes blocks for the prompt, those with its beginning among them.
    fn enter<'a>(
        &mut self,
        task: &Task,
        adapter: Option<&'a OwnAdapter>,
    ) -> Result<Sequence<'a>, GenerateError> {
        let before = adapter.map_or(0, |adapter| adapter.prepared.virtual_tokens());
        let mut tokens = vec![VIRTUAL_TOKEN; before];
        tokens.extend_from_slice(&task.prompt);
        let namespace = Namespace {
            adapter: adapter.map(|adapter| adapter.id),
            sharing: [0; 32],
            owner: TenantId::EVERYBODY,
        };
        // The last token is computed in any case: its logits are needed.
        let found = self.cache.lookup(namespace, &tokens[..tokens.len() - 1]);
        let computed = found.blocks.len() * BLOCK_TOKENS;
        let mut sequence = Sequence { adapter, tokens, computed, blocks: found.blocks, cursor: found.cursor };
        match self.grow(&mut sequence) {
            Ok(()) => Ok(sequence),
            Err(error) => {
                self.cache.release(&sequence.blocks);
                Err(error)
            }
        }
    }

    /// Takes the blocks a sequence lacks for its tokens.
    fn grow(&mut self, sequence: &mut Sequence<'_>) -> Result<(), GenerateError> {
        let needed = self.cache.blocks_for(sequence.tokens.len());
        let missing = needed.saturating_sub(sequence.blocks.len());
        let total = self.cache.available();
        let fresh = self.cache.allocate(missing).ok_or(GenerateError::PoolTooSmall { needed, total })?;
        sequence.blocks.extend(fresh);
        Ok(())
    }

    fn go_on(
        &mut self,
        sequence: &mut Sequence<'_>,
        task: &Task,
        end: usize,
        begun: Instant,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(Finish, Duration), GenerateError> {
        let mut counts = match task.sampling.needs_history() {
            true => TokenCounts::of_prompt(&task.prompt),
            false => TokenCounts::default(),
        };
        let mut first_token = None;
        loop {
            self.grow(sequence)?;
            self.compute_pending(sequence)?;
            let token = self.choose(sequence, task, &mut counts)?;
            let first_token = *first_token.get_or_insert_with(|| begun.elapsed());
            let told = on_token(token);
            if task.stop_tokens.contains(&token) {
                return Ok((Finish::Stop, first_token));
            } else if sequence.tokens.len() >= end {
                return Ok((Finish::Length, first_token));
            } else if told.is_break() {
                return Ok((Finish::Stopped, first_token));
            }
        }
    }

    /// Computes the keys and values that are missing, chunk by chunk, and the logits of the last token.
    fn compute_pending(&mut self, sequence: &mut Sequence<'_>) -> Result<(), CallError> {
        while sequence.computed < sequence.tokens.len() {
            let pending = &sequence.tokens[sequence.computed..];
            let count = pending.len().min(self.chunk_tokens);
            let slice = SequenceSlice {
                trunk: &[],
                tokens: &pending[..count],
                start: sequence.computed,
                blocks: &sequence.blocks,
                adapter: sequence.adapter.map(|adapter| &adapter.prepared),
                logits: if count == pending.len() { LogitRows::Last } else { LogitRows::None },
            };
            let mut logits = std::mem::take(&mut self.logits);
            let computed = self.forward(&[slice], &mut logits);
            self.logits = logits;
            computed?;
            self.offer(sequence, count);
        }
        Ok(())
    }

    /// Keeps the blocks that have become full for sequences that begin alike.
    fn offer(&mut self, sequence: &mut Sequence<'_>, count: usize) {
        let full_before = sequence.computed / BLOCK_TOKENS;
        sequence.computed += count;
        for index in full_before..sequence.computed / BLOCK_TOKENS {
            let tokens = &sequence.tokens[index * BLOCK_TOKENS..][..BLOCK_TOKENS];
            sequence.blocks[index] = self.cache.insert(&mut sequence.cursor, tokens, sequence.blocks[index]);
        }
    }

    /// Draws the next token and appends it.
    fn choose(
        &mut self,
        sequence: &mut Sequence<'_>,
        task: &Task,
        counts: &mut TokenCounts,
    ) -> Result<u32, GenerateError> {
        if !self.logits.iter().any(|logit| logit.is_finite()) {
            return Err(GenerateError::NotFinite { tokens: sequence.tokens.len() });
        }
        let position = sequence.tokens.len() as u64;
        let token = sample(&mut self.logits, &task.sampling, counts, position, &[]);
        sequence.tokens.push(token);
        if task.sampling.needs_history() {
            counts.push_completion(token);
        }
        Ok(token)
    }
}
