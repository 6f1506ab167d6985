//! Items of a conversation in the Responses API: messages, reasoning, tool calls and their results.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::super::{
    messages::{INERT, MAX_MESSAGES, arguments_of, custom_arguments, function_call},
    strict_fields::{StrictFields, wrong},
};
use crate::{
    errors::ApiError,
    random::new_id,
    text::{AnsweredCall, ChatMessage},
};

pub(super) const THOUGHT: &str = "reasoning_text";

#[derive(Debug, Clone)]
pub struct Item {
    /// The item as responses show it, with an id.
    pub value: Value,
    said: ItemContent,
}

#[derive(Debug, Clone)]
enum ItemContent {
    ReasoningPrefix { text: String },
    Message { role: &'static str, text: String },
    Call { call_id: String, name: String, call: Value },
    Output { call_id: String, text: String },
}

/// Parses stored items.
///
/// # Errors
/// The stored text is not valid JSON.
pub(crate) fn parse(text: &str) -> Result<Vec<Value>, ApiError> {
    serde_json::from_str(text)
        .map_err(|error| ApiError::internal(format!("the stored response is damaged: {error}")))
}

/// Reads `input`: a text or items.
///
/// # Errors
/// Names the field that is missing, malformed or unknown.
pub(crate) fn read(input: Option<Value>) -> Result<Vec<Item>, ApiError> {
    let items = match input {
        Some(Value::String(text)) => vec![json!({ "role": "user", "content": text })],
        Some(Value::Array(items)) if !items.is_empty() => items,
        None | Some(Value::Array(_)) => {
            return Err(ApiError::missing("input", "'input' is required: a string, or an array of items"));
        }
        Some(other) => return Err(wrong("input", "a text or an array of items", &other)),
    };
    if items.len() > MAX_MESSAGES {
        return Err(ApiError::invalid("input", format!("'input' may hold at most {MAX_MESSAGES} items")));
    }
    items.into_iter().enumerate().map(|(index, value)| at(index, value)).collect()
}

fn at(index: usize, value: Value) -> Result<Item, ApiError> {
    let place = format!("input[{index}]");
    let fields = StrictFields::of(value, &place)?;
    item(fields).map_err(|error| error.within(&place))
}

/// Id prefix of an item, its fields as responses show them, and its parsed content.
type ParsedItem = (&'static str, Value, ItemContent);

fn item(mut fields: StrictFields) -> Result<Item, ApiError> {
    let kind = fields.text("type")?.unwrap_or_else(|| "message".to_owned());
    let read: fn(&mut StrictFields) -> Result<ParsedItem, ApiError> = match kind.as_str() {
        "message" => message,
        "function_call" => function_call_item,
        "custom_tool_call" => custom_call,
        "function_call_output" | "custom_tool_call_output" => output,
        "reasoning" => reasoning,
        other => {
            let message = format!(
                "items of the type '{other}' are not supported; use message, reasoning, function_call, function_call_output, \
                 custom_tool_call and custom_tool_call_output"
            );
            return Err(ApiError::bad_request("unsupported_parameter", message).of("type"));
        }
    };
    let id = fields.text("id")?;
    let status = fields.text("status")?.unwrap_or_else(|| "completed".to_owned());
    fields.inert(&INERT);
    let (of, mut value, said) = read(&mut fields)?;
    fields.finish()?;
    value["id"] = id.unwrap_or_else(|| new_id(of)).into();
    (value["type"], value["status"]) = (kind.into(), status.into());
    Ok(Item { value, said })
}

fn message(fields: &mut StrictFields) -> Result<ParsedItem, ApiError> {
    let (role, part, shown) = role(&fields.required_text("role")?)?;
    let text = text(fields.take("content"), "content")?;
    let value = json!({ "role": shown, "content": [part_of(part, &text)] });
    Ok(("msg", value, ItemContent::Message { role, text }))
}

fn function_call_item(fields: &mut StrictFields) -> Result<ParsedItem, ApiError> {
    let (call_id, name) = (fields.required_text("call_id")?, fields.required_text("name")?);
    let arguments = fields.text("arguments")?.unwrap_or_default();
    let call = function_call(&call_id, &name, &arguments_of(&arguments));
    let value = json!({ "call_id": call_id, "name": name, "arguments": arguments });
    Ok(("fc", value, ItemContent::Call { call_id, name, call }))
}

fn custom_call(fields: &mut StrictFields) -> Result<ParsedItem, ApiError> {
    let (call_id, name) = (fields.required_text("call_id")?, fields.required_text("name")?);
    let input = fields.text("input")?.unwrap_or_default();
    let call = function_call(&call_id, &name, &custom_arguments(&input));
    let value = json!({ "call_id": call_id, "name": name, "input": input });
    Ok(("ctc", value, ItemContent::Call { call_id, name, call }))
}

/// Reads the result of a function call or of a custom tool call.
fn output(fields: &mut StrictFields) -> Result<ParsedItem, ApiError> {
    let call_id = fields.required_text("call_id")?;
    let text = text(fields.take("output"), "output")?;
    let value = json!({ "call_id": call_id, "output": text });
    Ok(("fco", value, ItemContent::Output { call_id, text }))
}

fn reasoning(fields: &mut StrictFields) -> Result<ParsedItem, ApiError> {
    let (content, summary) = (fields.array("content")?, fields.array("summary")?);
    // Other servers send encrypted reasoning; this server ignores it.
    fields.text("encrypted_content")?;
    let parts = |parts: Option<Vec<Value>>, field| text(parts.map(Value::Array), field);
    let text = if content.is_some() { parts(content, "content") } else { parts(summary, "summary") }?;
    let value = json!({ "summary": [], "content": [part_of(THOUGHT, &text)] });
    Ok(("rs", value, ItemContent::ReasoningPrefix { text }))
}

pub(super) fn part_of(kind: &str, text: &str) -> Value {
    match kind {
        "output_text" => json!({ "type": kind, "text": text, "annotations": [], "logprobs": [] }),
        _ => json!({ "type": kind, "text": text }),
    }
}

/// Returns the template's role, the type of the role's content parts, and the API's role.
fn role(name: &str) -> Result<(&'static str, &'static str, &'static str), ApiError> {
    match name {
        "user" => Ok(("user", "input_text", "user")),
        "system" => Ok(("system", "input_text", "system")),
        "developer" => Ok(("system", "input_text", "developer")),
        "assistant" => Ok(("assistant", "output_text", "assistant")),
        other => {
            let message =
                format!("the role '{other}' is not supported; use system, developer, user or assistant");
            Err(ApiError::bad_request("unsupported_parameter", message).of("role"))
        }
    }
}

/// Reads a text, or joins parts that are texts.
fn text(content: Option<Value>, field: &str) -> Result<String, ApiError> {
    match content {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            parts.into_iter().map(|part| text_part(part, field).map_err(|error| error.of(field))).collect()
        }
        None => Err(ApiError::missing(field, format!("'{field}' is required: a string, or text parts"))),
        Some(other) => Err(wrong(field, "a text or an array of parts", &other)),
    }
}

fn text_part(part: Value, field: &str) -> Result<String, ApiError> {
    let mut fields = StrictFields::of(part, field)?;
    let kind = fields.required_text("type")?;
    if !["input_text", "output_text", "text", THOUGHT, "summary_text"].contains(&kind.as_str()) {
        let message = format!("parts of type '{kind}' are not supported; only text is");
        return Err(ApiError::bad_request("unsupported_parameter", message));
    }
    let text = fields.text("text")?;
    fields.inert(&["cache_control"]);
    fields.array("annotations")?;
    fields.array("logprobs")?;
    fields.finish()?;
    text.ok_or_else(|| ApiError::missing(field, "a part needs 'text'"))
}

/// Converts items to messages: a call joins the assistant message before it, reasoning the one after it.
#[must_use]
pub(crate) fn messages(instructions: Option<&str>, items: &[Item]) -> Vec<ChatMessage> {
    let mut messages = Vec::with_capacity(items.len() + 1);
    if let Some(text) = instructions {
        messages.push(ChatMessage { role: "system", content: text.to_owned(), ..ChatMessage::default() });
    }
    let mut called = HashMap::new();
    for item in items {
        match &item.said {
            ItemContent::ReasoningPrefix { text } => {
                let reasoning = Some(text.clone());
                messages.push(ChatMessage { role: "assistant", reasoning, ..ChatMessage::default() });
            }
            ItemContent::Message { role, text } => {
                match messages.last_mut().filter(|last| last.only_thinks()) {
                    Some(last) if *role == last.role => last.content.clone_from(text),
                    _ => messages.push(ChatMessage { role, content: text.clone(), ..ChatMessage::default() }),
                }
            }
            ItemContent::Call { call_id, name, call } => {
                called.insert(call_id, name);
                if messages.last().is_none_or(|last: &ChatMessage| last.role != "assistant") {
                    messages.push(ChatMessage { role: "assistant", ..ChatMessage::default() });
                }
                if let Some(last) = messages.last_mut() {
                    last.calls.push(call.clone());
                }
            }
            ItemContent::Output { call_id, text } => {
                let name = called.get(call_id).map(|name| (*name).clone());
                let answers = Some(AnsweredCall { id: call_id.clone(), name });
                messages.push(ChatMessage {
                    role: "tool",
                    content: text.clone(),
                    answers,
                    ..ChatMessage::default()
                });
            }
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_belong_to_the_turn_they_follow() {
        let call =
            |id: &str| json!({ "type": "function_call", "call_id": id, "name": "f", "arguments": "{}" });
        let items = read(Some(json!([
            { "role": "user", "content": [{ "type": "input_text", "text": "a" }] },
            call("1"), call("2"),
            { "type": "function_call_output", "call_id": "2", "output": "b" },
            { "role": "assistant", "content": "c" }, call("3"),
        ])))
        .unwrap();
        let messages = messages(Some("be brief"), &items);
        let found: Vec<_> =
            messages.iter().map(|one| (one.role, one.content.as_str(), one.calls.len())).collect();
        let expected = [
            ("system", "be brief", 0),
            ("user", "a", 0),
            ("assistant", "", 2),
            ("tool", "b", 0),
            ("assistant", "c", 1),
        ];
        assert_eq!(found, expected);
        assert_eq!(messages[3].answers.as_ref().unwrap().name.as_deref(), Some("f"));
        // The items that responses show parse to the same messages.
        let again = read(Some(items.iter().map(|item| item.value.clone()).collect())).unwrap();
        assert_eq!(super::messages(Some("be brief"), &again), messages);
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (input, param) in [
            (json!([]), "input"),
            (json!(7), "input"),
            (json!([{ "type": "item_reference", "id": "x" }]), "input[0].type"),
            (json!([{ "role": "robot", "content": "a" }]), "input[0].role"),
            (json!([{ "role": "user", "content": [{ "type": "input_image" }] }]), "input[0].content"),
            (json!([{ "type": "function_call", "call_id": "1", "arguments": "{}" }]), "input[0].name"),
            (json!([{ "role": "user", "content": "a", "x": 1 }]), "input[0].x"),
        ] {
            let error = format!("{:?}", read(Some(input.clone())).unwrap_err());
            assert!(error.contains(&format!("param: Some(\"{param}\")")), "{input}: {error}");
        }
    }
}
