//! `POST /v1/completions`.

use std::sync::Arc;

use model::tokenizer::AddSpecial;
use serde_json::Value;

use super::{
    errors::ApiError,
    fields::{Fields, wrong},
    job::{Echo, Job, Kind, MAX_PROMPTS, Prompt, find_target, namespace},
    params::{self, MAX_LOGPROBS, token_id},
};
use crate::{app::App, auth::Caller, lifecycle::Serving};

/// OpenAI's default for this route.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Reads the body of a request.
pub fn job(app: &App, caller: &Caller, serving: Arc<Serving>, body: &[u8]) -> Result<Job, ApiError> {
    let mut fields = Fields::parse(body)?;
    let target = find_target(app, &serving, &fields.required_text("model")?)?;
    let mut params = params::read(&mut fields, &serving.limits())?;
    params.max_tokens = params.max_tokens.or(Some(DEFAULT_MAX_TOKENS));
    let logprobs = fields.count("logprobs", 0..=MAX_LOGPROBS)?;
    let echo = if fields.flag("echo", false)? { Echo::Prompt } else { Echo::Nothing };
    if params.max_tokens == Some(0) && echo == Echo::Nothing {
        return Err(ApiError::invalid("max_tokens", "'max_tokens' may be 0 only together with 'echo': true"));
    }
    let add = add_special(&mut fields)?;
    let prompts = prompts(&serving, fields.take("prompt"), add)?;
    fields.finish()?;
    let namespace = namespace(caller, &target, &serving);
    Job { kind: Kind::Text, serving, target, namespace, prompts, params, logprobs, echo }.check()
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
