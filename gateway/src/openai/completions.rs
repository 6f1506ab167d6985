//! `POST /v1/completions`.

use std::sync::Arc;

use serde_json::Value;
use text::tokenizer::AddSpecial;

use super::{
    ask::Ask,
    fields::{Fields, wrong},
    job::{Echo, Job, Kind, MAX_PROMPTS, Prompt, namespace},
    params::{self, Limits, MAX_LOGPROBS, Params, token_id},
    target::Wanted,
};
use crate::{app::App, caller::Caller, errors::ApiError, lifecycle::Serving};

/// OpenAI's default for this route.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A body, checked as far as it can be without looking anything up.
#[derive(Debug)]
pub struct Body {
    pub(crate) wanted: Wanted,
    pub(crate) params: Params,
    pub(crate) logprobs: Option<u32>,
    pub(crate) echo: Echo,
    pub(crate) add: AddSpecial,
    pub(crate) prompt: Option<Value>,
}

impl Body {
    /// Reads `body`.
    pub fn read(body: &[u8], limits: &Limits<'_>) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let wanted = Wanted::read(&mut fields)?;
        let mut params = params::read(&mut fields, limits)?;
        params.max_tokens = params.max_tokens.or(Some(DEFAULT_MAX_TOKENS.max(params.min_tokens)));
        let logprobs = fields.count("logprobs", 0..=MAX_LOGPROBS)?;
        let echo = if fields.flag("echo", false)? { Echo::Prompt } else { Echo::Nothing };
        let (add, prompt) = (add_special(&mut fields)?, fields.take("prompt"));
        fields.finish()?;
        if params.max_tokens == Some(0) && echo == Echo::Nothing {
            let message = "'max_tokens' may be 0 only together with 'echo': true";
            return Err(ApiError::invalid("max_tokens", message));
        }
        Ok(Self { wanted, params, logprobs, echo, add, prompt })
    }

    /// Turns it into a job of `caller`.
    pub(crate) fn job(self, app: &App, caller: &Caller, serving: Arc<Serving>) -> Result<Job, ApiError> {
        let Self { wanted, params, logprobs, echo, add, prompt } = self;
        let target = wanted.find(app, &serving, caller)?;
        let prompts = prompts(&serving, prompt, add)?;
        let namespace = namespace(caller, &target, &serving);
        let grammar =
            params.structure.as_ref().map(|structure| structure.source(&*serving.text)).transpose()?;
        let job = Job {
            kind: Kind::Text,
            prompt_field: "prompt",
            serving,
            target,
            tenant: Arc::clone(&caller.tenant),
            namespace,
            prompts,
            params,
            logprobs,
            echo,
            grammar,
            answering: None,
        };
        job.check()
    }
}

/// Turns a request into a job.
pub fn job(app: &App, ask: Ask) -> Result<Job, ApiError> {
    let Ask { caller, serving, default_seed, body } = ask;
    Body::read(&body, &Limits::of(&serving, default_seed))?.job(app, &caller, serving)
}

/// Reads `add_special_tokens`, true by default.
pub fn add_special(fields: &mut Fields) -> Result<AddSpecial, ApiError> {
    Ok(if fields.flag("add_special_tokens", true)? { AddSpecial::Yes } else { AddSpecial::No })
}

/// A string, an array of strings, an array of token ids, or an array of those.
fn prompts(serving: &Serving, value: Option<Value>, add: AddSpecial) -> Result<Vec<Prompt>, ApiError> {
    match value {
        None => Err(ApiError::missing(
            "prompt",
            "'prompt' is required: a string, token ids, or an array of either",
        )),
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => {
            Ok(vec![token_prompt(serving, &items)?])
        }
        Some(Value::Array(items)) if items.is_empty() => {
            Err(ApiError::missing("prompt", "'prompt' is empty"))
        }
        Some(Value::Array(items)) if items.len() > MAX_PROMPTS => Err(ApiError::invalid(
            "prompt",
            format!("'prompt' may hold at most {MAX_PROMPTS} prompts, not {}", items.len()),
        )),
        Some(Value::Array(items)) => items.into_iter().map(|item| prompt(serving, item, add)).collect(),
        Some(single) => Ok(vec![prompt(serving, single, add)?]),
    }
}

fn prompt(serving: &Serving, value: Value, add: AddSpecial) -> Result<Prompt, ApiError> {
    match value {
        Value::String(text) => Ok(Prompt { tokens: serving.text.encode(&text, add)?, text: Some(text) }),
        Value::Array(items) => token_prompt(serving, &items),
        other => Err(wrong("prompt", "a string, token ids, or an array of either", &other)),
    }
}

fn token_prompt(serving: &Serving, items: &[Value]) -> Result<Prompt, ApiError> {
    let limit = serving.context_tokens;
    if items.len() > limit {
        return Err(ApiError::context_length(items.len(), 0, limit).of("prompt"));
    }
    let vocab_size = serving.welcome.vocab_size;
    let tokens = items.iter().map(|item| token_id("prompt", item, vocab_size)).collect::<Result<_, _>>()?;
    Ok(Prompt { tokens, text: None })
}
