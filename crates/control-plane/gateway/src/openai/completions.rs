//! `POST /v1/completions`.

use std::sync::Arc;

use serde_json::Value;
use text::tokenizer::AddSpecial;

use super::{
    adapter_switches,
    generation_request::{Echo, GenerationKind, GenerationRequest, MAX_PROMPTS, PromptInput},
    namespace::namespace,
    params::{self, MAX_LOGPROBS, ParamLimits, Params},
    request_context::RequestContext,
    strict_fields::{StrictFields, token_id, wrong},
    target::ModelRef,
};
use crate::{app::App, caller::Caller, errors::ApiError, lifecycle::ServingState};

/// Default of OpenAI for this route.
const DEFAULT_MAX_TOKENS: u32 = 16;

#[derive(Debug, Clone, Copy)]
pub struct PromptField {
    /// Name of the body's field.
    pub field: &'static str,
    /// Maximum number of prompts.
    pub most: usize,
}

/// Body of a completion, checked without looking up the model.
#[derive(Debug)]
pub struct CompletionBody {
    pub(crate) wanted: ModelRef,
    pub(crate) params: Params,
    pub(crate) logprobs: Option<u32>,
    pub(crate) echo: Echo,
    pub(crate) add: AddSpecial,
    pub(crate) prompt: Option<Value>,
}

impl CompletionBody {
    pub fn read(body: &[u8], limits: &ParamLimits<'_>) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let wanted = ModelRef::read(&mut fields)?;
        let mut params = params::read(&mut fields, limits)?;
        params.max_tokens = params.max_tokens.or(Some(DEFAULT_MAX_TOKENS.max(params.min_tokens)));
        let logprobs = fields.count("logprobs", 0..=MAX_LOGPROBS)?;
        let echo = if fields.flag("echo", false)? { Echo::Prompt } else { Echo::Nothing };
        let (add, prompt) = (add_special(&mut fields)?, fields.take("prompt"));
        fields.finish()?;
        if params.max_tokens == Some(0) && echo == Echo::Nothing && params.prompt_logprobs.is_none() {
            let message = "'max_tokens' may be 0 only together with 'echo': true or 'prompt_logprobs'";
            return Err(ApiError::invalid("max_tokens", message));
        }
        Ok(Self { wanted, params, logprobs, echo, add, prompt })
    }

    pub(crate) fn job(
        self,
        app: &App,
        caller: &Caller,
        serving: Arc<ServingState>,
    ) -> Result<GenerationRequest, ApiError> {
        let Self { wanted, params, logprobs, echo, add, prompt } = self;
        let target = wanted.find(app, &serving, caller)?;
        let switches = adapter_switches::resolve(&params.switches, app, &serving, caller)?;
        let prompts = prompts(&serving, PromptField { field: "prompt", most: MAX_PROMPTS }, prompt, add)?;
        let namespace = namespace(caller, &target, &serving);
        let grammar = params.structure.as_ref().map(|structure| structure.source(None)).transpose()?;
        let job = GenerationRequest {
            kind: GenerationKind::Text,
            prompt_field: "prompt",
            serving,
            target,
            tenant: Arc::clone(&caller.tenant),
            priority: caller.priority,
            namespace,
            prompts,
            params,
            switches,
            logprobs,
            echo,
            grammar,
            answering: None,
            reasoning: None,
        };
        job.check()
    }
}

pub(crate) fn job(app: &App, ask: RequestContext) -> Result<GenerationRequest, ApiError> {
    let RequestContext { caller, serving, default_seed, body } = ask;
    CompletionBody::read(&body, &ParamLimits::of(&serving, default_seed))?.job(app, &caller, serving)
}

/// Reads `add_special_tokens`, true by default.
pub(crate) fn add_special(fields: &mut StrictFields) -> Result<AddSpecial, ApiError> {
    Ok(if fields.flag("add_special_tokens", true)? { AddSpecial::Yes } else { AddSpecial::No })
}

/// Reads a string, an array of strings, an array of token ids, or an array of such arrays.
pub(crate) fn prompts(
    serving: &ServingState,
    place: PromptField,
    value: Option<Value>,
    add: AddSpecial,
) -> Result<Vec<PromptInput>, ApiError> {
    let PromptField { field, most } = place;
    let prompt = |value| prompt(serving, field, value, add);
    match value {
        None => {
            let message = format!("'{field}' is required: a string, token ids, or an array of either");
            Err(ApiError::missing(field, message))
        }
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => {
            Ok(vec![token_prompt(serving, field, &items)?])
        }
        Some(Value::Array(items)) if items.is_empty() => {
            Err(ApiError::missing(field, format!("'{field}' is empty")))
        }
        Some(Value::Array(items)) if items.len() > most => {
            let message = format!("'{field}' may hold at most {most} prompts, not {}", items.len());
            Err(ApiError::invalid(field, message))
        }
        Some(Value::Array(items)) => items.into_iter().map(prompt).collect(),
        Some(single) => Ok(vec![prompt(single)?]),
    }
}

fn prompt(
    serving: &ServingState,
    field: &'static str,
    value: Value,
    add: AddSpecial,
) -> Result<PromptInput, ApiError> {
    match value {
        Value::String(text) => Ok(PromptInput { tokens: serving.text.encode(&text, add)?, text: Some(text) }),
        Value::Array(items) => token_prompt(serving, field, &items),
        other => Err(wrong(field, "a string, token ids, or an array of either", &other)),
    }
}

fn token_prompt(
    serving: &ServingState,
    field: &'static str,
    items: &[Value],
) -> Result<PromptInput, ApiError> {
    let limit = serving.context_tokens;
    if items.len() > limit {
        return Err(ApiError::context_length(items.len(), limit).of(field));
    }
    let vocab_size = serving.welcome.vocab_size;
    let tokens = items.iter().map(|item| token_id(field, item, vocab_size)).collect::<Result<_, _>>()?;
    Ok(PromptInput { tokens, text: None })
}
