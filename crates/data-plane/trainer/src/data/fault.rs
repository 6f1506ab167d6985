//! What can be wrong with training data.

use std::{fmt, io, path::PathBuf};

use serde_json::{Map, Value};
use text::{chat::AnsweredError, tokenizer::EncodeError};

use super::kind::{self, DataKind};

/// Faults that are shown; the others are counted.
pub const MAX_FAULTS_SHOWN: usize = 20;

/// Bytes of somebody's text that a message repeats.
const SHOWN_BYTES: usize = 40;

/// Why a file cannot be trained on.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The system refused.
    #[error("cannot read {}: {source}; check its path and permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused, of what has no path.
    #[error("cannot read the data: {0}")]
    Stream(#[source] io::Error),
    /// There is no line.
    #[error("the file is empty; write one JSON object a line into it")]
    Empty,
    /// More lines than allowed.
    #[error("the file has more than {limit} lines; split it")]
    TooManyLines {
        /// Lines.
        limit: usize,
    },
    /// More tokens than allowed.
    #[error("with line {line} the file has more than {limit} tokens; split it")]
    TooManyTokens {
        /// The line that was too much.
        line: usize,
        /// Tokens.
        limit: usize,
    },
    /// Lines are wrong.
    #[error("{}", ProblemList { problems, count: *count })]
    Problems {
        /// The first of them.
        problems: Vec<Problem>,
        /// How many there are in all.
        count: usize,
    },
}

/// A fault and its line.
#[derive(Debug)]
pub struct Problem {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub fault: LineFault,
}

/// Faults as a list.
struct ProblemList<'a> {
    problems: &'a [Problem],
    count: usize,
}

impl fmt::Display for ProblemList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = if self.count == 1 { "line is" } else { "lines are" };
        write!(f, "{} {lines} wrong, so nothing was trained:", self.count)?;
        for Problem { line, fault } in self.problems {
            write!(f, "\n  line {line}: {fault}")?;
        }
        match self.count - self.problems.len() {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
pub enum LineFault {
    /// More bytes than allowed.
    #[error("it has more than {limit} bytes; shorten or split it")]
    LineTooLong {
        /// Bytes.
        limit: usize,
    },
    /// It is no text.
    #[error("byte {at} is not UTF-8; save the file as UTF-8")]
    Utf8 {
        /// Counted from 1.
        at: usize,
    },
    /// Nothing is on it, and something behind it.
    #[error("it is blank; take it out")]
    Blank,
    /// It is not JSON, or says a name twice.
    #[error("not JSON: {0}; write one whole JSON object on the line")]
    Json(String),
    /// It is another JSON value.
    #[error("it must be a JSON object")]
    NoObject,
    /// Its fields make no kind.
    #[error("it has {found}; what a line needs is {}", kind::all())]
    UnknownKind {
        /// The names of its fields.
        found: String,
    },
    /// It is of another kind than the lines before.
    #[error("the lines before have {expected}, and this one has {found}; put lines of one kind into a file")]
    OtherKind {
        /// The file's kind.
        expected: DataKind,
        /// The line's.
        found: DataKind,
    },
    /// A field is not there.
    #[error("'{field}' is missing; add it")]
    Missing {
        /// Its path in the line.
        field: String,
    },
    /// A field has another type.
    #[error("'{field}' must be {expected}, not {found}")]
    WrongType {
        /// Its path in the line.
        field: String,
        /// What is allowed.
        expected: &'static str,
        /// What is there.
        found: &'static str,
    },
    /// A field that would change what the model is shown.
    #[error("'{field}' is not supported; take it out, or take out the line")]
    Unsupported {
        /// Its path in the line.
        field: String,
    },
    /// A speaker nobody knows.
    #[error("'{field}' is '{role}'; use {known}")]
    UnknownRole {
        /// Its path in the line.
        field: String,
        /// What is there.
        role: String,
        /// What is allowed.
        known: &'static str,
    },
    /// A weight that is neither 0 nor 1, or not where it could count.
    #[error("'{field}' must be 0, or 1 for an assistant's message")]
    Weight {
        /// Its path in the line.
        field: String,
    },
    /// Something to learn is empty.
    #[error("'{field}' is empty, so there is nothing to learn; fill it in, or take out the line")]
    Empty {
        /// Its path in the line.
        field: String,
    },
    /// Of one token: nothing comes before it.
    #[error("it is a single token, which nothing predicts; lengthen it, or take out the line")]
    TooShort,
    /// Nobody answers, or no answer counts.
    #[error(
        "no message of the assistant is to be learned; add one, give one the weight 1, or take out the line"
    )]
    NothingToLearn,
    /// More messages than allowed.
    #[error("'{field}' has more than {limit} messages; split the conversation")]
    TooManyMessages {
        /// Its path in the line.
        field: String,
        /// Messages.
        limit: usize,
    },
    /// Chosen and rejected are not two answers of the assistant to the same.
    #[error(
        "'chosen' and 'rejected' must each add one message of the assistant to the messages they share; cut them there"
    )]
    NoComparison,
    /// Chosen and rejected are the same.
    #[error("the answers to compare are the same; take out the line")]
    SameAnswers,
    /// What a model said is not as it says it.
    #[error("{0}; let `holobiont tune --draft` write such lines")]
    Answers(String),
    /// The name of a kind of text is none.
    #[error("'kind' has more than {limit} bytes; name the kind of text in a word")]
    KindTooLong {
        /// Bytes.
        limit: usize,
    },
    /// Nothing is asked that a model could answer.
    #[error("it has no prompt that the model could answer; use 'messages' or 'prompt', or take out the line")]
    NoPrompt,
    /// More tokens than allowed.
    #[error("it has {tokens} tokens, and {limit} are allowed; shorten it, or raise the maximum")]
    TooManyTokens {
        /// Its tokens; where one conversation becomes several examples, those of the longest.
        tokens: usize,
        /// What is allowed.
        limit: usize,
    },
    /// The model has no chat template.
    #[error("this model has no chat template; use 'prompt' and 'completion', or 'text'")]
    NoTemplate,
    /// Chat template or tokenizer refuse it.
    #[error(transparent)]
    Answered(#[from] AnsweredError),
    /// The tokenizer refuses it.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl LineFault {
    pub(super) fn unknown_kind(line: &Map<String, Value>) -> Self {
        let found = match line.len() {
            0 => "no field".to_owned(),
            _ => {
                let names: Vec<String> =
                    line.keys().take(10).map(|name| format!("'{}'", beginning(name))).collect();
                format!("the fields {}", names.join(", "))
            }
        };
        Self::UnknownKind { found }
    }
}

/// As much of `text` as a message repeats.
pub(super) fn beginning(text: &str) -> &str {
    &text[..text.floor_char_boundary(SHOWN_BYTES)]
}
