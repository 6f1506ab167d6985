//! One sequence: prompt in, tokens out, drawn as the resident engine draws them.
//!
//! A seed and a position fix a draw, and a pass over the same tokens gives the same logits; so the answer is that of the
//! resident engine, token for token. Full blocks of keys and values stay behind for the next prompt that begins alike.
//!
//! Tokens may be guessed ahead ([`speculative`](crate::speculative)) and are verified together (`verify`). A guess survives if it is what
//! is drawn in its place, from logits that have the bits of plain decoding; so the answer is still the same.

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

/// What stands in a sequence for an adapter's virtual tokens; the pass does not look at it.
const VIRTUAL_TOKEN: u32 = 0;

/// What is to be generated.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
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
pub enum GenerateFinish {
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
    pub finish: GenerateFinish,
    /// Prompt tokens whose keys and values were kept from before.
    pub cached_tokens: usize,
    /// From the beginning to the first token.
    pub first_token: Duration,
    /// From the beginning to the end.
    pub total: Duration,
    /// What came of drafts.
    pub drafted: DraftingStats,
}

/// What goes on while a sequence does.
struct GenerationContext<'a, 'd> {
    task: &'a GenerateRequest,
    /// Tokens at which it ends.
    end: usize,
    begun: Instant,
    counts: TokenCounts,
    drafting: Option<Drafting<'d>>,
    first_token: Option<Duration>,
    on_token: &'a mut dyn FnMut(u32) -> ControlFlow<()>,
}

impl GenerationContext<'_, '_> {
    /// Most drafted tokens in a row: the target's own comes behind the deepest.
    fn max_depth(&self, sequence: &SplitSequence<'_>) -> usize {
        self.end.saturating_sub(sequence.tokens.len() + 1)
    }

    /// Tells the caller a token, behind which the sequence has `tokens`. Whether, and why, it is the last.
    fn emit(&mut self, token: u32, tokens: usize) -> Option<GenerateFinish> {
        self.first_token.get_or_insert_with(|| self.begun.elapsed());
        let told = (self.on_token)(token);
        if self.task.stop_tokens.contains(&token) {
            Some(GenerateFinish::Stop)
        } else if tokens >= self.end {
            Some(GenerateFinish::Length)
        } else {
            told.is_break().then_some(GenerateFinish::Stopped)
        }
    }
}

impl SplitModel {
    /// Generates what `task` asks for and tells `on_token` each token.
    ///
    /// # Errors
    /// The task cannot be done, or the executor is gone. The model may be used again.
    pub fn generate(
        &mut self,
        task: &GenerateRequest,
        adapter: Option<&ClientAdapter>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        self.answer(task, adapter, None, on_token)
    }

    /// The same, token for token, but sooner where `guesser`, which knows the prompt, guesses well.
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate).
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

    /// The length at which the sequence ends.
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
        // The last token is never computed, so it needs no place.
        let needed = self.cache.blocks_for(end.saturating_sub(1));
        let total = self.cache.available();
        if needed > total { Err(GenerateError::PoolTooSmall { needed, total }) } else { Ok(end) }
    }

    /// Takes blocks for the prompt, those with its beginning among them.
    fn start_sequence<'a>(
        &mut self,
        task: &GenerateRequest,
        adapter: Option<&'a ClientAdapter>,
    ) -> Result<SplitSequence<'a>, GenerateError> {
        let before = adapter.map_or(0, |adapter| adapter.prepared.virtual_tokens());
        let mut tokens = vec![VIRTUAL_TOKEN; before];
        tokens.extend_from_slice(&task.prompt);
        let trail = trail(adapter, &task.prompt);
        // The last token is computed in any case: its logits are needed.
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

    /// Takes the blocks a sequence lacks for its tokens.
    fn grow(&mut self, sequence: &mut SplitSequence<'_>) -> Result<(), GenerateError> {
        self.grow_to(sequence, sequence.tokens.len())
    }

    /// Takes the blocks it lacks for `tokens` tokens.
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
            let (mut walk, told) = (TreeVerifier::new(&tree), sequence.tokens.len());
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
                drafting.accept(&sequence.tokens[told..], &tree, &verdict);
            }
            if let Some(finish) = finish {
                return Ok(finish);
            }
        }
    }

    /// What is worth verifying behind the pending token. Nothing behind a prompt that is not computed, and nothing that the
    /// answer has no place for.
    fn draft(&self, sequence: &SplitSequence<'_>, going: &mut GenerationContext<'_, '_>) -> TokenTree {
        let (max_depth, is_decoding) = (going.max_depth(sequence), going.first_token.is_some());
        match &mut going.drafting {
            Some(drafting) if is_decoding => drafting.tree(&self.sweeps, self.chunk_tokens - 1, max_depth),
            _ => TokenTree::new(),
        }
    }

    /// Computes what is pending, with the tree behind it: logits of the last token, and of each one drafted. What could not be
    /// verified is no longer in the tree that is given back. Whoever drafts may go on meanwhile.
    fn sweep(
        &mut self,
        sequence: &mut SplitSequence<'_>,
        tree: TokenTree,
        going: &mut GenerationContext<'_, '_>,
    ) -> Result<(TokenTree, Segments), GenerateError> {
        let (begun, is_decoding) = (Instant::now(), sequence.computed + 1 == sequence.tokens.len());
        let takes = self.sweeps.takes(1 + tree.len()).filter(|_| is_decoding);
        // Behind what comes of the last sweep there is nothing to guess.
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

    /// A sweep, as it is for all.
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

    /// Computes the keys and values that are missing, chunk by chunk, and the logits of the last token.
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

    /// Keeps the blocks that have become full for sequences that begin alike.
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

    /// Draws the next token from a row of logits and appends it.
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
