//! Reads conversations in Anthropic's format, whose tool calls and results are content blocks.

use std::collections::HashMap;

use serde_json::Value;

use super::thinking;
use crate::{
    errors::ApiError,
    openai::{
        messages::{MAX_MESSAGES, function_call},
        strict_fields::{StrictFields, wrong},
    },
    text::{AnsweredCall, ChatMessage},
};

/// Prefix of the ids of tool calls in Anthropic's format. Chat templates get ids without it, because
/// Mistral's templates accept only nine letters or digits.
pub(super) const CALL_PREFIX: &str = "toolu_";
/// Separates the texts of consecutive messages with the same role, which the model sees as one message.
const BETWEEN_MESSAGES: &str = "\n\n";
/// Separates several thinking blocks of a message.
const BETWEEN_THOUGHTS: &str = "\n\n";
/// Marks the result of a tool that failed, because chat templates have no field for failures.
const FAILED: &str = "Error: ";

/// Reads the system prompt and at least one message.
pub(super) fn read(system: Option<Value>, items: Option<Vec<Value>>) -> Result<Vec<ChatMessage>, ApiError> {
    let items = items.unwrap_or_default();
    if items.is_empty() {
        let message = "'messages' is required and must hold at least one message";
        return Err(ApiError::missing("messages", message));
    }
    if items.len() > MAX_MESSAGES {
        let message = format!("'messages' may hold at most {MAX_MESSAGES} messages");
        return Err(ApiError::invalid("messages", message));
    }
    let mut reader = ConversationReader::default();
    if let Some(system) = system {
        reader.content("system", "system", system)?;
    }
    for (index, item) in items.into_iter().enumerate() {
        let place = format!("messages[{index}]");
        let fields = StrictFields::of(item, &place)?;
        reader.message(fields).map_err(|error| error.within(&place))?;
    }
    Ok(reader.messages)
}

#[derive(Default)]
struct ConversationReader {
    messages: Vec<ChatMessage>,
    /// Names of called tools by call id.
    called: HashMap<String, String>,
    /// True until the current message has a text.
    begins: bool,
}

impl ConversationReader {
    fn message(&mut self, mut fields: StrictFields) -> Result<(), ApiError> {
        let role = match fields.required_text("role")?.as_str() {
            "user" => "user",
            "assistant" => "assistant",
            "system" => "system",
            other => {
                let message = format!("the role '{other}' is not supported; use user, assistant or system");
                return Err(ApiError::bad_request("unsupported_parameter", message).of("role"));
            }
        };
        let content = fields.take("content");
        fields.finish()?;
        let missing = || ApiError::missing("content", "a message needs 'content': a string or blocks");
        self.content(role, "content", content.ok_or_else(missing)?)
    }

    /// Reads the content in `field` of a message of `role`.
    fn content(&mut self, role: &'static str, field: &str, content: Value) -> Result<(), ApiError> {
        self.begins = true;
        match content {
            Value::String(text) => self.text(role, &text),
            Value::Array(blocks) => {
                for (index, block) in blocks.into_iter().enumerate() {
                    let place = format!("{field}[{index}]");
                    let fields = StrictFields::of(block, &place)?;
                    self.block(role, fields).map_err(|error| error.within(&place))?;
                }
            }
            other => return Err(wrong(field, "a string or an array of content blocks", &other)),
        }
        Ok(())
    }

    fn block(&mut self, role: &'static str, mut fields: StrictFields) -> Result<(), ApiError> {
        let kind = fields.required_text("type")?;
        fields.inert(&["cache_control"]);
        match (role, kind.as_str()) {
            (_, "text") => {
                let text = text_of(&mut fields)?;
                self.text(role, &text);
            }
            ("assistant", "thinking") => self.thought(&mut fields)?,
            // Only Anthropic can read the content.
            ("assistant", "redacted_thinking") => drop(fields.text("data")?),
            ("assistant", "tool_use") => self.call(&mut fields)?,
            ("user", "tool_result") => self.result(&mut fields)?,
            _ => return Err(unknown_block(role, &kind)),
        }
        fields.finish()
    }

    /// Appends a text; a message continues the message before it if both have the same role.
    fn text(&mut self, role: &'static str, text: &str) {
        let begins = std::mem::replace(&mut self.begins, false);
        let joins = !begins || role != "system";
        match self.messages.last_mut().filter(|last| joins && last.role == role) {
            Some(last) => {
                if begins && !last.content.is_empty() && !text.is_empty() {
                    last.content.push_str(BETWEEN_MESSAGES);
                }
                last.content.push_str(text);
            }
            None => {
                let content = text.to_owned();
                self.messages.push(ChatMessage { role, content, ..ChatMessage::default() });
            }
        }
    }

