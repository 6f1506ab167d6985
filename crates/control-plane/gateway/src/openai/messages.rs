//! A conversation, message by message.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{
    strict_fields::{StrictFields, wrong},
    tools::tool_params::INPUT,
};
use crate::{
    errors::ApiError,
    text::{AnsweredCall, ChatMessage},
};

/// Most messages of a conversation.
pub const MAX_MESSAGES: usize = 4096;
/// Most calls of a message.
const MAX_CALLS: usize = 128;
/// Fields of a message that clients keep for themselves, or that direct the caches of other servers.
pub const INERT: [&str; 4] = ["cache_control", "id", "metadata", "opts"];

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
    let mut called = HashMap::new();
    items.into_iter().enumerate().map(|(index, item)| message(index, item, &mut called)).collect()
}

/// Functions by the numbers of their calls, so far.
type CalledFunctions = HashMap<String, String>;

fn message(index: usize, item: Value, called: &mut CalledFunctions) -> Result<ChatMessage, ApiError> {
    let place = format!("messages[{index}]");
    let fields = StrictFields::of(item, &place)?;
    one(fields, called).map_err(|error| error.within(&place))
}

fn one(mut fields: StrictFields, called: &mut CalledFunctions) -> Result<ChatMessage, ApiError> {
    let role = match fields.required_text("role")?.as_str() {
        // OpenAI's newer name for the same thing.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        other => {
            let message = format!("the role '{other}' is not supported; use system, user, assistant or tool");
            return Err(ApiError::bad_request("unsupported_parameter", message).of("role"));
        }
    };
    // A label, as are those of the request: the model is told roles alone.
    fields.text("name")?;
    fields.inert(&INERT);
    let content = content(&mut fields, role)?;
    let (mut reasoning, mut made) = (None, Vec::new());
    if role == "assistant" {
        reasoning = reasoned(&mut fields)?;
        made = calls(&mut fields, called)?;
    }
    let answers = if role == "tool" { Some(answers(&mut fields, called)?) } else { None };
    fields.finish()?;
    Ok(ChatMessage { role, content, reasoning, calls: made, answers })
}

/// The text of a message.
fn content(fields: &mut StrictFields, role: &str) -> Result<String, ApiError> {
    match fields.take("content") {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => parts.into_iter().map(|part| text_part("content", part)).collect(),
        // A turn that only called tools, in a history from elsewhere.
        None if role == "assistant" => Ok(String::new()),
        None => Err(ApiError::missing("content", "a message needs 'content': a string or text parts")),
        Some(other) => Err(wrong("content", "a string or an array of text parts", &other)),
    }
}

/// What an assistant thought, by the name that most servers give it or that vLLM does.
fn reasoned(fields: &mut StrictFields) -> Result<Option<String>, ApiError> {
    let (usual, other) = (fields.text("reasoning_content")?, fields.text("reasoning")?);
    Ok(usual.or(other))
}

/// The calls of an assistant's message, with their arguments as values: so templates take them.
fn calls(fields: &mut StrictFields, called: &mut CalledFunctions) -> Result<Vec<Value>, ApiError> {
    let items = fields.array("tool_calls")?.unwrap_or_default();
    if items.len() > MAX_CALLS {
        return Err(ApiError::invalid(
            "tool_calls",
            format!("'tool_calls' may hold at most {MAX_CALLS} calls"),
        ));
    }
    let call = |(index, item)| {
        call(item, called).map_err(|error: ApiError| error.within(&format!("tool_calls[{index}]")))
    };
    items.into_iter().enumerate().map(call).collect()
}

fn call(item: Value, called: &mut CalledFunctions) -> Result<Value, ApiError> {
    let mut fields = StrictFields::of(item, "a call")?;
    let (id, kind) = (fields.required_text("id")?, fields.text("type")?);
    // As parts of a stream have it, and what puts them together again.
    fields.integer("index", 0..=i64::MAX)?;
    let field = match kind.as_deref() {
        None | Some("function") => "function",
        Some("custom") => "custom",
        Some(other) => {
            let message = format!("calls of the type '{other}' are not supported; use function or custom");
            return Err(ApiError::bad_request("unsupported_parameter", message).of("type"));
        }
    };
    let inside = fields.take(field);
    fields.finish()?;
    let inside = inside.ok_or_else(|| ApiError::missing(field, format!("a call needs '{field}'")))?;
    let fields = StrictFields::of(inside, field)?;
    let (name, arguments) = called_with(fields, field).map_err(|error| error.within(field))?;
    let call = function_call(&id, &name, &arguments);
    called.insert(id, name);
    Ok(call)
}

/// The name of what is called, and its arguments.
fn called_with(mut fields: StrictFields, field: &str) -> Result<(String, Value), ApiError> {
    let name = fields.required_text("name")?;
    let arguments = match field {
        "custom" => custom_arguments(&fields.text("input")?.unwrap_or_default()),
        _ => arguments_of(&fields.text("arguments")?.unwrap_or_default()),
    };
    fields.finish()?;
    Ok((name, arguments))
}

/// Arguments as templates take them. A text that is no JSON, as of a call that was cut off, is shown as it is.
#[must_use]
pub fn arguments_of(text: &str) -> Value {
    if text.trim().is_empty() {
        return json!({});
    }
    model_files::strict_json::parse(text.as_bytes()).unwrap_or_else(|_| Value::from(text))
}

/// The input of a custom tool, as the arguments of the function that templates are shown in its place.
#[must_use]
pub fn custom_arguments(input: &str) -> Value {
    json!({ INPUT: input })
}

/// A call as templates take it.
#[must_use]
pub fn function_call(id: &str, name: &str, arguments: &Value) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

/// Which call a tool's message answers.
fn answers(fields: &mut StrictFields, called: &CalledFunctions) -> Result<AnsweredCall, ApiError> {
    let id = fields.required_text("tool_call_id")?;
    let name = called.get(&id).cloned();
    Ok(AnsweredCall { id, name })
}

/// The text of a part of `field`.
fn text_part(field: &str, part: Value) -> Result<String, ApiError> {
    let mut fields = StrictFields::of(part, field)?;
    let kind = fields.required_text("type").map_err(|error| error.of(field))?;
    if kind != "text" {
        let message = format!("content parts of type '{kind}' are not supported; only 'text' is");
        return Err(ApiError::bad_request("unsupported_parameter", message).of(field));
    }
    let text = fields.text("text").map_err(|error| error.of(field))?;
    // Where other servers are to begin to keep what they computed; here all beginnings are kept.
    fields.inert(&["cache_control"]);
    fields.finish().map_err(|error| error.within(field))?;
    text.ok_or_else(|| ApiError::missing(field, "a text part needs 'text'"))
}
