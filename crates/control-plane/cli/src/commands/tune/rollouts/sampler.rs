//! Answers of the adapter in training: the gateway gets the adapter from memory, and samples from it.

use std::{path::Path, time::Duration};

use control_protocol::training::rollout::{RolloutPrompt, RolloutRequest};
use serde::Deserialize;
use serde_json::json;

use super::super::calls::{Retries, concurrently};
use crate::client::{ClientError, GatewayClient, PushedFile};

/// Maximum number of prompts under way; the gateway joins their answers into batches.
const CALLERS: usize = 16;

/// Repeats of a request while the gateway is busy or restarts.
const RETRIES: Retries = Retries { attempts: 120, pause: Duration::from_millis(500) };

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
        concurrently(&request.prompts, CALLERS, |prompt| self.retried(|| self.answers(request, prompt)))
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

    /// Repeats `call` while the gateway is busy, is restarted, or has lost the adapter.
    fn retried<T>(&self, call: impl Fn() -> Result<T, ClientError>) -> Result<T, ClientError> {
        let may_pass = |error: &ClientError| {
            matches!(
                error,
                ClientError::Refused { status: 404 | 429 | 502..=504, .. }
                    | ClientError::Unreachable { .. }
                    | ClientError::Lost(_)
            )
        };
        RETRIES.call(may_pass, call)
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
