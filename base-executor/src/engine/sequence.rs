//! One sequence of the engine.
//!
//! Only `tokens` (virtual tokens, prompt, completion) must survive a preemption. The first `computed` of them
//! have KV entries in `blocks`, the others are pending. A preempted sequence has `computed = 0` again.
//!
//! Virtual tokens (prefix tuning) have positions, and are computed, kept and cached like other tokens. No
//! report and no penalty counts them as prompt.

mod draft_tree;
mod first_output;
mod kv_admission;
mod pooling;
mod replay;
mod token_sampling;

use std::{
    slice::ChunksExact,
    sync::Arc,
    time::{Duration, Instant},
};

use kv_cache::{Cache, Cursor, PrefixPath};
use model::{
    forward::{BLOCK_TOKENS, LogitRows},
    linear_sites::SitePath,
    sampling::{self, Drawn, SamplingParams, TokenCounts},
};
use scheduling::batch::{PromptLogits, RunningStage};
use shmproto::message::{Finish, Output, ProvisionalMode, TokenOutput};
use types::{AdapterId, BlockId, TenantId};

pub(crate) use self::first_output::failure;
pub(super) use self::{
    draft_tree::{BranchBlocks, DraftTree, Verified},
    kv_admission::{KvAdmission, OffloadFetch},
    pooling::PoolingSpec,
};
use self::{
    first_output::{Admission, FirstOutput},
    pooling::PoolingState,
};
use super::{drafter_state::DrafterState, event::RequestKey, model_runner::SamplingLocation};
use crate::constrained_decoding::GrammarState;

/// Placeholder of a virtual token; the pass uses the adapter's keys and values instead.
const VIRTUAL_TOKEN: u32 = 0;

