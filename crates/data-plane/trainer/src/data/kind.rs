//! What a line is, told by the names of its fields.

use std::fmt;

use serde_json::{Map, Value};

/// A form that training data come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataKind {
    /// `chosen` and `rejected`, perhaps with `prompt`: TRL's preferences.
    Preference,
    /// `input`, `preferred_output` and `non_preferred_output`: OpenAI's preferences.
    OpenAiPreference,
    /// `messages` and `answers`: what a model said, for a draft of it.
    Answers,
    /// `messages`: OpenAI's and TRL's conversations.
    Messages,
    /// `conversations` of `from` and `value`: ShareGPT's.
    ShareGpt,
    /// `prompt` and `completion`.
    PromptCompletion,
    /// `instruction` and `output`, perhaps with `input`: Alpaca's.
    Alpaca,
    /// `text`.
    Text,
}

/// Each kind with the fields that make it. Files often carry a second form of the same (`messages` beside `chosen`, `prompt`
/// beside `messages`), so the first that fits counts, the more telling before the less.
const KINDS: [(DataKind, &[&str]); 8] = [
    (DataKind::Preference, &["chosen", "rejected"]),
    (DataKind::OpenAiPreference, &["input", "preferred_output", "non_preferred_output"]),
    (DataKind::Answers, &["messages", "answers"]),
    (DataKind::Messages, &["messages"]),
    (DataKind::ShareGpt, &["conversations"]),
    (DataKind::PromptCompletion, &["prompt", "completion"]),
    (DataKind::Alpaca, &["instruction", "output"]),
    (DataKind::Text, &["text"]),
];

impl DataKind {
    /// The kind of a line; `None` if its fields make none.
    pub(super) fn of(line: &Map<String, Value>) -> Option<Self> {
        KINDS.into_iter().map(|(kind, _)| kind).find(|kind| kind.fits(line))
    }

    /// True if the line has the fields of this kind.
    pub(super) fn fits(self, line: &Map<String, Value>) -> bool {
        self.fields().iter().all(|field| line.contains_key(*field))
    }

    /// What its lines are, in a word or two.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preference | Self::OpenAiPreference => "preferences",
            Self::Answers => "answers",
            Self::Messages | Self::ShareGpt => "conversations",
            Self::PromptCompletion => "prompts and completions",
            Self::Alpaca => "instructions",
            Self::Text => "text",
        }
    }

    fn fields(self) -> &'static [&'static str] {
        KINDS.iter().find(|(kind, _)| *kind == self).map_or(&[], |(_, fields)| fields)
    }
}

impl fmt::Display for DataKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, field) in self.fields().iter().enumerate() {
            write!(f, "{}'{field}'", if index > 0 { " and " } else { "" })?;
        }
        Ok(())
    }
}

/// Every kind by its fields, for messages.
pub(super) fn all() -> String {
    KINDS.map(|(kind, _)| kind.to_string()).join(", or ")
}
