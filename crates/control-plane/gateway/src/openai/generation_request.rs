//! A checked generation request, and its conversion to sequences.

use std::sync::Arc;

use shmproto::message::{DeviceKind, Generate, Pooling};
use text::detokenize::TextStart;

use super::{
    adapter_switches::{AdapterSwitch, SwitchPoint},
    namespace::Namespace,
    params::{EndTokens, Params},
    reasoning::Reasoning,
    structured::{GrammarSource, SchemaWarning},
    target::ModelTarget,
    tools::ToolCallReader,
};
use crate::{
    adapters::Lease, admission_queue::Principal, caller::RequestPriority, errors::ApiError,
    executors::executor_handle::ReadyExecutor, lifecycle::ServingState, service_classes::ServiceClasses,
    text::Text,
};

/// Maximum number of prompts per request.
pub(crate) const MAX_PROMPTS: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GenerationKind {
    /// Continues a conversation, in a new turn or in the last one.
    Chat(TextStart),
    Text,
    /// Continues a text with tokens, as Tinker's sampling does: the answer has the log-probability of each
    /// token, a stop string's too.
    Tokens,
    /// Computes a vector of a text, such as its embedding; no tokens are generated.
    Pooled(Pooling),
}

impl GenerationKind {
    fn pooling(&self) -> Option<Pooling> {
        if let Self::Pooled(pooling) = self { Some(pooling.clone()) } else { None }
    }
}

/// Whether the answer repeats the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Echo {
    /// The answer repeats the prompt, with its log-probabilities if any are requested.
    Prompt,
    Nothing,
}

#[derive(Debug, Clone)]
pub struct PromptInput {
    pub tokens: Vec<u32>,
    /// Prompt as the caller wrote it; `None` if the caller sent token ids.
    pub text: Option<String>,
}

#[derive(Debug)]
pub struct GenerationRequest {
    pub kind: GenerationKind,
    /// Name of the field that holds the prompt on this route, for errors.
    pub prompt_field: &'static str,
    pub serving: Arc<ServingState>,
    pub target: ModelTarget,
    pub tenant: Arc<str>,
    pub priority: RequestPriority,
    /// Prefix cache namespaces, derived from the tenant and the adapter version.
    pub namespace: Namespace,
    /// At least one prompt.
    pub prompts: Vec<PromptInput>,
    pub params: Params,
    /// Later stages of each choice, in order.
    pub switches: Arc<[AdapterSwitch]>,
    /// Alternatives to report for each token; `None` reports no log-probabilities.
    pub logprobs: Option<u32>,
    pub echo: Echo,
    /// Grammar that constrains each choice.
    pub grammar: Option<GrammarSource>,
    /// Reader of tool calls, if the request has tools.
    pub answering: Option<ToolCallReader>,
    /// Parser of reasoning content, if the model reasons.
    pub reasoning: Option<Reasoning>,
}

