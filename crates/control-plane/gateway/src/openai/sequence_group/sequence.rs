//! One sequence of a request: its current stage, and the parts of the request that remain.

use std::{sync::Arc, time::Duration};

use shmproto::message::{ErrorCode, Generate, WireError};

use super::{Booked, late};
use crate::{adapters::ExecutorPin, errors::ApiError, openai::adapter_switches::AdapterSwitch};

#[derive(Debug)]
pub(super) struct ActiveSequence {
    /// Index of the stage, which is the number of switches so far.
    pub(super) stage: usize,
    /// Number of tokens that earlier stages generated.
    pub(super) done: u32,
    /// The rest of the request when the stage began, as if no switch followed.
    pub(super) generate: Generate,
    /// Tokens that the stage generated.
    pub(super) emitted: Vec<u32>,
    /// True once the stage's first output is received: the prompt's scores and the count of cached tokens.
    pub(super) begun: bool,
    /// True if provisional tokens were reported that are not verified yet.
    pub(super) foretold: bool,
    pub(super) redos: u32,
    /// The executor that runs the sequence, and the epoch of its connection.
    pub(super) index: usize,
    pub(super) epoch: u64,
    /// Keeps the adapter on the executor.
    pub(super) place: Option<Arc<ExecutorPin>>,
    /// Counts the sequence in its executor's load while the sequence runs.
    pub(super) booked: Option<Booked>,
}

impl ActiveSequence {
    /// Number of tokens that all stages generated.
    pub(super) fn generated(&self) -> u32 {
        self.done.saturating_add(count(&self.emitted))
    }

    /// Returns the rest of the stage as it is sent `elapsed` after the start of the request.
    pub(super) fn again(&self, switches: &[AdapterSwitch], elapsed: Duration) -> Result<Generate, ApiError> {
        let mut again = self.rest();
        again.generated = count(&self.emitted);
        if self.begun {
            again.prompt_logprobs = None;
        }
        again.deadline_ms = left_ms(again.deadline_ms, elapsed)?;
        if let Some(next) = switches.get(self.stage) {
            next.bound(&mut again, self.generated());
        }
        Ok(again)
    }

    /// Enters the stage after the next switch of `switches`, and after further switches that are due at once.
    /// Returns false without a change if the answer has no token left for that stage.
    pub(super) fn enter_next_stage(&mut self, switches: &[AdapterSwitch], context_tokens: usize) -> bool {
        let (mut next, done) = (self.rest(), self.generated());
        let mut stage = self.stage;
        while let Some(switch) = switches.get(stage) {
            if stage > self.stage && !switch.is_due(done) {
                break;
            }
            next.prompt.extend_from_slice(&switch.appended);
            next.namespace = switch.namespace;
            next.adapter = switch.target.lease.as_ref().map(|lease| lease.id.0);
            stage += 1;
        }
        let left = context_tokens.saturating_sub(next.prompt.len());
        next.max_tokens = next.max_tokens.min(u32::try_from(left).unwrap_or(u32::MAX));
        if next.max_tokens == 0 {
            return false;
        }
        next.prompt_logprobs = None;
        (self.stage, self.done, self.generate, self.begun) = (stage, done, next, false);
        self.emitted.clear();
        true
    }

    /// Whether `error` says that a later stage does not fit: only the executor knows the virtual tokens of
    /// its adapter. The answer then ends at its maximum length.
    pub(super) fn is_unfit(&self, error: &WireError) -> bool {
        error.code == ErrorCode::ContextLengthExceeded && self.stage > 0 && !self.begun
    }

    /// Returns what remains of the request after the emitted tokens.
    fn rest(&self) -> Generate {
        let mut rest = self.generate.clone();
        let done = count(&self.emitted);
        rest.prompt.extend_from_slice(&self.emitted);
        rest.max_tokens = rest.max_tokens.saturating_sub(done);
        rest.min_tokens = rest.min_tokens.saturating_sub(done);
        rest.expected.drain(..self.emitted.len().min(rest.expected.len()));
        rest
    }
}

fn count(tokens: &[u32]) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

/// Returns the remaining milliseconds of a deadline; 0 means no deadline.
pub(super) fn left_ms(deadline_ms: u32, elapsed: Duration) -> Result<u32, ApiError> {
    if deadline_ms == 0 {
        return Ok(0);
    }
    let elapsed_ms = u32::try_from(elapsed.as_millis()).unwrap_or(u32::MAX);
    deadline_ms.checked_sub(elapsed_ms).filter(|left| *left > 0).ok_or_else(late)
}
