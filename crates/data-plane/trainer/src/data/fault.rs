//! Errors of training data.

use std::{fmt, io, path::PathBuf};

use serde_json::{Map, Value};
use text::{chat::SplitPromptError, tokenizer::EncodeError};

use super::kind::{self, DataKind};

/// Maximum number of faults in a message; the rest is only counted.
pub const MAX_FAULTS_SHOWN: usize = 20;

/// Maximum bytes of user text that a message repeats.
const SHOWN_BYTES: usize = 40;

/// Reason why a file cannot be used for training.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("cannot read {}: {source}; check its path and permissions", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "{} names no data file for training; give files that end with .jsonl, .json, .parquet or .arrow",
        path.display()
    )]
    NoFiles { path: PathBuf },
    #[error("the data are more than {limit} files; join them")]
    TooManyFiles { limit: usize },
    /// A stream without a path cannot be read.
    #[error("cannot read the data: {0}")]
    Stream(#[source] io::Error),
    #[error("the data are empty; write one JSON object a line into the file")]
    Empty,
    #[error("the file has more than {limit} lines; split it")]
    TooManyLines { limit: usize },
    #[error("with line {line} the file has more than {limit} tokens; split it")]
    TooManyTokens {
        /// The line that exceeds the limit.
        line: usize,
        limit: usize,
    },
    #[error("{}", ProblemList { problems, count: *count })]
    Problems {
        /// The first faults, at most `MAX_FAULTS_SHOWN`.
        problems: Vec<Problem>,
        /// Number of all faulty lines.
        count: usize,
    },
}

/// A fault and its line.
#[derive(Debug)]
pub struct Problem {
    /// Path of the file, if there are several files.
    pub file: Option<String>,
    /// Number of the line in its file, from 1.
    pub line: usize,
    pub fault: LineFault,
}

struct ProblemList<'a> {
    problems: &'a [Problem],
    count: usize,
}

