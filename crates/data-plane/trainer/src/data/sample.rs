//! The content of a line, independent of the line's kind.

use serde_json::Value;

use super::{
    distillation_data::DistillationSamples,
    fault::LineFault,
    fields::{LineFields, learned, text, wrong},
    kind::DataKind,
};

/// Maximum number of messages in a conversation, as in the gateway.
const MAX_MESSAGES: usize = 4096;

/// Fields of a line and of a message that the chat template would show to the model.
const SHOWN_IN_LINE: [&str; 4] = ["tools", "functions", "documents", "images"];
const SHOWN_IN_MESSAGE: [&str; 4] = ["tool_calls", "function_call", "reasoning_content", "audio"];

const ROLES: [(&str, MessageRole); 5] = [
    ("system", MessageRole::System),
    // OpenAI's newer name for the system role.
    ("developer", MessageRole::System),
    ("user", MessageRole::User),
    ("assistant", MessageRole::Assistant),
    ("tool", MessageRole::Tool),
];
const SHARE_GPT_ROLES: [(&str, MessageRole); 6] = [
    ("system", MessageRole::System),
    ("human", MessageRole::User),
    ("user", MessageRole::User),
    ("gpt", MessageRole::Assistant),
    ("assistant", MessageRole::Assistant),
    ("tool", MessageRole::Tool),
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SampleMessage {
    pub(super) role: MessageRole,
    pub(super) content: String,
    /// True only for messages of the assistant.
    pub(super) is_learned: bool,
}

impl SampleMessage {
    fn new(role: MessageRole, content: String) -> Self {
        Self { role, content, is_learned: role == MessageRole::Assistant }
    }

    pub(super) fn asks(content: String) -> Self {
        Self::new(MessageRole::User, content)
    }
}

#[derive(Debug, PartialEq)]
pub(super) enum TrainingSample {
    /// Learns the assistant's messages, of which there is at least one.
    Conversation(Vec<SampleMessage>),
    Continuation {
        prompt: String,
        completion: String,
    },
    Text(String),
    /// Learns which of two answers to a conversation is better.
    Comparison {
        asked: Vec<SampleMessage>,
        chosen: String,
        rejected: String,
    },
    /// Learns which of two continuations of a text is better.
    TextComparison {
        prompt: String,
        chosen: String,
        rejected: String,
    },
    /// Recorded answers of a model to a conversation.
    Answered {
        asked: Vec<SampleMessage>,
        answers: DistillationSamples,
    },
}

/// Reads a line of the given kind.
pub(super) fn read(kind: DataKind, line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    line.refuse(&SHOWN_IN_LINE)?;
    match kind {
        DataKind::Text => Ok(TrainingSample::Text(learned("text", line.required("text")?)?)),
        DataKind::PromptCompletion => prompt_completion(line),
        DataKind::Alpaca => alpaca(line),
        DataKind::Messages => conversation(messages("messages", line.required("messages")?)?),
        DataKind::Answers => {
            let asked = messages("messages", line.required("messages")?)?;
            Ok(TrainingSample::Answered { asked, answers: DistillationSamples::read(line)? })
        }
        DataKind::ShareGpt => conversation(share_gpt(line)?),
        DataKind::Preference => preference(line),
        DataKind::OpenAiPreference => openai_preference(line),
    }
}

fn conversation(messages: Vec<SampleMessage>) -> Result<TrainingSample, LineFault> {
    if messages.iter().any(|message| message.is_learned) {
        Ok(TrainingSample::Conversation(messages))
    } else {
        Err(LineFault::NothingToLearn)
    }
}

fn prompt_completion(line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    let (prompt, completion) = (line.required("prompt")?, line.required("completion")?);
    if prompt.is_array() {
        let mut conversed = messages("prompt", prompt)?;
        conversed.iter_mut().for_each(|message| message.is_learned = false);
        conversed.extend(messages("completion", completion)?);
        return conversation(conversed);
    }
    let prompt = text("prompt".to_owned(), prompt)?;
    let completion = learned("completion", completion)?;
    Ok(TrainingSample::Continuation { prompt, completion })
}

/// Alpaca's own text around instruction and input was for a model without a chat template, so it is left out.
fn alpaca(line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    let instruction = line.required_text("instruction")?;
    let asked = match line.text("input")? {
        Some(input) if !input.is_empty() => format!("{instruction}\n\n{input}"),
        _ => instruction,
    };
    let answer = learned("output", line.required("output")?)?;
    conversation(vec![
        SampleMessage::new(MessageRole::User, asked),
        SampleMessage::new(MessageRole::Assistant, answer),
    ])
}

pub(super) fn share_gpt(line: &mut LineFields) -> Result<Vec<SampleMessage>, LineFault> {
    let value = line.required("conversations")?;
    each("conversations", value, |mut fields| {
        let role = fields.parse_word("from", &SHARE_GPT_ROLES, "system, human, gpt or tool")?;
        let value = fields.required_text("value")?;
        finished(role, value, "value", &mut fields)
    })
}

fn preference(line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    let (chosen, rejected) = (line.required("chosen")?, line.required("rejected")?);
    if !chosen.is_array() {
        let prompt = line.text("prompt")?.unwrap_or_default();
        let (chosen, rejected) = (learned("chosen", chosen)?, learned("rejected", rejected)?);
        return if chosen == rejected {
            Err(LineFault::SameAnswers)
        } else {
            Ok(TrainingSample::TextComparison { prompt, chosen, rejected })
        };
    }
    let (chosen, rejected) = (messages("chosen", chosen)?, messages("rejected", rejected)?);
    let asked = match line.take("prompt") {
        None => Vec::new(),
        // Beside whole conversations, `prompt` repeats the first user message.
        Some(Value::String(prompt)) => match chosen.first() {
            Some(first) if first.role != MessageRole::Assistant => Vec::new(),
            _ => vec![SampleMessage::new(MessageRole::User, prompt)],
        },
        Some(asked) => messages("prompt", asked)?,
    };
    comparison(asked, chosen, rejected)
}

fn openai_preference(line: &mut LineFields) -> Result<TrainingSample, LineFault> {
    let mut input = LineFields::at("input".to_owned(), line.required("input")?)?;
    input.refuse(&SHOWN_IN_LINE)?;
    let asked = input.required("messages")?;
    let asked = messages("input.messages", asked)?;
    let chosen = messages("preferred_output", line.required("preferred_output")?)?;
    let rejected = messages("non_preferred_output", line.required("non_preferred_output")?)?;
    comparison(asked, chosen, rejected)
}

/// Compares two answers, from conversations that may both begin with the messages they answer.
fn comparison(
    mut asked: Vec<SampleMessage>,
    mut chosen: Vec<SampleMessage>,
    mut rejected: Vec<SampleMessage>,
) -> Result<TrainingSample, LineFault> {
    let (Some(better), Some(worse)) = (chosen.pop(), rejected.pop()) else {
        return Err(LineFault::NoComparison);
    };
    let answers = better.role == MessageRole::Assistant && worse.role == MessageRole::Assistant;
    if !answers || chosen != rejected {
        return Err(LineFault::NoComparison);
    }
    if better.content == worse.content {
        return Err(LineFault::SameAnswers);
    }
    asked.append(&mut chosen);
    Ok(TrainingSample::Comparison { asked, chosen: better.content, rejected: worse.content })
}

/// Reads the messages at `path` in OpenAI's format.
pub(super) fn messages(path: &str, value: Value) -> Result<Vec<SampleMessage>, LineFault> {
    each(path, value, |mut fields| {
        let role = fields.parse_word("role", &ROLES, "system, user, assistant or tool")?;
        fields.refuse(&SHOWN_IN_MESSAGE)?;
        let content = fields.required("content")?;
        let content = content_text(fields.path("content"), content)?;
        finished(role, content, "content", &mut fields)
    })
}

/// Reads a list of at least one item.
fn each(
    path: &str,
    value: Value,
    read: impl Fn(LineFields) -> Result<SampleMessage, LineFault>,
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
    items.map(|(index, item)| read(LineFields::at(format!("{path}[{index}]"), item)?)).collect()
}

/// Makes a message with its weight; `field` is the name of its text field.
fn finished(
    role: MessageRole,
    content: String,
    field: &str,
    fields: &mut LineFields,
) -> Result<SampleMessage, LineFault> {
    let mut message = SampleMessage::new(role, content);
    if let Some(weight) = fields.take("weight") {
        message.is_learned = match weight.as_f64() {
            Some(0.0) => false,
            Some(1.0) if role == MessageRole::Assistant => true,
            _ => return Err(LineFault::Weight { field: fields.path("weight") }),
        };
    }
    if message.is_learned && message.content.is_empty() {
        return Err(LineFault::Empty { field: fields.path(field) });
    }
    Ok(message)
}

/// Returns the text of a string or of OpenAI's list of text parts.
fn content_text(path: String, value: Value) -> Result<String, LineFault> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong(path, "a string or an array of text parts", &other)),
    };
    let mut content = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = LineFields::at(format!("{path}[{index}]"), part)?;
        if part.required_text("type")? != "text" {
            return Err(LineFault::Unsupported { field: part.path("type") });
        }
        content.push_str(&part.required_text("text")?);
    }
    Ok(content)
}
