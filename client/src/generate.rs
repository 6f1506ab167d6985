//! Generation of one sequence, sampled as the resident engine samples.
//!
//! Seed and position determine each draw, and a pass over the same tokens gives the same logits. A split
//! client therefore gives the resident engine's answer, token for token. Full KV blocks stay in the prefix
//! cache for later prompts.
//!
//! A drafter may predict tokens ([`speculative`](crate::speculative)), which are verified together
//! (`verify`). A draft token is accepted if it is the token sampled at its position. The logits are bit for
//! bit those of plain decoding, so the answer is the same.

mod refused;
mod sequence;
mod verify;

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use model::{
    forward::{BLOCK_TOKENS, LogitRows, SequenceSlice},
    sampling::{SamplingParams, TokenCounts, sample},
};
use speculation::{
    tree::{Segments, TokenTree},
    verification::TreeVerifier,
};

pub use self::refused::GenerateError;
use self::sequence::{SplitSequence, trail};
use crate::{
    error::CallError,
    speculative::{ClientDrafter, Drafting, DraftingStats},
    split_model::{ClientAdapter, SplitModel},
};

/// Placeholder for an adapter's virtual tokens; the pass ignores its value.
const VIRTUAL_TOKEN: u32 = 0;

/// A request to generate an answer.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// Parameters of sampling, with the seed.
    pub sampling: SamplingParams,
    /// Maximum number of generated tokens; with 0 nothing is computed.
    pub max_tokens: usize,
    /// Tokens that end the answer; the last one is part of it.
    pub stop_tokens: Vec<u32>,
}

/// Reason why generation stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenerateFinish {
    /// A stop token was sampled.
    Stop,
    /// The token limit or the context length was reached.
    Length,
    /// The caller's callback stopped generation.
    Stopped,
}

/// A generated answer with its stats.
#[derive(Debug, Clone)]
pub struct Generated {
    /// Generated tokens, without the prompt.
    pub tokens: Vec<u32>,
    /// Reason why generation stopped.
    pub finish: GenerateFinish,
    /// Number of prompt tokens whose KV blocks were cached.
    pub cached_tokens: usize,
    /// Time from the start to the first token.
    pub first_token: Duration,
    /// Time from the start to the end.
    pub total: Duration,
    /// Stats of speculative decoding.
    pub drafted: DraftingStats,
}

struct GenerationContext<'a, 'd> {
    task: &'a GenerateRequest,
    /// Number of tokens, prompt included, at which the sequence ends.
    end: usize,
    begun: Instant,
    counts: TokenCounts,
    drafting: Option<Drafting<'d>>,
    first_token: Option<Duration>,
    on_token: &'a mut dyn FnMut(u32) -> ControlFlow<()>,
}

impl GenerationContext<'_, '_> {
    /// Returns the maximum depth of a token tree: the target model adds one token after the deepest node.
    fn max_depth(&self, sequence: &SplitSequence<'_>) -> usize {
        self.end.saturating_sub(sequence.tokens.len() + 1)
    }

    /// Reports a token, after which the sequence has `tokens` tokens; returns a finish reason at the last.
    fn emit(&mut self, token: u32, tokens: usize) -> Option<GenerateFinish> {
        self.first_token.get_or_insert_with(|| self.begun.elapsed());
        let flow = (self.on_token)(token);
        if self.task.stop_tokens.contains(&token) {
            Some(GenerateFinish::Stop)
        } else if tokens >= self.end {
            Some(GenerateFinish::Length)
        } else {
            flow.is_break().then_some(GenerateFinish::Stopped)
        }
    }
}

impl SplitModel {
    /// Generates the answer to `task` and calls `on_token` for each token.
    ///
    /// # Errors
    /// Fails if the task is not valid or the executor is gone. The model can be used again.
    pub fn generate(
        &mut self,
        task: &GenerateRequest,
        adapter: Option<&ClientAdapter>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        self.answer(task, adapter, None, on_token)
    }

    /// Like [`generate`](Self::generate) with the same tokens, but faster if the drafter `guesser`, which
    /// knows the prompt, predicts well.
    ///
    /// # Errors
    /// Fails as [`generate`](Self::generate) does.
    pub fn generate_drafted(
        &mut self,
        task: &GenerateRequest,
        adapter: Option<&ClientAdapter>,
        guesser: ClientDrafter<'_>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        self.answer(task, adapter, Some(Drafting::new(guesser, self.effort)), on_token)
    }

