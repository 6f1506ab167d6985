//! Prompts without their answers: what a model is asked, so that a draft can learn what it says.

use std::io;

use serde_json::{Map, Value};

use super::{
    DataError, Limits, each_line,
    fault::Fault,
    fields::Fields,
    kind::Kind,
    said::kind_of_text,
    sample::{Message, Role, Sample, messages, read, share_gpt},
};

/// A conversation that somebody is to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The kind of text, as `code`.
    pub kind: String,
    /// Roles, by the names that chat templates have for them, and what was said.
    pub messages: Vec<(&'static str, String)>,
}

/// What a file asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// These, in the order of their lines.
    Prompts(Vec<Prompt>),
    /// Nothing more: its lines are answers already.
    Answered,
}

/// The prompts of the lines that `file` gives: what comes before each answer of the assistant; of a conversation without one,
/// all of it.
///
/// # Errors
/// As [`read`](super::read), and of lines that ask nothing.
pub fn prompts(file: impl io::Read, limits: &Limits) -> Result<Asked, DataError> {
    let mut prompts = Vec::new();
    let (kind, _) = each_line(file, limits, |_, kind, map| {
        if kind != Kind::Answers {
            prompts.extend(of_line(kind, map)?);
        }
        Ok(0)
    })?;
    Ok(if kind == Kind::Answers { Asked::Answered } else { Asked::Prompts(prompts) })
}

fn of_line(kind: Kind, map: Map<String, Value>) -> Result<Vec<Prompt>, Fault> {
    let mut line = Fields::of(map);
    let of_text = kind_of_text(&mut line)?;
    let prompt = |messages: &[Message]| Prompt {
        kind: of_text.clone(),
        messages: messages.iter().map(|it| (it.role.word(), it.content.clone())).collect(),
    };
    let conversation = match kind {
        Kind::Messages => messages("messages", line.required("messages")?)?,
        Kind::ShareGpt => share_gpt(&mut line)?,
        _ => match read(kind, &mut line)? {
            Sample::Conversation(messages) => messages,
            Sample::Comparison { asked, .. } => return Ok(vec![prompt(&asked)]),
            Sample::Continuation { prompt: text, .. } | Sample::TextComparison { prompt: text, .. }
                if !text.is_empty() =>
            {
                return Ok(vec![prompt(&[Message::asks(text)])]);
            }
            _ => return Err(Fault::NoPrompt),
        },
    };
    let answers = conversation.iter().enumerate().filter(|(_, message)| message.role == Role::Assistant);
    let asked: Vec<Prompt> =
        answers.filter(|(at, _)| *at > 0).map(|(at, _)| prompt(&conversation[..at])).collect();
    match conversation.last() {
        Some(last) if last.role != Role::Assistant => {
            Ok(asked.into_iter().chain([prompt(&conversation)]).collect())
        }
        _ if asked.is_empty() => Err(Fault::NoPrompt),
        _ => Ok(asked),
    }
}