impl GenerationRequest {
    /// Checks prompt length and `min_tokens` against the context.
    pub fn check(self) -> Result<Self, ApiError> {
        let limit = self.serving.context_tokens;
        // A generation that reaches the end of the context finishes with `length`, so a prompt must leave
        // only one token free.
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
                    "'min_tokens' is {}, and the model's context has {} tokens left after the prompt; \
                     request fewer",
                    self.params.min_tokens,
                    limit - count
                );
                return Err(ApiError::invalid("min_tokens", message));
            }
        }
        self.check_switches()?;
        self.check_receipt()?;
        Ok(self)
    }

    /// Refuses a request for a receipt that cannot be given.
    fn check_receipt(&self) -> Result<(), ApiError> {
        if !self.params.with_receipt {
            return Ok(());
        }
        let refused = |message: &str| Err(ApiError::invalid("receipt", message));
        if self.choices() != 1 {
            return refused("'receipt' is for one answer; send one prompt and 'n': 1, or remove 'receipt'");
        }
        if !self.switches.is_empty() {
            return refused("'receipt' and 'adapter_switches' exclude each other; send one of them");
        }
        if self.params.max_tokens == Some(0) {
            return refused("'receipt' needs an answer; raise 'max_tokens', or remove 'receipt'");
        }
        if self.serving.welcome.device.kind != DeviceKind::Cpu {
            return refused("'receipt' is available only for a base on a CPU; remove it");
        }
        Ok(())
    }

    /// Returns the number of tokens of all prompts.
    #[must_use]
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }

    /// Refuses options that a switch of the adapter excludes, and switches that no answer can reach.
    fn check_switches(&self) -> Result<(), ApiError> {
        const FIELD: &str = "adapter_switches";
        let excluded = |what: &str| {
            ApiError::invalid(FIELD, format!("'{FIELD}' and {what} exclude each other; send one of them"))
        };
        if self.switches.is_empty() {
            return Ok(());
        }
        if self.echo == Echo::Prompt {
            return Err(excluded("'echo'"));
        }
        if let Some(grammar) = &self.grammar {
            return Err(excluded(&format!("'{}', whose grammar holds for the whole answer,", grammar.field)));
        }
        let most = self.params.max_tokens.unwrap_or(u32::MAX);
        let is_late = |switch: &AdapterSwitch| matches!(switch.at, SwitchPoint::Tokens(at) if at >= most);
        match self.switches.iter().position(is_late) {
            None => Ok(()),
            Some(index) => {
                let field = format!("{FIELD}[{index}].after_tokens");
                let message = format!(
                    "'{field}' must be less than the answer's maximum of {most} tokens; raise the \
                     maximum, or remove the switch"
                );
                Err(ApiError::invalid(&field, message))
            }
        }
    }

    /// Returns the most tokens that a stage's prompt may have, if the first prompt has `tokens` tokens.
    #[must_use]
    pub(crate) fn longest_prompt(&self, tokens: usize) -> usize {
        if self.switches.is_empty() {
            return tokens;
        }
        let appended = self.switches.iter().map(|switch| switch.appended.len()).sum::<usize>();
        let generated = self.params.max_tokens.map_or(usize::MAX, |most| most as usize);
        tokens.saturating_add(appended).saturating_add(generated).min(self.serving.context_tokens)
    }

    /// Returns the models of all stages, in order.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &ModelTarget> {
        std::iter::once(&self.target).chain(self.switches.iter().map(|switch| &switch.target))
    }

    /// Returns the model that generates stage `stage` of a choice.
    #[must_use]
    pub(crate) fn target_of(&self, stage: usize) -> &ModelTarget {
        stage.checked_sub(1).map_or(&self.target, |switch| &self.switches[switch].target)
    }

    /// Returns the tenant and the service class that the request is charged to.
    #[must_use]
    pub(crate) fn principal(&self, classes: &ServiceClasses) -> Principal {
        let adapter = self.target.lease.as_ref().map(Lease::name);
        let class = match self.priority {
            RequestPriority::Online => classes.of(adapter, &self.tenant),
            RequestPriority::Background => classes.background(),
        };
        Principal { class, tenant: Arc::clone(&self.tenant) }
    }

    #[must_use]
    pub fn choices(&self) -> usize {
        self.prompts.len() * self.params.choices as usize
    }

    /// Returns the prompt that choice `index` continues.
    #[must_use]
    pub(crate) fn prompt_of(&self, index: usize) -> &PromptInput {
        &self.prompts[index / self.params.choices as usize]
    }

    #[must_use]
    pub fn sequences(&self) -> Vec<Generate> {
        (0..self.choices()).map(|index| self.sequence(index)).collect()
    }

    fn sequence(&self, index: usize) -> Generate {
        let prompt = &self.prompt_of(index).tokens;
        let left = self.serving.context_tokens.saturating_sub(prompt.len());
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let mut sampling = self.params.sampling.clone();
        sampling.seed = choice_seed(sampling.seed, index as u64 % u64::from(self.params.choices));
        let mut stop_tokens = self.params.stop_tokens.clone();
        if self.params.end_tokens == EndTokens::Stop {
            // A tokenizer may know more tokens than the model's vocabulary has rows.
            let end_tokens = self.serving.text.info().end_tokens.iter();
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
            max_tokens: self.params.max_tokens.map_or(left, |most| most.min(left)),
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
            expected: self.params.expected.clone(),
        }
    }

    /// Returns the numeric settings that every executor of the request must have; `None` if any executor of
    /// the base may run the request. A receipt names one set of settings for the whole answer.
    #[must_use]
    pub(crate) fn required_numbers(&self) -> Option<RequiredNumbers> {
        let is_bound = self.params.with_receipt || !self.params.expected.is_empty();
        is_bound.then(|| RequiredNumbers(self.serving.welcome.numbers.as_str().into()))
    }

    /// Returns how the first token of an answer becomes text.
    #[must_use]
    pub(crate) fn text_start(&self) -> TextStart {
        match self.kind {
            GenerationKind::Chat(start) => start,
            GenerationKind::Text | GenerationKind::Tokens | GenerationKind::Pooled(_) => {
                TextStart::Continuation
            }
        }
    }

    /// Returns the special tokens that become text, because they mark tool calls or reasoning content.
    #[must_use]
    pub(crate) fn shown_words(&self) -> Vec<&'static str> {
        let words = self.answering.as_ref().map_or(&[][..], |answering| answering.format.words());
        let tags = self.reasoning.map(Reasoning::words);
        words.iter().copied().chain(tags.into_iter().flatten()).collect()
    }

    /// Returns the parts of a JSON schema that the grammar does not enforce.
    #[must_use]
    pub fn warnings(&self) -> &[SchemaWarning] {
        self.grammar.as_ref().map_or(&[], |form| &form.warnings)
    }

    /// Returns the number of alternatives to report for each token of an echoed prompt.
    #[must_use]
    pub(crate) fn echoed_logprobs(&self) -> Option<u32> {
        self.logprobs.filter(|_| self.echo == Echo::Prompt)
    }

    #[must_use]
    pub fn text(&self) -> &dyn Text {
        &*self.serving.text
    }
}

/// Numeric settings of a CPU that an executor must have to run a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequiredNumbers(Arc<str>);

impl RequiredNumbers {
    #[must_use]
    pub(crate) fn are_of(&self, executor: &ReadyExecutor) -> bool {
        let welcome = &executor.welcome;
        welcome.device.kind == DeviceKind::Cpu && *welcome.numbers == *self.0
    }
}

/// Derives a seed per choice: the first choice keeps the request's seed, the others get distant seeds.
fn choice_seed(seed: u64, choice: u64) -> u64 {
    seed ^ choice.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