    fn answer(
        &mut self,
        task: &GenerateRequest,
        adapter: Option<&ClientAdapter>,
        drafting: Option<Drafting<'_>>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        let begun = Instant::now();
        let end = self.check(task, adapter)?;
        if task.max_tokens == 0 {
            return Ok(Generated {
                tokens: Vec::new(),
                finish: GenerateFinish::Length,
                cached_tokens: 0,
                first_token: begun.elapsed(),
                total: begun.elapsed(),
                drafted: DraftingStats::default(),
            });
        }
        let mut sequence = self.start_sequence(task, adapter)?;
        let first = sequence.tokens.len();
        let cached_tokens = sequence.computed.saturating_sub(first - task.prompt.len());
        let mut counts = TokenCounts::default();
        if task.sampling.needs_history() {
            counts = TokenCounts::of_prompt(&task.prompt);
        }
        let mut going = GenerationContext { task, end, begun, counts, drafting, first_token: None, on_token };
        let finish = self.decode_loop(&mut sequence, &mut going);
        self.cache.release(&sequence.blocks);
        self.cache.release(&sequence.forks.concat());
        let finish = finish?;
        let total = begun.elapsed();
        let first_token = going.first_token.unwrap_or(total);
        let drafted = going.drafting.map_or(DraftingStats::default(), |drafting| drafting.figures);
        let tokens = sequence.tokens.split_off(first);
        Ok(Generated { tokens, finish, cached_tokens, first_token, total, drafted })
    }

    /// Returns the number of tokens at which the sequence ends.
    fn check(&self, task: &GenerateRequest, adapter: Option<&ClientAdapter>) -> Result<usize, GenerateError> {
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
        // The last token is never computed, so it needs no KV slot.
        let needed = self.cache.blocks_for(end.saturating_sub(1));
        let total = self.cache.available();
        if needed > total { Err(GenerateError::PoolTooSmall { needed, total }) } else { Ok(end) }
    }

