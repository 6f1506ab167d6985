//! Answers of the adapter in training: the gateway gets the adapter from memory, and samples from it.

use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use control_protocol::training::rollout::{RolloutPrompt, RolloutRequest};
use serde::Deserialize;
use serde_json::json;

use crate::client::{ClientError, GatewayClient, PushedFile};

/// Maximum number of prompts under way; the gateway joins their answers into batches.
const CALLERS: usize = 16;

/// Attempts while the gateway is busy or restarts, and the pause between two attempts.
const ATTEMPTS: usize = 120;
const PAUSE: Duration = Duration::from_millis(500);

/// A sampled answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampledAnswer {
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<f32>,
    pub(super) text: String,
}

/// Sampler of an adapter that the gateway keeps in memory.
#[derive(Debug)]
pub(super) struct Sampler {
    pub(super) client: GatewayClient,
    /// Name of the adapter on the gateway.
    pub(super) name: String,
}

impl Sampler {
    /// Returns the answers to each prompt of the request.
    pub(super) fn draw(&self, request: &RolloutRequest) -> Result<Vec<Vec<SampledAnswer>>, ClientError> {
        self.retried(|| self.push(&request.adapter))?;
        let next = AtomicUsize::new(0);
        let call = || {
            let mut own = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(prompt) = request.prompts.get(number) else { return Ok(own) };
                own.push((number, self.retried(|| self.answers(request, prompt))?));
            }
        };
        let all = thread::scope(|scope| {
            let count = CALLERS.min(request.prompts.len());
            let callers: Vec<_> = (0..count).map(|_| scope.spawn(call)).collect();
            let joined = callers.into_iter().map(|caller| caller.join().expect("no caller panics"));
            joined.collect::<Result<Vec<Vec<(usize, Vec<SampledAnswer>)>>, ClientError>>()
        })?;
        let mut all = all.concat();
        all.sort_unstable_by_key(|(number, _)| *number);
        Ok(all.into_iter().map(|(_, answers)| answers).collect())
    }

    /// Removes the adapter from the gateway.
    pub(super) fn forget(&self) {
        // The gateway may be gone, or may have dropped the adapter with a restart.
        let _ = self.client.post_text("/v1/unload_lora_adapter", &json!({ "lora_name": self.name }));
    }

    fn push(&self, adapter: &Path) -> Result<(), ClientError> {
        let file = PushedFile::of_directory(adapter).map_err(|error| ClientError::Lost(Some(error)))?;
        self.client.push(&self.name, &[("durable", "false")], file).map(drop)
    }

    fn answers(
        &self,
        request: &RolloutRequest,
        prompt: &RolloutPrompt,
    ) -> Result<Vec<SampledAnswer>, ClientError> {
        let body = json!({
            "model": self.name,
            "prompt": prompt.tokens,
            "n": request.num_generations,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": prompt.seed,
            "logprobs": 0,
            "return_token_ids": true,
        });
        let answer = self.client.post_text("/v1/completions", &body);
        if let Err(ClientError::Refused { status: 404, .. }) = answer {
            // A gateway that was restarted has lost the adapter.
            self.push(&request.adapter)?;
        }
        let completion: Completion = serde_json::from_str(&answer?).map_err(ClientError::Garbled)?;
        Ok(completion.choices.into_iter().map(CompletionChoice::into_answer).collect())
    }

    /// Repeats `ask` while the gateway is busy, is restarted, or has lost the adapter.
    fn retried<T>(&self, ask: impl Fn() -> Result<T, ClientError>) -> Result<T, ClientError> {
        for _ in 1..ATTEMPTS {
            match ask() {
                Err(
                    ClientError::Refused { status: 404 | 429 | 502..=504, .. }
                    | ClientError::Unreachable { .. }
                    | ClientError::Lost(_),
                ) => thread::sleep(PAUSE),
                other => return other,
            }
        }
        ask()
    }
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<CompletionChoice>,
}

#[derive(Deserialize)]
struct CompletionChoice {
    text: String,
    token_ids: Vec<u32>,
    logprobs: CompletionLogprobs,
}

#[derive(Deserialize)]
struct CompletionLogprobs {
    token_logprobs: Vec<f32>,
}

impl CompletionChoice {
    fn into_answer(self) -> SampledAnswer {
        SampledAnswer { tokens: self.token_ids, logprobs: self.logprobs.token_logprobs, text: self.text }
    }
}
