//! Prompts that the adapter in training answers itself, for a reward to judge the answers.
//!
//! A line holds a prompt in one of the fields of [`PROMPT_FIELDS`]. All other fields belong to the reward.

use serde_json::{Map, Value};

use super::{
    fault::{LineFault, names},
    fields::{LineFields, UnreadFields, wrong},
    kind::PROMPT_FIELDS,
    message::{MessageRole, SampleMessage, messages},
    sample::{self, Conversation},
};

/// A prompt and its line of the data.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutItem {
    /// Line of the file, from 1.
    pub line: usize,
    /// At least one token.
    pub tokens: Vec<u32>,
    /// Name of the field with the prompt.
    pub field: &'static str,
    /// All fields of the line.
    pub row: Map<String, Value>,
}

/// A prompt, before it is encoded.
pub(super) enum RolloutPromptText {
    /// Text that the model continues.
    Text(String),
    /// A conversation that the model answers.
    Conversation(Conversation),
}

/// Returns the field of a line that holds a prompt, and the prompt.
pub(super) fn prompt_of(row: &Map<String, Value>) -> Result<(&'static str, RolloutPromptText), LineFault> {
    let field = PROMPT_FIELDS.into_iter().find(|field| row.get(*field).is_some_and(|value| !value.is_null()));
    let field = field.ok_or_else(|| LineFault::NoRolloutPrompt { found: names(row) })?;
    let mut line = LineFields::of(row.clone(), &UnreadFields::default());
    line.refuse(&sample::REFUSED)?;
    let conversation = match field {
        "messages" => sample::openai_conversation(&mut line)?,
        "conversations" => sample::share_gpt(&mut line)?,
        "prompt" => match line.required(field)? {
            list @ Value::Array(_) => {
                let asked = messages(&line, field, list)?;
                sample::in_context(&mut line, asked)?
            }
            Value::String(asked) => {
                sample::refuse_shown(&mut line)?;
                return Ok((field, RolloutPromptText::Text(asked)));
            }
            other => return Err(wrong(field.to_owned(), "a string or an array of messages", &other)),
        },
        _ => sample::question(&mut line, field)?,
    };
    Ok((field, RolloutPromptText::Conversation(without_last_answer(conversation)?)))
}

/// Removes answers at the end of a conversation, which the model is to give itself.
fn without_last_answer(mut conversation: Conversation) -> Result<Conversation, LineFault> {
    let is_answer = |message: &SampleMessage| message.role == MessageRole::Assistant;
    while conversation.messages.pop_if(|last| is_answer(last)).is_some() {}
    if conversation.messages.is_empty() { Err(LineFault::NoPrompt) } else { Ok(conversation) }
}
