//! Collects the tokens of a Tinker sample, counts their memory, and builds the answer.

use std::sync::Arc;

use control_protocol::training::session::CommandRefusal;
use shmproto::message::TokenOutput;

use crate::{
    app::App,
    errors::ApiError,
    openai::{generation_request::GenerationRequest, generation_response::GenerationResponse},
    training_sessions::{
        future_result::FutureResult,
        request_futures::RequestFuture,
        wire::{NO_LOGPROB, SampleResponse, SampledSequence, StopReason, TopkLogprobs},
    },
    usage::FinishReason,
};

/// Step in bytes in which the memory of collected tokens is reserved.
const HELD_STEP_BYTES: usize = 64 << 10;

/// Optional parts of a sample's answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct SampleOptions {
    /// Whether to return log-probabilities of the prompt's tokens.
    pub(super) prompt_logprobs: bool,
    /// Number of most likely tokens per prompt position.
    pub(super) topk_prompt: u32,
    /// Number of most likely tokens per sampled position.
    pub(super) topk_sample: u32,
}

/// Samples and completes the future; `prompt_bytes` are already reserved in the future's memory.
pub(super) async fn keep(
    app: Arc<App>,
    job: Result<(GenerationRequest, SampleOptions), CommandRefusal>,
    prompt_bytes: usize,
    promise: Arc<RequestFuture>,
) {
    let _answered = FutureGuard(Arc::clone(&promise));
    let mut held = SampleMemory { promise: &promise, bytes: prompt_bytes, counted: prompt_bytes };
    let sampled = match job {
        Ok((job, wanted)) => collect(&app, job, wanted, &mut held).await,
        Err(failure) => Err(failure),
    };
    promise.keep(sampled.into());
}

/// Completes the future if the sampling task panics, because an open future keeps its memory reserved.
struct FutureGuard(Arc<RequestFuture>);

impl Drop for FutureGuard {
    fn drop(&mut self) {
        let message = "sampling failed in this server; send the request again";
        self.0.keep(FutureResult::Failed(CommandRefusal::server(message)));
    }
}

#[derive(Default)]
struct SampledTokens {
    tokens: Vec<TokenOutput>,
    finish: Option<FinishReason>,
}

/// Memory of collected tokens, reserved from the tenant as it grows.
struct SampleMemory<'a> {
    promise: &'a RequestFuture,
    /// Memory in use, in bytes.
    bytes: usize,
    /// Memory reserved from the tenant, in bytes.
    counted: usize,
}

impl SampleMemory<'_> {
    /// Counts tokens with their alternatives.
    fn add(&mut self, tokens: &[TokenOutput]) -> Result<(), CommandRefusal> {
        let alternatives = tokens.iter().map(|token| size_of_val(&*token.top)).sum::<usize>();
        self.bytes += size_of_val(tokens) + alternatives;
        if self.bytes > self.counted {
            self.counted = self.bytes + HELD_STEP_BYTES;
            self.promise.resize_reservation(self.counted).map_err(ApiError::from)?;
        }
        Ok(())
    }
}

async fn collect(
    app: &App,
    job: GenerationRequest,
    wanted: SampleOptions,
    held: &mut SampleMemory<'_>,
) -> Result<FutureResult, CommandRefusal> {
    if let Some(lease) = &job.target.lease {
        app.adapter_limits.check(&lease.id.0, &job.target.name).map_err(ApiError::from)?;
    }
    let mut wholes: Vec<SampledTokens> = (0..job.choices()).map(|_| SampledTokens::default()).collect();
    let mut prompt = Vec::new();
    let mut answer = GenerationResponse::start(app, job).await?;
    while !answer.is_over() {
        let step = answer.next().await.ok_or_else(|| CommandRefusal::server("nothing was generated"))??;
        let whole = &mut wholes[step.index];
        let first = whole.tokens.len();
        whole.tokens.extend(step.piece.scored.into_iter().map(|scored| scored.token));
        held.add(&whole.tokens[first..])?;
        whole.finish = whole.finish.or(step.piece.finish);
        if prompt.is_empty() {
            held.add(&step.prompt)?;
            prompt = step.prompt;
        }
    }
    let cached = answer.usage().prompt_tokens_details.cached_tokens;
    let response = SampleResponse {
        sequences: wholes.iter().map(|whole| sequence(whole, wanted.topk_sample)).collect(),
        prompt_logprobs: wanted.prompt_logprobs.then(|| {
            let first = std::iter::once(f32::NAN);
            floats(first.chain(prompt.iter().map(|token| token.logprob)))
        }),
        topk_prompt_logprobs: (wanted.topk_prompt > 0).then(|| {
            let none = TokenOutput { token: 0, logprob: 0.0, top: Vec::new() };
            top(std::iter::once(&none).chain(&prompt), wanted.topk_prompt)
        }),
        prompt_cache_hit_tokens: i32::try_from(cached).unwrap_or(i32::MAX),
    };
    Ok(FutureResult::Protobuf(prost::Message::encode_to_vec(&response).into()))
}

fn sequence(whole: &SampledTokens, k: u32) -> SampledSequence {
    let reason = if whole.finish == Some(FinishReason::Stop) { StopReason::Stop } else { StopReason::Length };
    SampledSequence {
        stop_reason: reason.into(),
        tokens: whole.tokens.iter().flat_map(|token| token.token.to_le_bytes()).collect(),
        logprobs: Some(floats(whole.tokens.iter().map(|token| token.logprob))),
        topk_sampled_logprobs: (k > 0).then(|| top(whole.tokens.iter(), k)),
    }
}

fn floats(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

/// Returns the `k` most likely tokens per position, padded with [`NO_LOGPROB`].
fn top<'a>(places: impl Iterator<Item = &'a TokenOutput>, k: u32) -> TopkLogprobs {
    let mut top = TopkLogprobs { token_ids: Vec::new(), logprobs: Vec::new(), k, length: 0 };
    for place in places {
        top.length += 1;
        for rank in 0..k as usize {
            let (token, logprob) = place.top.get(rank).copied().unwrap_or((0, NO_LOGPROB));
            top.token_ids.extend(token.to_le_bytes());
            top.logprobs.extend(logprob.to_le_bytes());
        }
    }
    top
}