impl fmt::Display for ProblemList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = if self.count == 1 { "line is" } else { "lines are" };
        write!(f, "{} {lines} wrong, so nothing was trained:", self.count)?;
        for Problem { file, line, fault } in self.problems {
            let file = file.as_deref().map(|file| format!("{file}, ")).unwrap_or_default();
            write!(f, "\n  {file}line {line}: {fault}")?;
        }
        match self.count - self.problems.len() {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

/// Fault of a line.
#[derive(Debug, thiserror::Error)]
pub enum LineFault {
    #[error("it has more than {limit} bytes; shorten or split it")]
    LineTooLong { limit: usize },
    #[error("byte {at} is not UTF-8; save the file as UTF-8")]
    Utf8 {
        /// Position of the byte in the line, from 1.
        at: usize,
    },
    /// The line is blank, but lines follow it.
    #[error("it is blank; remove it")]
    Blank,
    /// The line is not JSON, or an object has the same name twice.
    #[error("not JSON: {0}; write one whole JSON object on the line")]
    Json(String),
    #[error("it must be a JSON object")]
    NoObject,
    #[error("it has {found}; a line needs {}", kind::all())]
    UnknownKind {
        /// Names of the line's fields.
        found: String,
    },
    #[error("the previous lines have {expected}, but this one has {found}; use lines of one kind in a file")]
    OtherKind {
        /// Kind of the file.
        expected: DataKind,
        /// Kind of the line.
        found: DataKind,
    },
    #[error("'{field}' is missing; add it")]
    Missing {
        /// Path of the field in the line.
        field: String,
    },
    #[error("'{field}' must be {expected}, not {found}")]
    WrongType {
        /// Path of the field in the line.
        field: String,
        /// Name of the allowed type.
        expected: &'static str,
        /// Type of the value.
        found: &'static str,
    },
    /// A field would change the prompt that the model sees.
    #[error("'{field}' is not supported; remove the field or the line")]
    Unsupported {
        /// Path of the field in the line.
        field: String,
    },
    #[error("'{field}' is '{role}'; use {known}")]
    UnknownRole {
        /// Path of the field in the line.
        field: String,
        role: String,
        /// List of allowed roles.
        known: &'static str,
    },
    /// A flag of a message is neither 0 nor 1, or a message that is not the assistant's is to be learned.
    #[error("'{field}' must be 0 or false, or 1 or true for an assistant's message")]
    Weight {
        /// Path of the field in the line.
        field: String,
    },
    /// The weight of a line is not a number, or too large.
    #[error("'{field}' must be a number from -{limit} to {limit}")]
    LineWeight {
        /// Path of the field in the line.
        field: String,
        limit: f64,
    },
    /// A rating beside fields of a kind that has none.
    #[error("'{field}' rates the answer; call the fields 'prompt', 'completion' and 'label'")]
    Rated {
        /// Path of the field in the line.
        field: String,
    },
    /// A rated line does not end with an answer, or its completion has several.
    #[error("the rating belongs to one assistant message at the end, and there is none; split the line")]
    NoRatedAnswer,
    #[error("'{field}' contradicts '{other}'; keep one of them")]
    Twice {
        /// Path of the field in the line.
        field: String,
        /// Path of the other field.
        other: String,
    },
    #[error("'{field}' differs from the system message; keep one of them")]
    TwoSystemPrompts {
        /// Path of the field in the line.
        field: String,
    },
    /// A field's text is not JSON.
    #[error("'{field}' must be {expected}, and its text is not JSON: {error}")]
    InnerJson {
        /// Path of the field in the line.
        field: String,
        /// Name of the allowed type.
        expected: &'static str,
        error: String,
    },
    #[error("'{field}' has more than {limit} entries; shorten the list")]
    TooManyTools {
        /// Path of the field in the line.
        field: String,
        limit: usize,
    },
    /// The chat template ignores a field, so nothing of the field would be learned.
    #[error(
        "this model's chat template does not show '{field}'; use a model whose template does, or write the \
         text into a message's content"
    )]
    NotShown {
        /// Path of the field in the line.
        field: String,
    },
    /// A field with text to learn is empty.
    #[error("'{field}' is empty, so there is nothing to learn; add text, or remove the line")]
    Empty {
        /// Path of the field in the line.
        field: String,
    },
    /// The example has a single token, which has no prediction.
    #[error("it has a single token, so nothing can be predicted; lengthen it, or remove the line")]
    TooShort,
    /// The assistant has no message, or all its messages have the weight 0.
    #[error("it has no assistant message to learn; add one, give one the weight 1, or remove the line")]
    NothingToLearn,
    #[error("'{field}' has more than {limit} messages; split the conversation")]
    TooManyMessages {
        /// Path of the field in the line.
        field: String,
        limit: usize,
    },
    /// `chosen` and `rejected` are not two assistant answers to the same messages.
    #[error("'chosen' and 'rejected' must be equal except for one last assistant message each")]
    NoComparison,
    #[error("the chosen and the rejected answer are equal; remove the line")]
    SameAnswers,
    /// The recorded answers of a model are malformed.
    #[error("{0}; create such lines with `holobiont tune --draft`")]
    Answers(String),
    #[error("'kind' has more than {limit} bytes; use one word")]
    KindTooLong { limit: usize },
    /// No message can be answered by a model.
    #[error("it has no prompt for the model; use 'messages' or 'prompt', or remove the line")]
    NoPrompt,
    /// No field holds a prompt for answers with rewards.
    #[error("it has {found}; GRPO needs a prompt in {}", kind::prompt_fields())]
    NoRolloutPrompt {
        /// Names of the line's fields.
        found: String,
    },
    #[error("it has {tokens} tokens, and the limit is {limit}; shorten it, or raise the limit")]
    TooManyTokens {
        /// Number of tokens; of a conversation with several examples, the tokens of one example.
        tokens: usize,
        limit: usize,
    },
    #[error("this model has no chat template; use 'prompt' and 'completion', or 'text'")]
    NoTemplate,
    /// The chat template or the tokenizer refuses the messages.
    #[error(transparent)]
    Answered(#[from] SplitPromptError),
    /// The tokenizer refuses the text.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl LineFault {
    pub(super) fn unknown_kind(line: &Map<String, Value>) -> Self {
        Self::UnknownKind { found: names(line) }
    }
}

/// Returns a list of the line's fields, for messages.
pub(super) fn names(line: &Map<String, Value>) -> String {
    if line.is_empty() {
        return "no field".to_owned();
    }
    let names: Vec<String> = line.keys().take(10).map(|name| format!("'{}'", beginning(name))).collect();
    format!("the fields {}", names.join(", "))
}

/// Returns the beginning of `text` that a message repeats.
pub(super) fn beginning(text: &str) -> &str {
    &text[..text.floor_char_boundary(SHOWN_BYTES)]
}
