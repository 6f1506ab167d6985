//! `POST /v1/chat/completions`.

use serde_json::Value;

use super::{
    ask::Ask,
    fields::{Fields, wrong},
    job::{Echo, Job, Kind, Prompt, namespace},
    params::{self, Limits, MAX_LOGPROBS, Params},
    target::Wanted,
};
use crate::{app::App, errors::ApiError, text::ChatMessage};

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 4096;

/// A body, checked as far as it can be without looking anything up.
#[derive(Debug)]
pub struct Body {
    wanted: Wanted,
    params: Params,
    logprobs: Option<u32>,
    messages: Vec<ChatMessage>,
}

impl Body {
    /// Reads `body`.
    pub fn read(body: &[u8], limits: &Limits<'_>) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let wanted = Wanted::read(&mut fields)?;
        let params = params::read(&mut fields, limits)?;
        let logprobs = logprobs(&mut fields)?;
        let messages = messages(fields.array("messages")?)?;
        fields.finish()?;
        if params.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "'max_tokens' must be at least 1 for a chat"));
        }
        Ok(Self { wanted, params, logprobs, messages })
    }
}

/// Turns a request into a job.
pub fn job(app: &App, ask: Ask) -> Result<Job, ApiError> {
    let Ask { caller, serving, default_seed, body } = ask;
    let Body { wanted, params, logprobs, messages } = Body::read(&body, &Limits::of(&serving, default_seed))?;
    let target = wanted.find(app, &serving, &caller)?;
    let tokens = serving.text.encode_chat(&messages)?;
    let namespace = namespace(&caller, &target, &serving);
    let prompts = vec![Prompt { tokens, text: None }];
    let (kind, echo, tenant) = (Kind::Chat, Echo::Nothing, caller.tenant);
    Job { kind, serving, target, tenant, namespace, prompts, params, logprobs, echo }.check()
}

fn logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.flag("logprobs", false)?;
    let top = fields.count("top_logprobs", 0..=MAX_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "'top_logprobs' is only allowed together with 'logprobs': true",
        )),
    }
}

/// Reads a conversation: at least one message.
pub fn messages(items: Option<Vec<Value>>) -> Result<Vec<ChatMessage>, ApiError> {
    let items = items.unwrap_or_default();
    if items.is_empty() {
        return Err(ApiError::missing(
            "messages",
            "'messages' is required and must hold at least one message",
        ));
    }
    if items.len() > MAX_MESSAGES {
        return Err(ApiError::invalid(
            "messages",
            format!("'messages' may hold at most {MAX_MESSAGES} messages"),
        ));
    }
    items.into_iter().enumerate().map(|(index, item)| message(index, item)).collect()
}

fn message(index: usize, item: Value) -> Result<ChatMessage, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let mut fields = Fields::of(item, &format!("messages[{index}]"))?;
    let role = match fields.required_text("role").map_err(|error| error.of(&at("role")))?.as_str() {
        // OpenAI's newer name for the same thing.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        other => {
            let message = format!("the role '{other}' is not supported; use system, user or assistant");
            return Err(ApiError::bad_request("unsupported_parameter", message).of(&at("role")));
        }
    };
    // A label, as are those of the request: the model is told roles alone.
    fields.text("name").map_err(|error| error.of(&at("name")))?;
    let content = match fields.take("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => {
            parts.into_iter().map(|part| text_part(&at("content"), part)).collect::<Result<_, _>>()?
        }
        // A turn that only called tools, in a history from elsewhere.
        None if role == "assistant" => String::new(),
        None => {
            return Err(ApiError::missing(&at("content"), "a message needs content: a string or text parts"));
        }
        Some(other) => {
            return Err(wrong(&at("content"), "a string or an array of text parts", &other));
        }
    };
    fields.finish().map_err(|error| error.within(&format!("messages[{index}]")))?;
    Ok(ChatMessage { role, content })
}

fn text_part(at: &str, part: Value) -> Result<String, ApiError> {
    let mut fields = Fields::of(part, at)?;
    let kind = fields.required_text("type").map_err(|error| error.of(at))?;
    if kind != "text" {
        let message = format!("content parts of type '{kind}' are not supported; only 'text' is");
        return Err(ApiError::bad_request("unsupported_parameter", message).of(at));
    }
    let text = fields.text("text").map_err(|error| error.of(at))?;
    fields.finish().map_err(|error| error.within(at))?;
    text.ok_or_else(|| ApiError::missing(at, "a text part needs 'text'"))
}
