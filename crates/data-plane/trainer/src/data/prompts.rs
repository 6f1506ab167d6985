//! Prompts without their answers, which a teacher model answers so that a draft can learn from it.

use std::{io, sync::Arc};

use serde_json::{Map, Value};

use super::{
    DataError, DataLimits,
    distillation_data::kind_of_text,
    each_line,
    fault::LineFault,
    fields::LineFields,
    kind::DataKind,
    sample::{MessageRole, SampleMessage, TrainingSample, messages, read, share_gpt},
};

/// A conversation to be answered; it shares the messages of its line with longer and shorter prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataPrompt {
    /// Kind of text, such as `code`.
    pub kind: String,
    conversation: Arc<[(&'static str, String)]>,
    turns: usize,
}

impl DataPrompt {
    /// Returns (role, content) pairs, with the role names of chat templates.
    #[must_use]
    pub fn messages(&self) -> &[(&'static str, String)] {
        &self.conversation[..self.turns]
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilePrompts {
    /// Prompts, in the order of their lines.
    Prompts(Vec<DataPrompt>),
    /// The lines already hold answers.
    Answered,
}

/// Returns the prompts of all lines: the messages before each answer of the assistant, and a whole
/// conversation that ends without an answer.
///
/// # Errors
/// Fails as [`read`](super::read) does, and if a line has no prompt.
pub fn prompts(file: impl io::Read, limits: &DataLimits) -> Result<FilePrompts, DataError> {
    let mut prompts = Vec::new();
    let (kind, _) = each_line(file, limits, |_, kind, map| {
        if kind != DataKind::Answers {
            prompts.extend(of_line(kind, map)?);
        }
        Ok(0)
    })?;
    Ok(if kind == DataKind::Answers { FilePrompts::Answered } else { FilePrompts::Prompts(prompts) })
}

fn of_line(kind: DataKind, map: Map<String, Value>) -> Result<Vec<DataPrompt>, LineFault> {
    let mut line = LineFields::of(map);
    let of_text = kind_of_text(&mut line)?;
    let whole = |messages: Vec<SampleMessage>| {
        let said = messages.into_iter().map(|it| (it.role.as_str(), it.content)).collect::<Arc<[_]>>();
        DataPrompt { kind: of_text.clone(), turns: said.len(), conversation: said }
    };
    let conversation = match kind {
        DataKind::Messages => messages("messages", line.required("messages")?)?,
        DataKind::ShareGpt => share_gpt(&mut line)?,
        _ => match read(kind, &mut line)? {
            TrainingSample::Conversation(messages) => messages,
            TrainingSample::Comparison { asked, .. } => return Ok(vec![whole(asked)]),
            TrainingSample::Continuation { prompt: text, .. }
            | TrainingSample::TextComparison { prompt: text, .. }
                if !text.is_empty() =>
            {
                return Ok(vec![whole(vec![SampleMessage::asks(text)])]);
            }
            _ => return Err(LineFault::NoPrompt),
        },
    };
    let answers =
        conversation.iter().enumerate().filter(|(_, message)| message.role == MessageRole::Assistant);
    let mut ends: Vec<usize> = answers.map(|(at, _)| at).filter(|at| *at > 0).collect();
    if conversation.last().is_some_and(|last| last.role != MessageRole::Assistant) {
        ends.push(conversation.len());
    }
    if ends.is_empty() {
        return Err(LineFault::NoPrompt);
    }
    let whole = whole(conversation);
    Ok(ends.into_iter().map(|turns| DataPrompt { turns, ..whole.clone() }).collect())
}
