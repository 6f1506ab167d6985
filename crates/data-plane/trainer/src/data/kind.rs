//! The kinds of lines, recognised by the names of their fields.

use std::fmt;

use control_protocol::training::spec::TrainingMethod;
use serde_json::{Map, Value};

use super::rating;

/// Format of training data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataKind {
    /// `chosen` and `rejected`, optionally with `prompt`: TRL's preferences.
    Preference,
    /// `input`, `preferred_output` and `non_preferred_output`: OpenAI's preferences.
    OpenAiPreference,
    /// `messages` and `answers`: recorded answers of a model, for a draft.
    Answers,
    /// `messages` and a rating of the last answer: LLaMA-Factory's.
    RatedMessages,
    /// `conversations` and a rating of the last answer: LLaMA-Factory's.
    RatedShareGpt,
    /// `prompt`, `completion` and a rating: TRL's unpaired preferences.
    RatedCompletion,
    /// `instruction`, `output` and a rating: LLaMA-Factory's.
    RatedAlpaca,
    /// `messages`: OpenAI's and TRL's conversations.
    Messages,
    /// `conversations` of `from` and `value`: ShareGPT's.
    ShareGpt,
    /// Prompts with `prompt` and `completion`.
    PromptCompletion,
    /// `instruction` and `output`, optionally with `input`: Alpaca's.
    Alpaca,
    /// `question` and `response`, optionally with `system_prompt`: OpenOrca's.
    Question,
    /// Text in the field `text`.
    Text,
    /// Prompts that the adapter in training answers; no line has this kind by its fields.
    Prompts,
}

/// Each kind with its required fields. Files often hold two forms of the same data (`messages` beside
/// `chosen`, `prompt` beside `messages`), so the first kind that fits counts, specific kinds first.
const KINDS: [(DataKind, &[&str]); 13] = [
    (DataKind::Preference, &["chosen", "rejected"]),
    (DataKind::OpenAiPreference, &["input", "preferred_output", "non_preferred_output"]),
    (DataKind::Answers, &["messages", "answers"]),
    (DataKind::RatedMessages, &["messages"]),
    (DataKind::RatedShareGpt, &["conversations"]),
    (DataKind::RatedCompletion, &["prompt", "completion"]),
    (DataKind::RatedAlpaca, &["instruction", "output"]),
    (DataKind::Messages, &["messages"]),
    (DataKind::ShareGpt, &["conversations"]),
    (DataKind::PromptCompletion, &["prompt", "completion"]),
    (DataKind::Alpaca, &["instruction", "output"]),
    (DataKind::Question, &["question", "response"]),
    (DataKind::Text, &["text"]),
];

impl DataKind {
    /// Returns the kind of a line; `None` if its fields fit no kind.
    pub(super) fn of(line: &Map<String, Value>) -> Option<Self> {
        let is_rated = rating::is_rated(line);
        let mut kinds = KINDS.into_iter().map(|(kind, _)| kind);
        kinds.find(|kind| kind.has_fields(line) && (is_rated || kind.unrated().is_none()))
    }

    /// True if the line has the fields of this kind, and is rated only in a file of ratings.
    pub(super) fn fits(self, line: &Map<String, Value>) -> bool {
        let is_right = match self {
            Self::Messages | Self::ShareGpt | Self::PromptCompletion | Self::Alpaca => {
                !rating::is_rated(line)
            }
            // A line with a wrong rating is refused for that.
            _ => self.unrated().is_none() || rating::has_field(line),
        };
        is_right && self.has_fields(line)
    }

    fn has_fields(self, line: &Map<String, Value>) -> bool {
        self.fields().iter().all(|field| line.contains_key(*field))
    }

    /// Returns the kind of a rated line without its rating; `None` for other kinds.
    pub(super) fn unrated(self) -> Option<Self> {
        match self {
            Self::RatedMessages => Some(Self::Messages),
            Self::RatedShareGpt => Some(Self::ShareGpt),
            Self::RatedCompletion => Some(Self::PromptCompletion),
            Self::RatedAlpaca => Some(Self::Alpaca),
            _ => None,
        }
    }

    /// Returns the name of the kind in events.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preference | Self::OpenAiPreference => "preferences",
            Self::RatedMessages | Self::RatedShareGpt | Self::RatedCompletion | Self::RatedAlpaca => {
                "single ratings"
            }
            Self::Answers => "answers",
            Self::Messages | Self::ShareGpt => "conversations",
            Self::PromptCompletion => "prompts and completions",
            Self::Alpaca | Self::Question => "instructions",
            Self::Text => "text",
            Self::Prompts => "prompts",
        }
    }

    /// Returns the method that learns from lines of this kind; `None` for a draft's data.
    #[must_use]
    pub fn method(self) -> Option<TrainingMethod> {
        match self {
            Self::Preference | Self::OpenAiPreference => Some(TrainingMethod::Dpo),
            Self::Answers => None,
            Self::Prompts => Some(TrainingMethod::Grpo),
            _ if self.unrated().is_some() => Some(TrainingMethod::Kto),
            _ => Some(TrainingMethod::Sft),
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
        if self.unrated().is_some() { write!(f, " and '{}'", rating::FIELDS[0]) } else { Ok(()) }
    }
}

/// Fields that hold a prompt for answers with rewards; of several, the first one counts.
pub(super) const PROMPT_FIELDS: [&str; 5] =
    ["prompt", "messages", "conversations", "question", "instruction"];

/// Returns a list of [`PROMPT_FIELDS`], for messages.
pub(super) fn prompt_fields() -> String {
    PROMPT_FIELDS.map(|field| format!("'{field}'")).join(", ")
}

/// Returns a list of all kinds with their fields, for messages.
pub(super) fn all() -> String {
    let kinds = KINDS.iter().filter(|(kind, _)| kind.unrated().is_none());
    let kinds: Vec<String> = kinds.map(|(kind, _)| kind.to_string()).collect();
    format!("{}; a rating is '{}' beside an answer", kinds.join(", or "), rating::FIELDS[0])
}
