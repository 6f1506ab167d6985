//! Checks of a request before it may wait for the engine.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use model::{
    adapter::ClassificationHead,
    forward::BLOCK_TOKENS,
    linear_sites::SitePath,
    sampling::{SamplingError, SamplingParams},
};
use shmproto::message::{ErrorCode, Generate, Pooling, Precision, WireError};

use super::{
    EngineLimits,
    sequence::{GenerationSpec, PoolingSpec},
};
use crate::adapters::AdapterUseError;

/// Maximum number of alternatives reported per token.
pub(crate) const MAX_LOGPROBS: u32 = 20;

/// Maximum number of tokens whose logits a request asks for.
const MAX_TOKEN_LOGITS: usize = 256;

/// The reason why a request was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum AdmissionRefusal {
    #[error("the executor is shutting down; send the request again when it is back")]
    ShuttingDown,
    /// The connection already has an active request with this id.
    #[error("request {0} already runs on this connection; use a new number for each request")]
    DuplicateRequest(u64),
    #[error("the prompt has no tokens; send at least one")]
    EmptyPrompt,
    #[error("`{field}` has token {token}, but the vocabulary has {vocab_size}; use this model's tokenizer")]
    UnknownToken {
        /// Request field with the token.
        field: &'static str,
        token: u32,
        vocab_size: usize,
    },
    /// The request counts its whole prompt as generated before.
    #[error(
        "the request says that {generated} of {prompt} tokens were generated before, which leaves no prompt"
    )]
    NoPromptLeft {
        /// Number of tokens that the request counts as generated.
        generated: usize,
        /// Number of prompt tokens.
        prompt: usize,
    },
    #[error(
        "`{field}` requests {asked} alternatives per token, and the limit is {MAX_LOGPROBS}; request fewer"
    )]
    TooManyLogprobs { field: &'static str, asked: u32 },
    /// The device has no modular path.
    #[error("`precision` exact is not available on this device; remove it, or use an executor on a CPU")]
    NoExact,
    /// The executor has no vocabulary for grammars.
    #[error("`grammar` is not available, because this executor has no vocabulary; remove it")]
    NoGrammars,
    /// A request for a vector asks for something else too.
    #[error("`pooling` requests a vector of the prompt, which excludes `{field}`; send two requests")]
    NotAlone { field: &'static str },
    #[error(
        "`pooling` requests the logits of {0} tokens, and from 1 to {MAX_TOKEN_LOGITS} are supported; \
         request others"
    )]
    TokenLogits(usize),
    /// The request asks for labels that the model does not have.
    #[error(
        "`pooling` requests the logits of labels, but the model has no classification head; use an adapter \
         trained for classification (PEFT's task SEQ_CLS)"
    )]
    NoHead,
    /// The request asks for tokens, but the adapter was trained for labels only.
    #[error(
        "the adapter has a classification head and generates no tokens; use it to classify, score or rerank \
         texts, or use the base or another adapter"
    )]
    OnlyClassifies,
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error(
        "the prompt has {prompt} tokens{}, but prompt and completion may have {context_length} together; \
         shorten it",
        beside(*virtual_tokens)
    )]
    PromptTooLong {
        prompt: usize,
        /// Virtual tokens of the adapter, before the prompt.
        virtual_tokens: usize,
        context_length: usize,
    },
    /// The sequence would not fit even alone in the pool.
    #[error(
        "prompt and `max_tokens`{} need {needed} KV blocks, but the pool has {total}; shorten the prompt, lower \
         `max_tokens` or start the executor with a larger --kv-bytes",
        beside(*virtual_tokens)
    )]
    PoolTooSmall {
        /// Virtual tokens of the adapter, before the prompt.
        virtual_tokens: usize,
        /// Blocks that the sequence needs at its end.
        needed: usize,
        total: usize,
    },
    /// As many requests are active as may run and wait. Gateways count requests and normally avoid this.
    #[error("{under_way} requests run or wait, which is the limit; try again later or raise --max-waiting")]
    QueueFull {
        /// Number of running and waiting requests.
        under_way: usize,
    },
    /// The prompts of waiting requests take as much memory as allowed.
    #[error(
        "requests with {waiting_tokens} tokens wait, which leaves no room for this one; try again later or raise \
         --max-waiting-tokens"
    )]
    QueueLong {
        /// Number of tokens of waiting prompts.
        waiting_tokens: usize,
    },
    #[error(transparent)]
    Adapter(#[from] AdapterUseError),
}