    fn start_sequence<'a>(
        &mut self,
        task: &GenerateRequest,
        adapter: Option<&'a ClientAdapter>,
    ) -> Result<SplitSequence<'a>, GenerateError> {
        let before = adapter.map_or(0, |adapter| adapter.prepared.virtual_tokens());
        let mut tokens = vec![VIRTUAL_TOKEN; before];
        tokens.extend_from_slice(&task.prompt);
        let trail = trail(adapter, &task.prompt);
        // The last prompt token is always computed, because its logits are needed.
        let found = trail.lookup(&mut self.cache, &tokens[..tokens.len() - 1]);
        let computed = found.blocks.len() * BLOCK_TOKENS;
        let mut sequence = SplitSequence {
            own: adapter,
            trail,
            tokens,
            computed,
            blocks: found.blocks,
            forks: Vec::new(),
            cursor: found.cursor,
        };
        match self.grow(&mut sequence) {
            Ok(()) => Ok(sequence),
            Err(error) => {
                self.cache.release(&sequence.blocks);
                Err(error)
            }
        }
    }

    fn grow(&mut self, sequence: &mut SplitSequence<'_>) -> Result<(), GenerateError> {
        self.grow_to(sequence, sequence.tokens.len())
    }

    /// Allocates the missing blocks for `tokens` tokens.
    fn grow_to(&mut self, sequence: &mut SplitSequence<'_>, tokens: usize) -> Result<(), GenerateError> {
        let needed = self.cache.blocks_for(tokens);
        let missing = needed.saturating_sub(sequence.blocks.len());
        let total = self.cache.available();
        let fresh = self.cache.allocate(missing).ok_or(GenerateError::PoolTooSmall { needed, total })?;
        sequence.blocks.extend(fresh);
        Ok(())
    }

    fn decode_loop(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        going: &mut GenerationContext<'_, '_>,
    ) -> Result<GenerateFinish, GenerateError> {
        loop {
            let tree = self.draft(sequence, going);
            let (tree, segments) = self.sweep(sequence, tree, going)?;
            let (mut walk, verified) = (TreeVerifier::new(&tree), sequence.tokens.len());
            let finish = loop {
                let row = segments.row(walk.at()).unwrap_or(0);
                let token = self.choose(sequence, going, row)?;
                let was_drafted = walk.advance(token);
                let finish = going.emit(token, sequence.tokens.len());
                if finish.is_some() || !was_drafted {
                    break finish;
                }
            };
            let verdict = walk.verdict();
            if !tree.is_empty() {
                self.commit_accepted(sequence, &segments, &verdict);
            }
            if let Some(drafting) = &mut going.drafting {
                drafting.accept(&sequence.tokens[verified..], &tree, &verdict);
            }
            if let Some(finish) = finish {
                return Ok(finish);
            }
        }
    }

    /// Returns the token tree to verify after the pending token. The tree is empty during prefill, and holds
    /// no node beyond the end of the answer.
    fn draft(&self, sequence: &SplitSequence<'_>, going: &mut GenerationContext<'_, '_>) -> TokenTree {
        let (max_depth, is_decoding) = (going.max_depth(sequence), going.first_token.is_some());
        match &mut going.drafting {
            Some(drafting) if is_decoding => drafting.tree(&self.sweeps, self.chunk_tokens - 1, max_depth),
            _ => TokenTree::new(),
        }
    }

    /// Computes the pending tokens and the tree: logits of the last token and of each node. Returns the tree
    /// without the nodes for which blocks were missing. The drafter may run meanwhile.
    fn sweep(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        tree: TokenTree,
        going: &mut GenerationContext<'_, '_>,
    ) -> Result<(TokenTree, Segments), GenerateError> {
        let (begun, is_decoding) = (Instant::now(), sequence.computed + 1 == sequence.tokens.len());
        let takes = self.sweeps.takes(1 + tree.len()).filter(|_| is_decoding);
        // After the last pass of the answer there is nothing to draft.
        let has_more = self.session().is_far() && going.max_depth(sequence) > 0;
        let swept = match going.drafting.as_mut().filter(|drafting| has_more && drafting.goes_on()) {
            Some(drafting) => drafting.meanwhile(takes, || self.compute(sequence, tree))?,
            None => self.compute(sequence, tree)?,
        };
        if is_decoding {
            self.sweeps.observe(swept.1.rows(), begun.elapsed());
        }
        Ok(swept)
    }

    /// Computes the pending tokens and the tree, without timing or drafting.
    fn compute(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        tree: TokenTree,
    ) -> Result<(TokenTree, Segments), GenerateError> {
        if !tree.is_empty() {
            return self.verify(sequence, tree);
        }
        self.grow(sequence)?;
        self.compute_pending(sequence)?;
        let segments = Segments::of(&tree);
        Ok((tree, segments))
    }

    /// Computes the missing keys and values, chunk by chunk, and the logits of the last token.
    fn compute_pending(&mut self, sequence: &mut SplitSequence<'_>) -> Result<(), CallError> {
        while sequence.computed < sequence.tokens.len() {
            let pending = &sequence.tokens[sequence.computed..];
            let count = sequence.trail.alike(sequence.computed, pending.len().min(self.chunk_tokens));
            let slice = SequenceSlice {
                trunk: &[],
                tokens: &pending[..count],
                start: sequence.computed,
                blocks: &sequence.blocks,
                adapter: sequence.adapter(),
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

    /// Inserts the blocks that became full into the prefix cache.
    fn offer(&mut self, sequence: &mut SplitSequence<'_>, count: usize) {
        let full_before = sequence.computed / BLOCK_TOKENS;
        sequence.computed += count;
        for index in full_before..sequence.computed / BLOCK_TOKENS {
            let begin = index * BLOCK_TOKENS;
            if let Some(cursor) = sequence.trail.fork_at(begin, &sequence.tokens) {
                sequence.cursor = cursor;
            }
            let tokens = &sequence.tokens[begin..][..BLOCK_TOKENS];
            sequence.blocks[index] = self.cache.insert(&mut sequence.cursor, tokens, sequence.blocks[index]);
        }
    }

    fn choose(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        going: &mut GenerationContext<'_, '_>,
        row: usize,
    ) -> Result<u32, GenerateError> {
        let vocab_size = self.config().vocab_size;
        let logits = &mut self.logits[row * vocab_size..][..vocab_size];
        if !logits.iter().any(|logit| logit.is_finite()) {
            return Err(GenerateError::NotFinite { tokens: sequence.tokens.len() });
        }
        let position = sequence.tokens.len() as u64;
        let sampling = &going.task.sampling;
        let token = sample(logits, sampling, &going.counts, position, &[]);
        sequence.tokens.push(token);
        if sampling.needs_history() {
            going.counts.push_completion(token);
        }
        Ok(token)
    }
}
