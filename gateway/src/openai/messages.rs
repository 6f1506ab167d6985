//! A conversation, message by message.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::fields::{Fields, wrong};
use crate::{
    errors::ApiError,
    text::{Answered, ChatMessage},
};

/// Most messages of a conversation.
pub const MAX_MESSAGES: usize = 4096;
/// Most calls of a message.
const MAX_CALLS: usize = 128;

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
type Called = HashMap<String, String>;

fn message(index: usize, item: Value, called: &mut Called) -> Result<ChatMessage, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let mut fields = Fields::of(item, &format!("messages[{index}]"))?;
    let role = match fields.required_text("role").map_err(|error| error.of(&at("role")))?.as_str() {
        // OpenAI's newer name for the same thing.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        other => {
            let message = format!("the role '{other}' is not supported; use system, user, assistant or tool");
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
    let within = |error: ApiError| error.within(&format!("messages[{index}]"));
    let (mut reasoning, mut made) = (None, Vec::new());
    if role == "assistant" {
        reasoning = reasoned(&mut fields).map_err(within)?;
        made = calls(&mut fields, called).map_err(within)?;
    }
    let answers = if role == "tool" { Some(answers(&mut fields, called).map_err(within)?) } else { None };
    fields.finish().map_err(within)?;
    Ok(ChatMessage { role, content, reasoning, calls: made, answers })
}

/// What an assistant thought, by the name that most servers give it or that vLLM does.
fn reasoned(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let (usual, other) = (fields.text("reasoning_content")?, fields.text("reasoning")?);
    Ok(usual.or(other))
}

/// The calls of an assistant's message, with their arguments as values: so templates take them.
fn calls(fields: &mut Fields, called: &mut Called) -> Result<Vec<Value>, ApiError> {
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

fn call(item: Value, called: &mut Called) -> Result<Value, ApiError> {
    let mut fields = Fields::of(item, "a call")?;
    let (id, kind) = (fields.required_text("id")?, fields.text("type")?);
    if kind.as_deref().is_some_and(|kind| kind != "function") {
        return Err(ApiError::bad_request("unsupported_parameter", "only calls of functions are supported")
            .of("type"));
    }
    // Where it stood in a stream.
    fields.integer("index", 0..=i64::MAX)?;
    let function =
        fields.take("function").ok_or_else(|| ApiError::missing("function", "a call needs 'function'"))?;
    fields.finish()?;
    let within = |error: ApiError| error.within("function");
    let mut fields = Fields::of(function, "function")?;
    let name = fields.required_text("name").map_err(within)?;
    let text = fields.text("arguments").map_err(within)?.unwrap_or_default();
    fields.finish().map_err(within)?;
    let call = function_call(&id, &name, &text).map_err(within)?;
    called.insert(id, name);
    Ok(call)
}

/// A call as templates take it, with its arguments as a value.
///
/// # Errors
/// `text`, what `arguments` says, is no JSON.
pub fn function_call(id: &str, name: &str, text: &str) -> Result<Value, ApiError> {
    let arguments =
        if text.trim().is_empty() { Ok(json!({})) } else { files::strict_json::parse(text.as_bytes()) };
    let arguments = arguments.map_err(|error| {
        ApiError::invalid("arguments", format!("'arguments' is a text that is no JSON: {error}"))
    })?;
    Ok(json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }))
}

/// Which call a tool's message answers.
fn answers(fields: &mut Fields, called: &Called) -> Result<Answered, ApiError> {
    let id = fields.required_text("tool_call_id")?;
    let name = called.get(&id).cloned();
    Ok(Answered { id, name })
}

fn text_part(at: &str, part: Value) -> Result<String, ApiError> {
    let mut fields = Fields::of(part, at)?;
    let kind = fields.required_text("type").map_err(|error| error.of(at))?;
    if kind != "text" {
        let message = format!("content parts of type '{kind}' are not supported; only 'text' is");
        return Err(ApiError::bad_request("unsupported_parameter", message).of(at));
    }
    let text = fields.text("text").map_err(|error| error.of(at))?;
    // Where other servers are to begin to keep what they computed; here all beginnings are kept.
    fields.take("cache_control");
    fields.finish().map_err(|error| error.within(at))?;
    text.ok_or_else(|| ApiError::missing(at, "a text part needs 'text'"))
}