impl AdmissionRefusal {
    #[must_use]
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::ShuttingDown => ErrorCode::ShuttingDown,
            Self::DuplicateRequest(_)
            | Self::EmptyPrompt
            | Self::UnknownToken { .. }
            | Self::NoPromptLeft { .. }
            | Self::TooManyLogprobs { .. }
            | Self::NoExact
            | Self::NoGrammars
            | Self::NotAlone { .. }
            | Self::TokenLogits(_)
            | Self::NoHead
            | Self::OnlyClassifies
            | Self::Sampling(_) => ErrorCode::InvalidRequest,
            Self::PromptTooLong { .. } | Self::PoolTooSmall { .. } => ErrorCode::ContextLengthExceeded,
            Self::QueueFull { .. } | Self::QueueLong { .. } => ErrorCode::QueueFull,
            Self::Adapter(error) => error.code(),
        }
    }
}

impl From<AdmissionRefusal> for WireError {
    fn from(refusal: AdmissionRefusal) -> Self {
        Self { code: refusal.code(), message: refusal.to_string() }
    }
}

/// Returns the message part about virtual tokens.
fn beside(virtual_tokens: usize) -> String {
    match virtual_tokens {
        0 => String::new(),
        count => format!(" beside the {count} virtual tokens of its adapter"),
    }
}

/// Properties of a request's adapter; those of the base are the default.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AdapterTraits<'a> {
    /// Number of virtual tokens before the prompt.
    pub(super) virtual_tokens: usize,
    /// Head of an adapter that classifies.
    pub(super) head: Option<&'a Arc<ClassificationHead>>,
}

/// Checks all that does not depend on other requests.
pub(super) fn check(
    request: &Generate,
    received_at: Instant,
    vocab_size: usize,
    limits: &EngineLimits,
    AdapterTraits { virtual_tokens, head }: AdapterTraits<'_>,
) -> Result<GenerationSpec, AdmissionRefusal> {
    if request.prompt.is_empty() {
        return Err(AdmissionRefusal::EmptyPrompt);
    }
    check_tokens("prompt", &request.prompt, vocab_size)?;
    check_tokens("stop_tokens", &request.stop_tokens, vocab_size)?;
    check_tokens("expected", &request.expected, vocab_size)?;
    let end = check_length(request, limits, virtual_tokens)?;
    Ok(GenerationSpec {
        sampling: SamplingParams::new(request.sampling.clone(), vocab_size)?,
        stop_tokens: request.stop_tokens.clone(),
        min_tokens: request.min_tokens as usize,
        generated_before: check_generated(request)?,
        virtual_tokens,
        end,
        logprobs: check_logprobs("logprobs", request.logprobs)?,
        prompt_logprobs: check_logprobs("prompt_logprobs", request.prompt_logprobs)?,
        pooling: check_pooling(request, head, vocab_size)?,
        expected: request.expected.clone(),
        deadline: deadline(request.deadline_ms, received_at),
        provisional: request.provisional,
        path: match request.precision {
            Precision::Serving => SitePath::Fast,
            Precision::Exact => SitePath::Linear,
        },
    })
}

fn check_generated(request: &Generate) -> Result<usize, AdmissionRefusal> {
    let (generated, prompt) = (request.generated as usize, request.prompt.len());
    if generated < prompt { Ok(generated) } else { Err(AdmissionRefusal::NoPromptLeft { generated, prompt }) }
}

