//! Execution of a plan, and outputs from its logits.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use model::forward::{ForwardPass, LogitRows};
use shmproto::message::{ErrorCode, Output, WireError};

use super::{
    Engine,
    model_runner::{Panic, StepFailed, StepOutput},
    schedule::ScheduledTokens,
    sequence::{SequenceOutput, Verified, failure},
};
use crate::constrained_decoding::GrammarWorkers;

/// Message of a request that fails by a fault.
pub(super) const FAULT: &str = "the executor failed on this request; see its log; other requests continue";

/// Message of a request that fails because weights could not be read.
pub(super) const NO_WEIGHTS: &str =
    "the executor cannot read its weights from the disk; follow its log, then send the request again";

/// A scheduled portion's part of the step output.
#[derive(Debug)]
enum OutputSlice {
    /// Range of logit rows.
    Rows(Range<usize>),
    /// Index of the sampled token.
    Drawn(usize),
    /// Range of hidden state rows.
    States(Range<usize>),
}

impl<P: ForwardPass> Engine<P> {
    /// Runs the forward pass over the plan.
    pub(super) fn compute(&mut self, plan: &[ScheduledTokens]) -> Result<(), StepFailed> {
        if let Err(error) = self.fork() {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot copy a KV block");
            return Err(StepFailed::Fault);
        }
        let rows = plan.iter().map(|portion| portion.count).sum();
        self.ask_guides(plan);
        self.begin_overlapped_drafting(plan, rows);
        let running = self.queues.running();
        let slices =
            |portion: &ScheduledTokens| running[portion.sequence].slices(portion.count, portion.logits);
        let batch: Vec<_> = plan.iter().flat_map(slices).collect();
        let decodes = |portion: &ScheduledTokens| running[portion.sequence].is_decoding();
        if plan.iter().any(decodes) {
            failpoint::pass("executor.decode");
        }
        if !plan.iter().all(decodes) {
            failpoint::pass("executor.prefill_chunk");
        }
        let begin = self.clock.now();
        let meanwhile = (&mut self.drafts.overlapped, &mut self.stats.speculation);
        let computed = self.computing.run(&batch, meanwhile, &*self.clock);
        let took = self.clock.now().saturating_duration_since(begin);
        self.tiers.device.observe(rows, took);
        if plan.iter().all(decodes) {
            self.drafts.observe(rows, took);
        }
        self.end_overlapped_drafting();
        computed
    }

    /// Requests the masks that sequences with a grammar need, while the pass computes.
    fn ask_guides(&mut self, plan: &[ScheduledTokens]) {
        for portion in plan {
            self.queues.running_mut(portion.sequence).ask_guide(portion.count);
        }
    }

    /// Gives every sequence of the plan its output, and retires ended ones.
    pub(super) fn postprocess(&mut self, plan: &[ScheduledTokens]) {
        let mut ended = Vec::new();
        let until = Instant::now() + self.look_budget();
        let (mut row, mut drawn, mut state) = (0, 0, 0);
        for portion in plan {
            let place = match portion.logits {
                LogitRows::Draw(_) => OutputSlice::Drawn(drawn),
                LogitRows::States { .. } => OutputSlice::States(state..state + portion.states()),
                _ => OutputSlice::Rows(row..row + portion.rows()),
            };
            row += portion.rows();
            state += portion.states();
            drawn += usize::from(matches!(portion.logits, LogitRows::Draw(_)));
            if self.sits_out(*portion, until) {
                continue;
            }
            let output = self.advance(*portion, place).unwrap_or_else(|_| Some(self.fault(*portion, FAULT)));
            let Some(output) = output else { continue };
            if output.finish.is_some() || output.error.is_some() {
                ended.push(portion.sequence);
            }
            self.stats.generated_tokens += output.tokens.len() as u64;
            self.outboxes.output(self.queues.running()[portion.sequence].caller, output);
        }
        self.retire_running(ended);
    }

