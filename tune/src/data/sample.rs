//! What a line means, whatever its form was.

use serde_json::Value;

use super::{
    fault::Fault,
    fields::{Fields, learned, text, wrong},
    kind::Kind,
    said::Answers,
};

/// Most messages of a conversation, as the gateway has it.
const MAX_MESSAGES: usize = 4096;

/// Fields of a line and of a message that the chat template would show to the model.
const SHOWN_IN_LINE: [&str; 4] = ["tools", "functions", "documents", "images"];
const SHOWN_IN_MESSAGE: [&str; 4] = ["tool_calls", "function_call", "reasoning_content", "audio"];

const ROLES: [(&str, Role); 5] = [
    ("system", Role::System),
    // OpenAI's newer name for the same thing.
    ("developer", Role::System),
    ("user", Role::User),
    ("assistant", Role::Assistant),
    ("tool", Role::Tool),
];
const SHARE_GPT_ROLES: [(&str, Role); 6] = [
    ("system", Role::System),
    ("human", Role::User),
    ("user", Role::User),
    ("gpt", Role::Assistant),
    ("assistant", Role::Assistant),
    ("tool", Role::Tool),
];

/// Who said something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// As chat templates call it.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) role: Role,
    pub(super) content: String,
    /// Only ever true of the assistant's.
    pub(super) is_learned: bool,
}

impl Message {
    fn new(role: Role, content: String) -> Self {
        Self { role, content, is_learned: role == Role::Assistant }
    }

    /// What a user asks.
    pub(super) fn asks(content: String) -> Self {
        Self::new(Role::User, content)
    }
}

/// Something to learn.
#[derive(Debug, PartialEq)]
pub(super) enum Sample {
    /// What the assistant said in it, at least once.
    Conversation(Vec<Message>),
    /// What follows a text.
    Continuation { prompt: String, completion: String },
    /// All of a text.
    Text(String),
    /// That of two answers to a conversation one is better.
    Comparison { asked: Vec<Message>, chosen: String, rejected: String },
    /// That of two texts behind a text one is better.
    TextComparison { prompt: String, chosen: String, rejected: String },
    /// What a model said to a conversation.
    Answered { asked: Vec<Message>, answers: Answers },
}

/// Reads a line of a kind.
pub(super) fn read(kind: Kind, line: &mut Fields) -> Result<Sample, Fault> {
    line.refuse(&SHOWN_IN_LINE)?;
    match kind {
        Kind::Text => Ok(Sample::Text(learned("text", line.required("text")?)?)),
        Kind::PromptCompletion => prompt_completion(line),
        Kind::Alpaca => alpaca(line),
        Kind::Messages => conversation(messages("messages", line.required("messages")?)?),
        Kind::Answers => {
            let asked = messages("messages", line.required("messages")?)?;
            Ok(Sample::Answered { asked, answers: Answers::read(line)? })
        }
        Kind::ShareGpt => conversation(share_gpt(line)?),
        Kind::Preference => preference(line),
        Kind::OpenAiPreference => openai_preference(line),
    }
}

fn conversation(messages: Vec<Message>) -> Result<Sample, Fault> {
    if messages.iter().any(|message| message.is_learned) {
        Ok(Sample::Conversation(messages))
    } else {
        Err(Fault::NothingToLearn)
    }
}

fn prompt_completion(line: &mut Fields) -> Result<Sample, Fault> {
    let (prompt, completion) = (line.required("prompt")?, line.required("completion")?);
    if prompt.is_array() {
        let mut conversed = messages("prompt", prompt)?;
        conversed.iter_mut().for_each(|message| message.is_learned = false);
        conversed.extend(messages("completion", completion)?);
        return conversation(conversed);
    }
    let prompt = text("prompt".to_owned(), prompt)?;
    let completion = learned("completion", completion)?;
    Ok(Sample::Continuation { prompt, completion })
}

/// Alpaca's own text around instruction and input belonged to a model without a chat template.
fn alpaca(line: &mut Fields) -> Result<Sample, Fault> {
    let instruction = line.required_text("instruction")?;
    let asked = match line.text("input")? {
        Some(input) if !input.is_empty() => format!("{instruction}\n\n{input}"),
        _ => instruction,
    };
    let answer = learned("output", line.required("output")?)?;
    conversation(vec![Message::new(Role::User, asked), Message::new(Role::Assistant, answer)])
}

pub(super) fn share_gpt(line: &mut Fields) -> Result<Vec<Message>, Fault> {
    let value = line.required("conversations")?;
    each("conversations", value, |mut fields| {
        let role = fields.word("from", &SHARE_GPT_ROLES, "system, human, gpt or tool")?;
        let value = fields.required_text("value")?;
        finished(role, value, "value", &mut fields)
    })
}

