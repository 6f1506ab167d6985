//! Prompts that the adapter in training answers itself, for a reward to judge the answers.
//!
//! A line holds a prompt in one of the fields of [`PROMPTS`]. All other fields belong to the reward.

use serde_json::{Map, Value};

use super::{
    DataError, DataItems, DataKind, DataLimits, Dataset, Encoder, each_line,
    fault::{LineFault, names},
    fields::{LineFields, UnreadFields, wrong},
    message::{MessageRole, SampleMessage, messages},
    sample::{self, Conversation},
    source::DataSource,
};

/// Fields that hold a prompt; of several, the first one counts.
const PROMPTS: [&str; 5] = ["prompt", "messages", "conversations", "question", "instruction"];

/// Returns a list of the fields that hold a prompt, for messages.
pub(super) fn fields() -> String {
    PROMPTS.map(|field| format!("'{field}'")).join(", ")
}

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

/// Reads prompts from `sources`. The rewards read the other fields, so no field counts as unread.
pub(super) fn read<'a>(
    sources: impl Iterator<Item = Result<DataSource<'a>, DataError>>,
    encoder: &Encoder<'_>,
    limits: &DataLimits,
) -> Result<Dataset, DataError> {
    let mut items = Vec::new();
    let hash = each_line(sources, limits, |line, row| {
        let (field, prompt) = prompt_of(&row)?;
        let tokens = encoder.rollout_prompt(line, &prompt, limits.max_tokens)?;
        let count = tokens.len();
        items.push(RolloutItem { line, tokens, field, row });
        Ok(count)
    })?;
    if items.is_empty() {
        return Err(DataError::Empty);
    }
    Ok(Dataset { kind: DataKind::Prompts, items: DataItems::Prompts(items), hash, unread: Vec::new() })
}

fn prompt_of(row: &Map<String, Value>) -> Result<(&'static str, RolloutPromptText), LineFault> {
    let field = PROMPTS.into_iter().find(|field| row.get(*field).is_some_and(|value| !value.is_null()));
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
