//! Messages of a conversation, in OpenAI's format, in the form that chat templates take.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{
    fault::LineFault,
    fields::{LineFields, text, wrong},
    tool_data::{self, ShownField},
};

/// Maximum number of messages in a conversation, as in the gateway.
const MAX_MESSAGES: usize = 4096;

/// Fields that would change what the model is shown or learns, and that no reader takes.
const REFUSED: [&str; 6] = ["audio", "audios", "images", "videos", "training_detail", "train_detail"];

/// Names of reasoning content in data of several publishers.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// Names of the flag that masks a message, in the data of OpenAI, Axolotl and other trainers.
const LEARNED: [&str; 5] = ["weight", "train", "training", "loss", "loss_mask"];

const ROLES: [(&str, MessageRole); 6] = [
    ("system", MessageRole::System),
    // OpenAI's newer name for the system role.
    ("developer", MessageRole::System),
    ("user", MessageRole::User),
    ("assistant", MessageRole::Assistant),
    ("tool", MessageRole::Tool),
    // OpenAI's older name for the tool role.
    ("function", MessageRole::Tool),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageRole {
    System,
    User,
    Assistant,
    Tool,
}

impl MessageRole {
    /// Returns the role's name in chat templates.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampleMessage {
    pub(super) role: MessageRole,
    pub(super) content: String,
    /// True only for messages of the assistant.
    pub(super) is_learned: bool,
    /// Further fields that the template may show: `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.
    pub(super) shown: Map<String, Value>,
    /// Path in the line of each field in `shown`.
    pub(super) paths: BTreeMap<&'static str, String>,
}

impl SampleMessage {
    pub(super) fn new(role: MessageRole, content: String) -> Self {
        let (shown, paths) = (Map::new(), BTreeMap::new());
        Self { role, content, is_learned: role == MessageRole::Assistant, shown, paths }
    }

    pub(super) fn asks(content: String) -> Self {
        Self::new(MessageRole::User, content)
    }

    /// Adds the field `name` of the template, if the line has it.
    pub(super) fn show(&mut self, name: &'static str, field: Option<ShownField>) {
        if let Some((value, path)) = field {
            self.shown.insert(name.to_owned(), value);
            self.paths.insert(name, path);
        }
    }

    /// Returns the message in the form that templates take.
    pub(super) fn value(&self) -> Value {
        let mut value = json!({ "role": self.role.as_str(), "content": self.content });
        if let Value::Object(fields) = &mut value {
            fields.extend(self.shown.clone());
        }
        value
    }

    /// Returns true if both messages show the model the same.
    pub(super) fn shows_as(&self, other: &Self) -> bool {
        (self.role, &self.content, &self.shown) == (other.role, &other.content, &other.shown)
    }

    fn is_empty(&self) -> bool {
        let says = |field: &str| self.shown.contains_key(field);
        self.content.is_empty() && !says("tool_calls") && !says("reasoning_content")
    }
}

/// Reads the list `value` of messages at `path` of `line`.
pub(super) fn messages(line: &LineFields, path: &str, value: Value) -> Result<Vec<SampleMessage>, LineFault> {
    let mut called = BTreeMap::new();
    each(line, path, value, |fields| message(fields, &mut called))
}

/// Reads a list of at least one item at `path` of `line`.
pub(super) fn each(
    line: &LineFields,
    path: &str,
    value: Value,
    mut read: impl FnMut(&mut LineFields) -> Result<SampleMessage, LineFault>,
) -> Result<Vec<SampleMessage>, LineFault> {
    let items = match value {
        Value::Array(items) => items,
        other => return Err(wrong(path.to_owned(), "an array of messages", &other)),
    };
    if items.is_empty() {
        return Err(LineFault::Empty { field: path.to_owned() });
    }
    if items.len() > MAX_MESSAGES {
        return Err(LineFault::TooManyMessages { field: path.to_owned(), limit: MAX_MESSAGES });
    }
    let items = items.into_iter().enumerate();
    items.map(|(index, item)| read(&mut line.at(format!("{path}[{index}]"), item)?)).collect()
}

/// Reads a message; `called` has the names of the functions that earlier messages call, by call id.
pub(super) fn message(
    fields: &mut LineFields,
    called: &mut BTreeMap<String, String>,
) -> Result<SampleMessage, LineFault> {
    let role = fields.parse_word("role", &ROLES, "system, user, assistant or tool")?;
    fields.refuse(&REFUSED)?;
    let mut message = SampleMessage::new(role, String::new());
    if role == MessageRole::Assistant {
        reasoning(fields, &mut message)?;
        message.show("tool_calls", tool_data::read_calls(fields, called)?);
    } else {
        fields.refuse(&REASONING)?;
        fields.refuse(&["tool_calls", "function_call"])?;
    }
    if role == MessageRole::Tool {
        let [id, name] = tool_data::read_answered_call(fields, called)?;
        message.show("tool_call_id", id);
        message.show("name", name);
    }
    message.content = match fields.take("content") {
        Some(content) => content_text(fields, content)?,
        // A message that only calls tools has no text.
        None if !message.is_empty() => String::new(),
        None => return Err(LineFault::Missing { field: fields.path("content") }),
    };
    learned_or_not(fields, "content", message)
}

fn reasoning(fields: &mut LineFields, message: &mut SampleMessage) -> Result<(), LineFault> {
    for name in REASONING {
        let path = fields.path(name);
        let Some(text) = fields.text(name)?.filter(|text| !text.is_empty()) else { continue };
        if message.paths.contains_key("reasoning_content") {
            return Err(LineFault::Twice { field: path, other: message.paths["reasoning_content"].clone() });
        }
        message.show("reasoning_content", Some((text.into(), path)));
    }
    Ok(())
}

/// Reads the flag that says whether `message` is learned; `field` is the name of its text field.
pub(super) fn learned_or_not(
    fields: &mut LineFields,
    field: &str,
    mut message: SampleMessage,
) -> Result<SampleMessage, LineFault> {
    let mut read: Option<(&str, bool)> = None;
    for name in LEARNED {
        let Some(flag) = fields.take(name) else { continue };
        let is_learned = match flag.as_bool().map(f64::from).or_else(|| flag.as_f64()) {
            Some(0.0) => false,
            Some(1.0) if message.role == MessageRole::Assistant => true,
            _ => return Err(LineFault::Weight { field: fields.path(name) }),
        };
        match read {
            Some((other, earlier)) if earlier != is_learned => {
                return Err(LineFault::Twice { field: fields.path(name), other: fields.path(other) });
            }
            _ => read = Some((name, is_learned)),
        }
    }
    if let Some((_, is_learned)) = read {
        message.is_learned = is_learned;
    }
    if message.is_learned && message.is_empty() {
        return Err(LineFault::Empty { field: fields.path(field) });
    }
    Ok(message)
}

/// Returns the text of a string or of OpenAI's list of text parts.
fn content_text(fields: &LineFields, value: Value) -> Result<String, LineFault> {
    let path = fields.path("content");
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong(path, "a string or an array of text parts", &other)),
    };
    let mut content = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = fields.at(format!("{path}[{index}]"), part)?;
        if part.required_text("type")? != "text" {
            return Err(LineFault::Unsupported { field: part.path("type") });
        }
        // Some trainers weigh parts; here a message is learned as a whole.
        if let Some(name) = LEARNED.into_iter().find(|name| part.has(name)) {
            return Err(LineFault::Unsupported { field: part.path(name) });
        }
        let part_text = part.required("text")?;
        content.push_str(&text(part.path("text"), part_text)?);
    }
    Ok(content)
}