/// Output of a pass for one sequence.
#[derive(Debug)]
pub(super) enum SequenceOutput<'a> {
    Rows(&'a mut [f32]),
    /// Next token; `None` if no logit was finite.
    Token(Option<Drawn>),
    States(ChunksExact<'a, f32>),
}

#[derive(Debug)]
pub(super) struct SequenceAdapter<A> {
    pub(super) id: AdapterId,
    pub(super) adapter: Arc<A>,
    pub(super) hold: AdapterHold,
}

/// Whether a sequence holds its adapter on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AdapterHold {
    /// The adapter was not requested yet.
    None,
    /// The sequence has waited for the adapter since this time.
    Waits(Instant),
    /// The sequence holds the adapter until it is retired.
    Held,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct SequenceOrigin {
    pub(super) caller: RequestKey,
    pub(super) received_at: Instant,
}

/// Parameters of a sequence's generation.
#[derive(Debug)]
pub(super) struct GenerationSpec {
    pub(super) sampling: SamplingParams,
    pub(super) stop_tokens: Vec<u32>,
    /// Number of generated tokens before a stop token may be sampled.
    pub(super) min_tokens: usize,
    /// Number of virtual tokens before the prompt.
    pub(super) virtual_tokens: usize,
    /// Maximum length of virtual tokens, prompt and completion together.
    pub(super) end: usize,
    /// Number of tokens at the prompt's end that an earlier request generated.
    pub(super) generated_before: usize,
    /// Number of alternatives reported per token; `None` for no report.
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: Option<usize>,
    /// How the prompt becomes a vector, if one is requested.
    pub(super) pooling: Option<PoolingSpec>,
    /// Completion that a replay expects; empty for every other request.
    pub(super) expected: Vec<u32>,
    pub(super) deadline: Option<Instant>,
    /// Whether provisional tokens are sent.
    pub(super) provisional: ProvisionalMode,
    /// Path of the sequence's rows through the base's layers.
    pub(super) path: SitePath,
}

#[derive(Debug)]
pub(super) struct Sequence<A> {
    pub(super) caller: RequestKey,
    received_at: Instant,
    pub(super) adapted: Option<SequenceAdapter<A>>,
    pub(super) task: GenerationSpec,
    pub(super) tokens: Vec<u32>,
    pub(super) computed: usize,
    pub(super) blocks: Vec<BlockId>,
    trail: PrefixPath,
    /// Index of the first completion token.
    prompt_end: usize,
    counts: TokenCounts,
    /// Position in the prefix tree after the latest full block.
    cursor: Cursor,
    /// Draft tree of the next step.
    pub(super) grown: Option<DraftTree>,
    /// Drafter of the sequence, once it has one.
    pub(super) drafter_state: Option<DrafterState>,
    is_admitted: bool,
    /// Time it waited for its adapter to reach the device, in microseconds.
    load_wait_us: u64,
    fetched: OffloadFetch,
    /// Time it waited for KV blocks from lower tiers, in microseconds.
    kv_wait_us: u64,
    opening: FirstOutput,
    /// Grammar of a structured output.
    guide: Option<GrammarState>,
    /// Output so far of a request for a vector.
    pool: Option<PoolingState>,
}

impl<A> Sequence<A> {
    pub(super) fn new(
        SequenceOrigin { caller, received_at }: SequenceOrigin,
        adapted: Option<SequenceAdapter<A>>,
        trail: PrefixPath,
        mut prompt: Vec<u32>,
        task: GenerationSpec,
    ) -> Self {
        let counts = match task.sampling.needs_history() {
            true => counts(&prompt, task.generated_before),
            false => TokenCounts::default(),
        };
        prompt.splice(..0, std::iter::repeat_n(VIRTUAL_TOKEN, task.virtual_tokens));
        Self {
            caller,
            received_at,
            adapted,
            pool: task.pooling.clone().map(PoolingState::new),
            task,
            prompt_end: prompt.len(),
            tokens: prompt,
            computed: 0,
            blocks: Vec::new(),
            trail,
            counts,
            cursor: trail.root(),
            grown: None,
            drafter_state: None,
            is_admitted: false,
            load_wait_us: 0,
            fetched: OffloadFetch::Nothing,
            kv_wait_us: 0,
            opening: FirstOutput::Due { prompt: Vec::new(), admission: Admission::default() },
            guide: None,
        }
    }

    /// Returns the adapter, if it applies to the next token to be computed.
    pub(super) fn adapter(&self) -> Option<&Arc<A>> {
        let applies = self.trail.applies(self.computed);
        self.adapted.as_ref().filter(|_| applies).map(|adapted| &adapted.adapter)
    }

    pub(super) fn adapter_id(&self) -> Option<AdapterId> {
        self.adapted.as_ref().map(|adapted| adapted.id)
    }

    /// Returns the adapter that the sequence holds on the device.
    pub(super) fn held_adapter(&self) -> Option<AdapterId> {
        self.adapted.as_ref().filter(|adapted| adapted.hold == AdapterHold::Held).map(|adapted| adapted.id)
    }

    /// Starts the wait for the adapter, if it has not started.
    pub(super) fn wait_for_adapter(&mut self, now: Instant) {
        if let Some(adapted) = &mut self.adapted
            && adapted.hold == AdapterHold::None
        {
            adapted.hold = AdapterHold::Waits(now);
        }
    }

    /// Holds the adapter on the device from now on; returns the waiting time in microseconds.
    pub(super) fn hold_adapter(&mut self, now: Instant) -> u64 {
        let Some(adapted) = &mut self.adapted else { return 0 };
        if let AdapterHold::Waits(since) = std::mem::replace(&mut adapted.hold, AdapterHold::Held) {
            self.load_wait_us = microseconds(now.saturating_duration_since(since));
        }
        self.load_wait_us
    }

    /// Returns the number of tokens without KV entries.
    pub(super) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_end
    }

    /// Returns the number of virtual tokens without KV entries.
    pub(super) fn pending_virtual(&self) -> usize {
        self.task.virtual_tokens.saturating_sub(self.computed)
    }

    /// Whether one generated token is pending, so that the sequence takes part in every step.
    pub(super) fn is_decoding(&self) -> bool {
        self.generated() > 0 && self.pending() == 1
    }

    /// Returns prompt and completion.
    pub(super) fn text(&self) -> &[u32] {
        &self.tokens[self.task.virtual_tokens..]
    }

    /// Returns the number of tokens that may still be generated.
    pub(super) fn left(&self) -> usize {
        self.task.end.saturating_sub(self.tokens.len())
    }

    pub(super) fn whose(&self) -> (Option<AdapterId>, TenantId) {
        (self.trail.own().adapter, self.trail.own().owner)
    }

    /// Returns the number of additional blocks that the tokens need.
    pub(super) fn missing_blocks(&self) -> usize {
        self.tokens.len().div_ceil(BLOCK_TOKENS).saturating_sub(self.blocks.len())
    }

    /// Returns the stage for the scheduler.
    pub(super) fn stage(&self) -> RunningStage {
        if self.sits_out() {
            return RunningStage::Waiting;
        }
        if self.is_decoding() {
            return RunningStage::Decoding { missing_blocks: self.missing_blocks() };
        }
        let report = match self.scores_prompt() {
            true => PromptLogits::Each { virtual_tokens: self.pending_virtual() },
            false => PromptLogits::Last,
        };
        RunningStage::Prompt { pending: self.trail.alike(self.computed, self.pending()), report }
    }

    /// Returns the logits needed of the next `count` tokens.
    pub(super) fn logits_of(&self, count: usize, drawing: SamplingLocation) -> LogitRows {
        if let Some(pool) = &self.pool {
            pool.wanted(count, self.pending(), self.pending_virtual())
        } else if self.scores_prompt() {
            if count <= self.pending_virtual() { LogitRows::None } else { LogitRows::All }
        } else if count == self.pending() {
            let draw = if drawing == SamplingLocation::ByThePass { self.draw() } else { None };
            draw.map_or(LogitRows::Last, LogitRows::Draw)
        } else {
            LogitRows::None
        }
    }

    /// Whether the request needs log-probabilities of all prompt tokens, so that all must be computed.
    pub(super) fn scores_prompt(&self) -> bool {
        self.task.prompt_logprobs.is_some() && matches!(self.opening, FirstOutput::Due { .. })
    }

    /// Whether all prompt tokens must be computed, without the prefix cache.
    pub(super) fn computes_all(&self) -> bool {
        self.scores_prompt() || self.is_replay() || self.pool.as_ref().is_some_and(PoolingState::takes_all)
    }

    /// Handles a pass's output for the next `count` tokens, as requested by [`logits_of`], in rows of
    /// `vocab_size`. Returns an output once all tokens are computed.
    ///
    /// [`logits_of`]: Self::logits_of
    pub(super) fn advance(
        &mut self,
        count: usize,
        mut given: SequenceOutput<'_>,
        vocab_size: usize,
        kv: &mut Cache,
    ) -> Option<Output> {
        if self.scores_prompt()
            && let SequenceOutput::Rows(rows) = &given
        {
            self.score_prompt(rows, vocab_size);
        }
        match (&mut self.pool, &mut given) {
            (Some(pool), SequenceOutput::States(states)) => states.for_each(|state| pool.add_state(state)),
            (Some(pool), SequenceOutput::Rows(rows)) => {
                rows.chunks_exact(vocab_size).for_each(|row| pool.take_logits(row));
            }
            _ => {}
        }
        self.keep(count, kv);
        if self.pending() > 0 {
            return None;
        }
        if let Some(pool) = &self.pool {
            return Some(match pool.pooled() {
                Some(pooled) => Output { pooled, ..self.output(Vec::new(), Some(Finish::Length)) },
                None => failure(self.caller.request, self.not_finite()),
            });
        }
        if self.tokens.len() >= self.task.end {
            return Some(self.output(Vec::new(), Some(Finish::Length)));
        }
        let token = match &mut given {
            SequenceOutput::Rows(rows) => {
                let last = rows.len() - vocab_size;
                self.allowed().and_then(|allowed| self.choose(&mut rows[last..], (&allowed, None)))
            }
            SequenceOutput::Token(drawn) => {
                drawn.map(|drawn| self.append_drawn(drawn)).ok_or_else(|| self.not_finite())
            }
            SequenceOutput::States(_) => unreachable!("only requests for a vector ask for states"),
        };
        match token {
            Ok(token) => {
                let finish = self.finish_after(token.token);
                Some(self.output(vec![token], finish))
            }
            Err(error) => Some(failure(self.caller.request, error)),
        }
    }

    /// Marks the next `count` tokens as computed, and inserts full blocks into the prefix cache.
    fn keep(&mut self, count: usize, kv: &mut Cache) {
        let full_before = self.computed / BLOCK_TOKENS;
        self.computed += count;
        if self.is_replay() {
            // A replay is evidence about the weights, so it neither reads nor leaves cached blocks.
            return;
        }
        for index in full_before..self.computed / BLOCK_TOKENS {
            let begin = index * BLOCK_TOKENS;
            if let Some(cursor) = self.trail.fork_at(begin, &self.tokens) {
                self.cursor = cursor;
            }
            let tokens = &self.tokens[begin..][..BLOCK_TOKENS];
            self.blocks[index] = kv.insert(&mut self.cursor, tokens, self.blocks[index]);
        }
    }

    fn score_prompt(&mut self, rows: &[f32], vocab_size: usize) {
        let FirstOutput::Due { prompt, .. } = &mut self.opening else { return };
        let top = self.task.prompt_logprobs.unwrap_or(0);
        // The logits at a token predict the token after it.
        let successors = &self.tokens[self.computed + 1..self.prompt_end];
        for (&token, row) in successors.iter().zip(rows.chunks_exact(vocab_size)) {
            let (logprob, top) = sampling::logprobs(row, token, top);
            prompt.push(TokenOutput { token, logprob, top });
        }
    }

    fn finish_after(&self, token: u32) -> Option<Finish> {
        if self.task.stop_tokens.contains(&token) && self.generated() > self.task.min_tokens {
            Some(Finish::Stop)
        } else if self.tokens.len() >= self.task.end || self.deviates() {
            Some(Finish::Length)
        } else {
            None
        }
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Counts the tokens of a prompt whose last `generated` tokens belong to the completion.
fn counts(prompt: &[u32], generated: usize) -> TokenCounts {
    let (asked, completed) = prompt.split_at(prompt.len().saturating_sub(generated));
    let mut counts = TokenCounts::of_prompt(asked);
    completed.iter().for_each(|token| counts.push_completion(*token));
    counts
}
