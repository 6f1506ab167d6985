//! Prompts without their answers, which a teacher model answers so that a draft can learn from it.

use std::{io, path::PathBuf, sync::Arc};

use serde_json::{Map, Value};

use super::{
    DataError, DataLimits,
    distillation_data::kind_of_text,
    each_line,
    fault::LineFault,
    fields::{LineFields, UnreadFields},
    kind::DataKind,
    message::{MessageRole, SampleMessage},
    one_kind, one_source,
    sample::{Conversation, TrainingSample, openai_conversation, read, read_rating, share_gpt},
    source::DataSource,
    sources,
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
    of_sources(one_source(file), limits)
}

/// Returns the prompts of all lines of the files at `paths`.
///
/// # Errors
/// Fails as [`prompts`] does.
pub fn prompts_of_files(paths: &[PathBuf], limits: &DataLimits) -> Result<FilePrompts, DataError> {
    of_sources(sources(paths), limits)
}

fn of_sources<'a>(
    sources: impl Iterator<Item = Result<DataSource<'a>, DataError>>,
    limits: &DataLimits,
) -> Result<FilePrompts, DataError> {
    let (mut prompts, mut kind) = (Vec::new(), None);
    each_line(sources, limits, |_, map| {
        let kind = one_kind(&mut kind, &map)?;
        if kind != DataKind::Answers {
            prompts.extend(of_line(kind, map)?);
        }
        Ok(0)
    })?;
    match kind.ok_or(DataError::Empty)? {
        DataKind::Answers => Ok(FilePrompts::Answered),
        _ => Ok(FilePrompts::Prompts(prompts)),
    }
}

fn of_line(kind: DataKind, map: Map<String, Value>) -> Result<Vec<DataPrompt>, LineFault> {
    let mut line = LineFields::of(map, &UnreadFields::default());
    let of_text = kind_of_text(&mut line)?;
    let whole = |messages: Vec<SampleMessage>| {
        let said = messages.into_iter().map(|it| (it.role.as_str(), it.content)).collect::<Arc<[_]>>();
        DataPrompt { kind: of_text.clone(), turns: said.len(), conversation: said }
    };
    let kind = match kind.unrated() {
        Some(form) => read_rating(&mut line).map(|_| form)?,
        None => kind,
    };
    let conversation = match kind {
        DataKind::Messages => plain(openai_conversation(&mut line)?)?,
        DataKind::ShareGpt => plain(share_gpt(&mut line)?)?,
        _ => match read(kind, &mut line)? {
            TrainingSample::Conversation(conversation) => plain(conversation)?,
            TrainingSample::Comparison { asked, .. } => return Ok(vec![whole(plain(asked)?)]),
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

/// Returns the messages of a conversation that has roles and texts only, as teacher requests send them.
fn plain(Conversation { messages, variables }: Conversation) -> Result<Vec<SampleMessage>, LineFault> {
    let of_message = messages.iter().flat_map(|message| message.paths.values().cloned());
    match of_message.chain(variables.keys().cloned()).next() {
        Some(field) => Err(LineFault::Unsupported { field }),
        None => Ok(messages),
    }
}
