//! A checked request, and how it becomes sequences.

use std::sync::Arc;

use shmproto::message::{Generate, Pooling};
use text::detokenize::TextStart;
use types::TenantId;

use super::{
    params::{EndTokens, Params},
    reasoning::Reasoning,
    structured::{GrammarSource, SchemaWarning},
    target::ModelTarget,
    tools::ToolCallReader,
};
use crate::{
    adapters::Lease, admission_queue::Principal, caller::Caller, errors::ApiError, lifecycle::ServingState,
    service_classes::ServiceClasses, text::Text,
};

/// Most prompts of a request.
pub const MAX_PROMPTS: usize = 64;

/// What is continued, and what the answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenerationKind {
    /// A conversation, in a turn of its own or in more of the last one.
    Chat(TextStart),
    /// A text, in more text.
    Text,
    /// A text, in tokens, as Tinker's samples: each is told with its log-probability, and those of a stop string too.
    Tokens,
    /// A text, which is not continued: the answer is its embedding.
    Embedding(Pooling),
}

impl GenerationKind {
    fn pooling(self) -> Option<Pooling> {
        if let Self::Embedding(pooling) = self { Some(pooling) } else { None }
    }
}

/// Whether the answer repeats the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Echo {
    /// It does, with the prompt's log-probabilities if any are asked for.
    Prompt,
    /// It does not.
    Nothing,
}

/// What to continue.
#[derive(Debug, Clone)]
pub struct PromptInput {
    /// As token ids.
    pub tokens: Vec<u32>,
    /// As the caller wrote it, if they wrote text.
    pub text: Option<String>,
}

/// Everything known about a request before it starts.
#[derive(Debug)]
pub struct GenerationRequest {
    /// What is continued.
    pub kind: GenerationKind,
    /// What the route calls what is to be continued.
    pub prompt_field: &'static str,
    /// What is served.
    pub serving: Arc<ServingState>,
    /// The model.
    pub target: ModelTarget,
    /// Who asks.
    pub tenant: Arc<str>,
    /// H(tenant, generation).
    pub namespace: Namespace,
    /// At least one.
    pub prompts: Vec<PromptInput>,
    /// The shared options.
    pub params: Params,
    /// Alternatives to report for each token; `None` is no log-probabilities.
    pub logprobs: Option<u32>,
    /// Whether to repeat the prompt.
    pub echo: Echo,
    /// What each choice has to look like.
    pub grammar: Option<GrammarSource>,
    /// How calls of tools are told from text, if there may be any.
    pub answering: Option<ToolCallReader>,
    /// How thoughts are told from text, if there may be any.
    pub reasoning: Option<Reasoning>,
}

/// Under what an executor keeps prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespace {
    /// Who may share them.
    pub hash: [u8; 32],
    /// Who may share those of the base, which an adapter that is not invoked yet does not change.
    pub base: [u8; 32],
    /// Whose share of the executor's memory they take.
    pub owner: TenantId,
}

/// What may share cached prefixes: the same tenant asking the same weights.
#[must_use]
pub fn namespace(caller: &Caller, target: &ModelTarget, serving: &ServingState) -> Namespace {
    let hash = |kind: &[u8], weights: &[u8; 32]| {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 prefix cache namespace v1");
        let tenant = caller.tenant.as_bytes();
        hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant).update(kind).update(weights);
        *hasher.finalize().as_bytes()
    };
    let base = hash(b"base", &serving.welcome.base_hash);
    let own = target.lease.as_ref().map_or(base, |lease| hash(b"adapter", &lease.generation.0));
    Namespace { hash: own, base, owner: TenantId::of(Some(&caller.tenant)) }
}

