//! Prompts without their answers: what a model is asked, so that a draft can learn what it says.

use std::{io, sync::Arc};

use serde_json::{Map, Value};

use super::{
    DataError, Limits, each_line,
    fault::Fault,
    fields::Fields,
    kind::Kind,
    said::kind_of_text,
    sample::{Message, Role, Sample, messages, read, share_gpt},
};

/// A conversation that somebody is to answer: the beginning of one, which it shares with what is asked before and behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The kind of text, as `code`.
    pub kind: String,
    conversation: Arc<[(&'static str, String)]>,
    turns: usize,
}

impl Prompt {
    /// Roles, by the names that chat templates have for them, and what was said.
    #[must_use]
    pub fn messages(&self) -> &[(&'static str, String)] {
        &self.conversation[..self.turns]
    }
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
    let whole = |messages: Vec<Message>| {
        let said = messages.into_iter().map(|it| (it.role.word(), it.content)).collect::<Arc<[_]>>();
        Prompt { kind: of_text.clone(), turns: said.len(), conversation: said }
    };
    let conversation = match kind {
        Kind::Messages => messages("messages", line.required("messages")?)?,
        Kind::ShareGpt => share_gpt(&mut line)?,
        _ => match read(kind, &mut line)? {
            Sample::Conversation(messages) => messages,
            Sample::Comparison { asked, .. } => return Ok(vec![whole(asked)]),
            Sample::Continuation { prompt: text, .. } | Sample::TextComparison { prompt: text, .. }
                if !text.is_empty() =>
            {
                return Ok(vec![whole(vec![Message::asks(text)])]);
            }
            _ => return Err(Fault::NoPrompt),
        },
    };
    let answers = conversation.iter().enumerate().filter(|(_, message)| message.role == Role::Assistant);
    let mut ends: Vec<usize> = answers.map(|(at, _)| at).filter(|at| *at > 0).collect();
    if conversation.last().is_some_and(|last| last.role != Role::Assistant) {
        ends.push(conversation.len());
    }
    if ends.is_empty() {
        return Err(Fault::NoPrompt);
    }
    let whole = whole(conversation);
    Ok(ends.into_iter().map(|turns| Prompt { turns, ..whole.clone() }).collect())
}