fn check_tokens(field: &'static str, tokens: &[u32], vocab_size: usize) -> Result<(), AdmissionRefusal> {
    match tokens.iter().find(|&&token| token as usize >= vocab_size) {
        Some(&token) => Err(AdmissionRefusal::UnknownToken { field, token, vocab_size }),
        None => Ok(()),
    }
}

fn check_logprobs(field: &'static str, asked: Option<u32>) -> Result<Option<usize>, AdmissionRefusal> {
    match asked {
        Some(asked) if asked > MAX_LOGPROBS => Err(AdmissionRefusal::TooManyLogprobs { field, asked }),
        asked => Ok(asked.map(|asked| asked as usize)),
    }
}

fn check_pooling(
    request: &Generate,
    head: Option<&Arc<ClassificationHead>>,
    vocab_size: usize,
) -> Result<Option<PoolingSpec>, AdmissionRefusal> {
    check_alone(request)?;
    match (&request.pooling, head) {
        (Some(Pooling::Last), _) => Ok(Some(PoolingSpec::Last)),
        (Some(Pooling::Mean), _) => Ok(Some(PoolingSpec::Mean)),
        (Some(Pooling::ClassLogits), Some(head)) => Ok(Some(PoolingSpec::ClassLogits(Arc::clone(head)))),
        (Some(Pooling::ClassLogits), None) => Err(AdmissionRefusal::NoHead),
        (None | Some(Pooling::TokenLogits(_)), Some(_)) => Err(AdmissionRefusal::OnlyClassifies),
        (None, None) => Ok(None),
        (Some(Pooling::TokenLogits(tokens)), None) => {
            if tokens.is_empty() || tokens.len() > MAX_TOKEN_LOGITS {
                return Err(AdmissionRefusal::TokenLogits(tokens.len()));
            }
            check_tokens("pooling", tokens, vocab_size)?;
            Ok(Some(PoolingSpec::TokenLogits(tokens.clone())))
        }
    }
}

/// Checks that a request for a vector asks for nothing else.
fn check_alone(request: &Generate) -> Result<(), AdmissionRefusal> {
    let others = [
        ("max_tokens", request.max_tokens > 0),
        ("prompt_logprobs", request.prompt_logprobs.is_some()),
        ("grammar", request.grammar.is_some()),
        ("expected", !request.expected.is_empty()),
    ];
    match others.iter().find(|(_, is_asked)| *is_asked) {
        Some(&(field, _)) if request.pooling.is_some() => Err(AdmissionRefusal::NotAlone { field }),
        _ => Ok(()),
    }
}

/// Returns the maximum length of the sequence, virtual tokens included.
fn check_length(
    request: &Generate,
    limits: &EngineLimits,
    virtual_tokens: usize,
) -> Result<usize, AdmissionRefusal> {
    let (prompt, context_length) = (request.prompt.len(), limits.context_length);
    let begin = virtual_tokens + prompt;
    // A prompt that is only scored or embedded may fill the context.
    if begin + usize::from(request.max_tokens > 0) > context_length {
        return Err(AdmissionRefusal::PromptTooLong { prompt, virtual_tokens, context_length });
    }
    let end = begin.saturating_add(request.max_tokens as usize).min(context_length);
    // The last generated token is never computed, so it needs no KV memory.
    let needed = end.saturating_sub(1).max(begin).div_ceil(BLOCK_TOKENS);
    let total = limits.kv_blocks as usize;
    if needed > total {
        Err(AdmissionRefusal::PoolTooSmall { virtual_tokens, needed, total })
    } else {
        Ok(end)
    }
}

fn deadline(deadline_ms: u32, received_at: Instant) -> Option<Instant> {
    (deadline_ms > 0).then(|| received_at + Duration::from_millis(deadline_ms.into()))
}