impl GenerationRequest {
    /// Checks what can only be checked with all of it in hand.
    pub fn check(self) -> Result<Self, ApiError> {
        let limit = self.serving.context_tokens;
        // An answer that is cut at the end of the context is told as `length`; a prompt only has to leave room for one token.
        let wanted = self.params.max_tokens.unwrap_or(1).min(1) as usize;
        for prompt in &self.prompts {
            if prompt.tokens.is_empty() {
                return Err(ApiError::invalid(
                    self.prompt_field,
                    "the prompt has no tokens; send at least one",
                ));
            }
            let count = prompt.tokens.len();
            if count.saturating_add(wanted) > limit {
                return Err(ApiError::context_length(count, limit).of(self.prompt_field));
            }
            if self.params.min_tokens as usize > limit - count {
                let message = format!(
                    "'min_tokens' is {}, and this model's context has room for {} tokens behind the prompt; ask for fewer",
                    self.params.min_tokens,
                    limit - count
                );
                return Err(ApiError::invalid("min_tokens", message));
            }
        }
        Ok(self)
    }

    /// To whom it counts.
    #[must_use]
    pub fn principal(&self, classes: &ServiceClasses) -> Principal {
        let adapter = self.target.lease.as_ref().map(Lease::name);
        Principal { class: classes.of(adapter, &self.tenant), tenant: Arc::clone(&self.tenant) }
    }

    /// Choices in all.
    #[must_use]
    pub fn choices(&self) -> usize {
        self.prompts.len() * self.params.choices as usize
    }

    /// The prompt that choice `index` continues.
    #[must_use]
    pub fn prompt_of(&self, index: usize) -> &PromptInput {
        &self.prompts[index / self.params.choices as usize]
    }

    /// One sequence for each choice.
    #[must_use]
    pub fn sequences(&self) -> Vec<Generate> {
        (0..self.choices()).map(|index| self.sequence(index)).collect()
    }

    fn sequence(&self, index: usize) -> Generate {
        let prompt = &self.prompt_of(index).tokens;
        let room = self.serving.context_tokens.saturating_sub(prompt.len());
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let mut sampling = self.params.sampling.clone();
        sampling.seed = choice_seed(sampling.seed, index as u64 % u64::from(self.params.choices));
        let mut stop_tokens = self.params.stop_tokens.clone();
        if self.params.end_tokens == EndTokens::Stop {
            // A tokenizer may know more tokens than the model has rows for.
            let end_tokens = self.serving.text.facts().end_tokens.iter();
            stop_tokens.extend(end_tokens.filter(|token| **token < self.serving.welcome.vocab_size));
        }
        Generate {
            request: 0,
            adapter: self.target.lease.as_ref().map(|lease| lease.id.0),
            namespace: self.namespace.hash,
            base_namespace: self.namespace.base,
            owner: self.namespace.owner.0,
            prompt: prompt.clone(),
            generated: 0,
            max_tokens: self.params.max_tokens.map_or(room, |most| most.min(room)),
            min_tokens: self.params.min_tokens,
            stop_tokens,
            sampling,
            logprobs: self.logprobs,
            prompt_logprobs: self.params.prompt_logprobs.max(self.echoed_logprobs()),
            deadline_ms: self.params.deadline_ms,
            provisional: self.params.delivery.provisional(),
            precision: self.params.precision,
            grammar: self.grammar.as_ref().map(|grammar| grammar.source.to_string()),
            pooling: self.kind.pooling(),
        }
    }

    /// What of its form the answer need not keep to.
    #[must_use]
    pub fn warnings(&self) -> &[SchemaWarning] {
        self.grammar.as_ref().map_or(&[], |form| &form.warnings)
    }

    /// Alternatives to report for each token of a prompt that is repeated.
    #[must_use]
    pub fn echoed_logprobs(&self) -> Option<u32> {
        self.logprobs.filter(|_| self.echo == Echo::Prompt)
    }

    /// The tokenizer.
    #[must_use]
    pub fn text(&self) -> &dyn Text {
        &*self.serving.text
    }
}

/// The first choice has the request's own seed; the others are far from it and from each other.
fn choice_seed(seed: u64, choice: u64) -> u64 {
    seed ^ choice.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
