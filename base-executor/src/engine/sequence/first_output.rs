//! Outputs of a sequence, the first of which carries the admission data.

use std::time::Instant;

use shmproto::message::{Finish, Output, RequestId, TokenOutput, WireError};

use super::{Sequence, microseconds};

/// Additional content of the first output.
#[derive(Debug)]
pub(super) enum FirstOutput {
    /// Not sent yet: prompt log-probabilities so far, and data of the first admission.
    Due {
        prompt: Vec<TokenOutput>,
        admission: Admission,
    },
    Sent,
}

/// Data of a sequence's first admission.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Admission {
    /// Number of prompt tokens found in the prefix cache.
    cached_tokens: u32,
    /// Time since the request was received, in microseconds.
    queued_us: u64,
    /// Part of `queued_us` spent waiting for the adapter.
    load_wait_us: u64,
    /// Part of `queued_us` spent waiting for KV blocks.
    kv_wait_us: u64,
}

impl<A> Sequence<A> {
    /// Records the first admission and the `found` cached tokens. Returns false for later admissions, which
    /// would count the sequence's own blocks.
    pub(in crate::engine) fn note_admission(&mut self, found: usize, now: Instant) -> bool {
        let first = !std::mem::replace(&mut self.is_admitted, true);
        if first {
            let cached_tokens = u32::try_from(found).unwrap_or(u32::MAX);
            let queued = now.saturating_duration_since(self.received_at);
            let queued_us = microseconds(queued);
            let admission = Admission {
                cached_tokens,
                queued_us,
                load_wait_us: self.load_wait_us,
                kv_wait_us: self.kv_wait_us,
            };
            self.opening = FirstOutput::Due { prompt: Vec::new(), admission };
        }
        first
    }

    pub(super) fn output(&mut self, tokens: Vec<TokenOutput>, finish: Option<Finish>) -> Output {
        let (prompt, admission) = match std::mem::replace(&mut self.opening, FirstOutput::Sent) {
            FirstOutput::Due { prompt, admission } => (prompt, admission),
            FirstOutput::Sent => (Vec::new(), Admission::default()),
        };
        let Admission { cached_tokens, queued_us, load_wait_us, kv_wait_us } = admission;
        let request = self.caller.request;
        Output {
            request,
            tokens,
            prompt,
            cached_tokens,
            queued_us,
            load_wait_us,
            kv_wait_us,
            finish,
            ..Output::default()
        }
    }
}

pub(crate) fn failure(request: RequestId, error: WireError) -> Output {
    Output { error: Some(error), request, ..Output::default() }
}