    /// Whether the portion's mask is late, so that its sequence skips this step.
    fn sits_out(&mut self, portion: ScheduledTokens, until: Instant) -> bool {
        let sequence = self.queues.running_mut(portion.sequence);
        if sequence.has_looked(portion.count, until) {
            return false;
        }
        let (is_prompt, virtual_tokens) = (!sequence.is_decoding(), sequence.pending_virtual());
        let kept = sequence.sit_out(portion.count, &mut self.kv);
        if is_prompt {
            self.stats.prompt_tokens += kept.saturating_sub(virtual_tokens) as u64;
        }
        failpoint::pass("executor.sits_out");
        true
    }

    /// Returns the maximum wait of a step for masks.
    fn look_budget(&self) -> Duration {
        self.grammars.as_ref().map_or(Duration::ZERO, GrammarWorkers::budget)
    }

    /// Waits for the oldest late mask if no sequence computes, so that the loop does not spin.
    pub(super) fn await_looks(&mut self) {
        let until = Instant::now() + self.look_budget();
        if !self.queues.running().is_empty() {
            let oldest = self.queues.running_mut(0);
            oldest.has_looked(oldest.pending(), until);
        }
    }

    /// Fails the sequences of a failed pass, whose blocks are undefined; other sequences continue.
    pub(super) fn fail_planned(&mut self, plan: &[ScheduledTokens], why: &str) {
        for portion in plan {
            let output = self.fault(*portion, why);
            self.outboxes.output(self.queues.running()[portion.sequence].caller, output);
        }
        self.retire_running(plan.iter().map(|portion| portion.sequence).collect());
    }

    fn advance(&mut self, portion: ScheduledTokens, place: OutputSlice) -> Result<Option<Output>, Panic> {
        let sequence = self.queues.running_mut(portion.sequence);
        if !sequence.is_decoding() {
            self.stats.prompt_tokens += portion.count.saturating_sub(sequence.pending_virtual()) as u64;
        }
        let (gave, kv) = (self.computing.gave(), &mut self.kv);
        let StepOutput { logits, vocab_size, drawn, states, hidden_size } = gave;
        let (drafts, stats, tiers) = (&mut self.drafts, &mut self.stats.speculation, &mut self.tiers);
        catch_unwind(AssertUnwindSafe(|| {
            if sequence.has_grown() {
                let OutputSlice::Rows(rows) = place else { unreachable!("a tree asks for all logits") };
                let rows = &mut logits[rows.start * vocab_size..rows.end * vocab_size];
                let Verified { output, tree, verdict } = sequence.verify(rows, vocab_size, kv);
                if sequence.is_replay() {
                    return Some(output);
                }
                drafts.record_verification(stats, sequence.drafter_state.as_ref(), (&tree, &verdict));
                if let Some(id) = sequence.adapter_id() {
                    tiers.host.note_verified(id, tree.len(), verdict.accepted.len());
                }
                return Some(output);
            }
            let given = match place {
                OutputSlice::Drawn(index) => SequenceOutput::Token(drawn[index]),
                OutputSlice::Rows(rows) => {
                    SequenceOutput::Rows(&mut logits[rows.start * vocab_size..rows.end * vocab_size])
                }
                OutputSlice::States(rows) => {
                    let states = &states[rows.start * hidden_size..rows.end * hidden_size];
                    SequenceOutput::States(states.chunks_exact(hidden_size))
                }
            };
            sequence.advance(portion.count, given, vocab_size, kv)
        }))
    }

    fn fault(&self, portion: ScheduledTokens, why: &str) -> Output {
        let request = self.queues.running()[portion.sequence].caller.request;
        let message = why.to_owned();
        tracing::error!(request, "a request ends with an internal error");
        failure(request, WireError { code: ErrorCode::Internal, message })
    }

    fn retire_running(&mut self, mut indices: Vec<usize>) {
        // Retired from the back, so that the indices before stay valid.
        indices.sort_unstable();
        for index in indices.into_iter().rev() {
            let sequence = self.queues.end(index);
            self.retire(sequence);
        }
    }
}
