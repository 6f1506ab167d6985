//! Reads the messages of a conversation.

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

/// Maximum number of messages in a conversation.
pub(crate) const MAX_MESSAGES: usize = 4096;
const MAX_CALLS: usize = 128;
/// Fields of a message that clients keep for themselves, or that direct other servers' caches.
pub(crate) const INERT: [&str; 4] = ["cache_control", "id", "metadata", "opts"];

/// Reads at least one message.
pub(crate) fn messages(items: Option<Vec<Value>>) -> Result<Vec<ChatMessage>, ApiError> {
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

/// Function names by tool call id.
type CalledFunctions = HashMap<String, String>;

fn message(index: usize, item: Value, called: &mut CalledFunctions) -> Result<ChatMessage, ApiError> {
    let place = format!("messages[{index}]");
    let fields = StrictFields::of(item, &place)?;
    one(fields, called).map_err(|error| error.within(&place))
}

fn one(mut fields: StrictFields, called: &mut CalledFunctions) -> Result<ChatMessage, ApiError> {
    let role = match fields.required_text("role")?.as_str() {
        // OpenAI's newer name of the role `system`.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        other => {
            let message = format!("the role '{other}' is not supported; use system, user, assistant or tool");
            return Err(ApiError::bad_request("unsupported_parameter", message).of("role"));
        }
    };
    // Accepted and ignored: templates show the model roles only.
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

fn content(fields: &mut StrictFields, role: &str) -> Result<String, ApiError> {
    match fields.take("content") {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => parts.into_iter().map(|part| text_part("content", part)).collect(),
        // Histories of other servers contain assistant messages with tool calls and no content.
        None if role == "assistant" => Ok(String::new()),
        None => Err(ApiError::missing("content", "a message needs 'content': a string or text parts")),
        Some(other) => Err(wrong("content", "a string or an array of text parts", &other)),
    }
}

/// Reads reasoning content under its common name `reasoning_content` or vLLM's name `reasoning`.
fn reasoned(fields: &mut StrictFields) -> Result<Option<String>, ApiError> {
    let (usual, other) = (fields.text("reasoning_content")?, fields.text("reasoning")?);
    Ok(usual.or(other))
}

/// Reads the tool calls of an assistant message, with arguments parsed to JSON because templates take values.
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
    // Clients that join the parts of a stream leave its `index` in the message.
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

/// Reads the name of the called tool and the arguments.
fn called_with(mut fields: StrictFields, field: &str) -> Result<(String, Value), ApiError> {
    let name = fields.required_text("name")?;
    let arguments = match field {
        "custom" => custom_arguments(&fields.text("input")?.unwrap_or_default()),
        _ => arguments_of(&fields.text("arguments")?.unwrap_or_default()),
    };
    fields.finish()?;
    Ok((name, arguments))
}

/// Parses arguments for the template; text that is not JSON, as of a truncated call, stays a string.
#[must_use]
pub(crate) fn arguments_of(text: &str) -> Value {
    if text.trim().is_empty() {
        return json!({});
    }
    model_files::strict_json::parse(text.as_bytes()).unwrap_or_else(|_| Value::from(text))
}

/// Wraps a custom tool's input as the arguments of the function that templates show in its place.
#[must_use]
pub(crate) fn custom_arguments(input: &str) -> Value {
    json!({ INPUT: input })
}

/// Returns a tool call in the form that templates take.
#[must_use]
pub(crate) fn function_call(id: &str, name: &str, arguments: &Value) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

/// Returns the tool call that a tool message answers.
fn answers(fields: &mut StrictFields, called: &CalledFunctions) -> Result<AnsweredCall, ApiError> {
    let id = fields.required_text("tool_call_id")?;
    let name = called.get(&id).cloned();
    Ok(AnsweredCall { id, name })
}

fn text_part(field: &str, part: Value) -> Result<String, ApiError> {
    let mut fields = StrictFields::of(part, field)?;
    let kind = fields.required_text("type").map_err(|error| error.of(field))?;
    if kind != "text" {
        let message = format!("content parts of type '{kind}' are not supported; only 'text' is");
        return Err(ApiError::bad_request("unsupported_parameter", message).of(field));
    }
    let text = fields.text("text").map_err(|error| error.of(field))?;
    // `cache_control` marks where other servers begin to cache; this server caches every prefix.
    fields.inert(&["cache_control"]);
    fields.finish().map_err(|error| error.within(field))?;
    text.ok_or_else(|| ApiError::missing(field, "a text part needs 'text'"))
}
