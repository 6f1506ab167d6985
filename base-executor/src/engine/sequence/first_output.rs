//! Outputs of a sequence, of which the first carries what was noted before.

use std::time::Instant;

use shmproto::message::{Finish, Output, RequestId, TokenOutput, WireError};

use super::{Sequence, microseconds};

/// What the first output carries besides tokens.
#[derive(Debug)]
pub(super) enum FirstOutput {
    /// Not sent yet: log-probabilities of the prompt so far, and what the first admission noted.
    Due {
        prompt: Vec<TokenOutput>,
        admission: Admission,
    },
    Sent,
}

/// What is noted when a sequence is admitted for the first time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Admission {
    /// Prompt tokens found in the cache.
    cached_tokens: u32,
    /// Microseconds since the request was received.
    queued_us: u64,
    /// Of them, microseconds it waited for its adapter.
    load_wait_us: u64,
    /// And for keys and values to come back.
    kv_wait_us: u64,
}

impl<A> Sequence<A> {
    /// Notes when the first admission was and what it found in the cache; later ones would count its own blocks.
    /// Returns false if this was a later one.
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

/// The output of a request that ends in `error`.
pub(crate) fn failure(request: RequestId, error: WireError) -> Output {
    Output { error: Some(error), request, ..Output::default() }
}