fn preference(line: &mut Fields) -> Result<Sample, Fault> {
    let (chosen, rejected) = (line.required("chosen")?, line.required("rejected")?);
    if !chosen.is_array() {
        let prompt = line.text("prompt")?.unwrap_or_default();
        let (chosen, rejected) = (learned("chosen", chosen)?, learned("rejected", rejected)?);
        return if chosen == rejected {
            Err(Fault::SameAnswers)
        } else {
            Ok(Sample::TextComparison { prompt, chosen, rejected })
        };
    }
    let (chosen, rejected) = (messages("chosen", chosen)?, messages("rejected", rejected)?);
    let asked = match line.take("prompt") {
        None => Vec::new(),
        // Beside whole conversations, `prompt` repeats the first thing that was asked.
        Some(Value::String(prompt)) => match chosen.first() {
            Some(first) if first.role != Role::Assistant => Vec::new(),
            _ => vec![Message::new(Role::User, prompt)],
        },
        Some(asked) => messages("prompt", asked)?,
    };
    comparison(asked, chosen, rejected)
}

fn openai_preference(line: &mut Fields) -> Result<Sample, Fault> {
    let mut input = Fields::at("input".to_owned(), line.required("input")?)?;
    input.refuse(&SHOWN_IN_LINE)?;
    let asked = input.required("messages")?;
    let asked = messages("input.messages", asked)?;
    let chosen = messages("preferred_output", line.required("preferred_output")?)?;
    let rejected = messages("non_preferred_output", line.required("non_preferred_output")?)?;
    comparison(asked, chosen, rejected)
}

/// Two answers, from conversations that may both begin with what they answer.
fn comparison(
    mut asked: Vec<Message>,
    mut chosen: Vec<Message>,
    mut rejected: Vec<Message>,
) -> Result<Sample, Fault> {
    let (Some(better), Some(worse)) = (chosen.pop(), rejected.pop()) else {
        return Err(Fault::NoComparison);
    };
    let answers = better.role == Role::Assistant && worse.role == Role::Assistant;
    if !answers || chosen != rejected {
        return Err(Fault::NoComparison);
    }
    if better.content == worse.content {
        return Err(Fault::SameAnswers);
    }
    asked.append(&mut chosen);
    Ok(Sample::Comparison { asked, chosen: better.content, rejected: worse.content })
}

/// The messages at `path`, as OpenAI has them.
pub(super) fn messages(path: &str, value: Value) -> Result<Vec<Message>, Fault> {
    each(path, value, |mut fields| {
        let role = fields.word("role", &ROLES, "system, user, assistant or tool")?;
        fields.refuse(&SHOWN_IN_MESSAGE)?;
        let content = fields.required("content")?;
        let content = content_text(fields.path("content"), content)?;
        finished(role, content, "content", &mut fields)
    })
}

/// At least one item, each read from its fields.
fn each(
    path: &str,
    value: Value,
    read: impl Fn(Fields) -> Result<Message, Fault>,
) -> Result<Vec<Message>, Fault> {
    let items = match value {
        Value::Array(items) => items,
        other => return Err(wrong(path.to_owned(), "an array of messages", &other)),
    };
    if items.is_empty() {
        return Err(Fault::Empty { field: path.to_owned() });
    }
    if items.len() > MAX_MESSAGES {
        return Err(Fault::TooManyMessages { field: path.to_owned(), limit: MAX_MESSAGES });
    }
    let items = items.into_iter().enumerate();
    items.map(|(index, item)| read(Fields::at(format!("{path}[{index}]"), item)?)).collect()
}

/// A message with its weight; `field` is where its text was.
fn finished(role: Role, content: String, field: &str, fields: &mut Fields) -> Result<Message, Fault> {
    let mut message = Message::new(role, content);
    if let Some(weight) = fields.take("weight") {
        message.is_learned = match weight.as_f64() {
            Some(0.0) => false,
            Some(1.0) if role == Role::Assistant => true,
            _ => return Err(Fault::Weight { field: fields.path("weight") }),
        };
    }
    if message.is_learned && message.content.is_empty() {
        return Err(Fault::Empty { field: fields.path(field) });
    }
    Ok(message)
}

/// A string, or OpenAI's list of text parts.
fn content_text(path: String, value: Value) -> Result<String, Fault> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong(path, "a string or an array of text parts", &other)),
    };
    let mut content = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::at(format!("{path}[{index}]"), part)?;
        if part.required_text("type")? != "text" {
            return Err(Fault::Unsupported { field: part.path("type") });
        }
        content.push_str(&part.required_text("text")?);
    }
    Ok(content)
}