    /// Returns the assistant's message that a thought or a call belongs to.
    fn assistant(&mut self) -> &mut ChatMessage {
        if self.messages.last().is_none_or(|last| last.role != "assistant") {
            self.messages.push(ChatMessage { role: "assistant", ..ChatMessage::default() });
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }

    fn thought(&mut self, fields: &mut StrictFields) -> Result<(), ApiError> {
        let (shown, signature) = (fields.text("thinking")?, fields.text("signature")?);
        let shown =
            shown.ok_or_else(|| ApiError::missing("thinking", "a thinking block needs 'thinking'"))?;
        let sealed = || signature.as_deref().and_then(thinking::sealed_text);
        let text = if shown.is_empty() { sealed().unwrap_or_default() } else { shown };
        match &mut self.assistant().reasoning {
            Some(reasoning) => *reasoning = [reasoning.as_str(), &text].join(BETWEEN_THOUGHTS),
            none => *none = Some(text),
        }
        Ok(())
    }

    fn call(&mut self, fields: &mut StrictFields) -> Result<(), ApiError> {
        let (id, name) = (call_id(fields, "id")?, fields.required_text("name")?);
        let input = match fields.take("input") {
            Some(input @ Value::Object(_)) => input,
            None => return Err(ApiError::missing("input", "a tool_use block needs 'input': an object")),
            Some(other) => return Err(wrong("input", "an object", &other)),
        };
        check_caller(fields)?;
        self.assistant().calls.push(function_call(&id, &name, &input));
        self.called.insert(id, name);
        Ok(())
    }

    fn result(&mut self, fields: &mut StrictFields) -> Result<(), ApiError> {
        let id = call_id(fields, "tool_use_id")?;
        let failed = fields.flag("is_error", false)?;
        let text = fields.take("content").map(result_text).transpose()?.unwrap_or_default();
        let content = if failed { format!("{FAILED}{text}") } else { text };
        let name = self.called.get(&id).cloned();
        let answers = Some(AnsweredCall { id, name });
        self.messages.push(ChatMessage { role: "tool", content, answers, ..ChatMessage::default() });
        Ok(())
    }
}

fn text_of(fields: &mut StrictFields) -> Result<String, ApiError> {
    fields.text("text")?.ok_or_else(|| ApiError::missing("text", "a text block needs 'text'"))
}

/// Reads the id of a call as chat templates get it.
fn call_id(fields: &mut StrictFields, field: &str) -> Result<String, ApiError> {
    let id = fields.required_text(field)?;
    Ok(id.strip_prefix(CALL_PREFIX).filter(|rest| !rest.is_empty()).map(str::to_owned).unwrap_or(id))
}

/// Checks that the model itself made a call, not code that Anthropic runs.
fn check_caller(fields: &mut StrictFields) -> Result<(), ApiError> {
    match fields.take("caller") {
        Some(caller) if caller["type"] != "direct" => Err(ApiError::unsupported("caller")),
        _ => Ok(()),
    }
}

/// Reads the content of a tool result: a string or text blocks.
fn result_text(content: Value) -> Result<String, ApiError> {
    const FIELD: &str = "content";
    match content {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let block = |(index, block)| {
                let place = format!("{FIELD}[{index}]");
                let fields = StrictFields::of(block, &place)?;
                result_block(fields).map_err(|error| error.within(&place))
            };
            blocks.into_iter().enumerate().map(block).collect()
        }
        other => Err(wrong(FIELD, "a string or an array of text blocks", &other)),
    }
}

fn result_block(mut fields: StrictFields) -> Result<String, ApiError> {
    let kind = fields.required_text("type")?;
    if kind != "text" {
        let message = format!("blocks of the type '{kind}' are not supported in tool results; use text");
        return Err(ApiError::bad_request("unsupported_parameter", message).of("type"));
    }
    let text = text_of(&mut fields)?;
    fields.inert(&["cache_control"]);
    fields.finish().map(|()| text)
}

fn unknown_block(role: &str, kind: &str) -> ApiError {
    let known = match role {
        "user" => "text or tool_result",
        "assistant" => "text, thinking, redacted_thinking or tool_use",
        _ => "text",
    };
    let message = format!("blocks of the type '{kind}' are not supported in a {role} message; use {known}");
    ApiError::bad_request("unsupported_parameter", message).of("type")
}
