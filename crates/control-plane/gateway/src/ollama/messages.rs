//! Reads conversations in Ollama's format, where calls have JSON arguments and often no ids.

use serde_json::{Value, json};

use crate::{
    errors::ApiError,
    openai::{
        messages::{INERT, MAX_MESSAGES, arguments_of, function_call},
        strict_fields::{StrictFields, wrong},
    },
    text::{AnsweredCall, ChatMessage},
};

/// Reads `messages`, which may be empty.
pub(super) fn read(items: Vec<Value>) -> Result<Vec<ChatMessage>, ApiError> {
    if items.len() > MAX_MESSAGES {
        let message = format!("'messages' may hold at most {MAX_MESSAGES} messages");
        return Err(ApiError::invalid("messages", message));
    }
    let mut calls = CallNumbering::default();
    let message = |(index, item)| {
        let place = format!("messages[{index}]");
        let fields = StrictFields::of(item, &place)?;
        message(fields, &mut calls).map_err(|error| error.within(&place))
    };
    items.into_iter().enumerate().map(message).collect()
}

/// Assigns ids to calls and finds the call that a tool message answers: by id, function name, or order.
#[derive(Default)]
struct CallNumbering {
    made: usize,
    unanswered: Vec<AnsweredCall>,
}

impl CallNumbering {
    fn make(&mut self, id: Option<String>, name: &str) -> String {
        self.made += 1;
        // Nine letters or digits, because Mistral's templates accept nothing else.
        let id = id.unwrap_or_else(|| format!("call{:05}", self.made));
        self.unanswered.push(AnsweredCall { id: id.clone(), name: Some(name.to_owned()) });
        id
    }

    fn answer(&mut self, id: Option<String>, name: Option<String>) -> AnsweredCall {
        let is_meant = |call: &AnsweredCall| match (&id, &name) {
            (Some(id), _) => call.id == *id,
            (None, Some(_)) => call.name == name,
            (None, None) => true,
        };
        match self.unanswered.iter().position(is_meant) {
            Some(at) => self.unanswered.remove(at),
            None => AnsweredCall { id: id.unwrap_or_else(|| format!("call{:05}", 0)), name },
        }
    }
}

fn message(mut fields: StrictFields, calls: &mut CallNumbering) -> Result<ChatMessage, ApiError> {
    let role = match fields.required_text("role")?.as_str() {
        "system" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        other => {
            let message = format!("the role '{other}' is not supported; use system, user, assistant or tool");
            return Err(ApiError::bad_request("unsupported_parameter", message).of("role"));
        }
    };
    fields.inert(&INERT);
    let content = fields.text("content")?.unwrap_or_default();
    let mut message = ChatMessage { role, content, ..ChatMessage::default() };
    if role == "assistant" {
        message.reasoning = fields.text("thinking")?;
        for item in fields.array("tool_calls")?.unwrap_or_default() {
            message.calls.push(call(item, calls).map_err(|error| error.within("tool_calls"))?);
        }
    }
    if role == "tool" {
        let id = fields.text("tool_call_id")?;
        // Older clients send `name`.
        let (new, old) = (fields.text("tool_name")?, fields.text("name")?);
        message.answers = Some(calls.answer(id, new.or(old)));
    }
    fields.finish()?;
    Ok(message)
}

fn call(item: Value, calls: &mut CallNumbering) -> Result<Value, ApiError> {
    let mut fields = StrictFields::of(item, "a call")?;
    let id = fields.text("id")?;
    // Other clients send `type`, which can only be a function here.
    fields.text("type")?;
    let function = fields.take("function");
    fields.finish()?;
    let function = function.ok_or_else(|| ApiError::missing("function", "a call needs 'function'"))?;
    let mut fields = StrictFields::of(function, "function")?;
    fields.integer("index", 0..=i64::MAX)?;
    let name = fields.required_text("name")?;
    let arguments = match fields.take("arguments") {
        None => json!({}),
        Some(arguments @ Value::Object(_)) => arguments,
        // OpenAI's clients keep arguments as text.
        Some(Value::String(text)) => arguments_of(&text),
        Some(other) => return Err(wrong("arguments", "an object", &other)),
    };
    fields.finish()?;
    let id = calls.make(id, &name);
    Ok(function_call(&id, &name, &arguments))
}
