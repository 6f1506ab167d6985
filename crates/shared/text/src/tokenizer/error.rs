//! Errors of reading tokenizers and of encoding.

use std::{io, path::PathBuf};

use model_files::{generation_defaults::GenerationDefaultsError, gguf::GgufError};

/// Why a tokenizer could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A GGUF value has another type than its key requires.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The tokens that end an answer could not be read.
    #[error(transparent)]
    Defaults(#[from] GenerationDefaultsError),
    /// A file could not be read.
    #[error("cannot read {}: {source}; make it readable or fetch the model again", path.display())]
    Read {
        /// Path of the unreadable file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is not valid JSON of the expected shape.
    #[error("cannot use {}: {source}; fetch the model again", path.display())]
    Json {
        /// Path of the invalid file.
        path: PathBuf,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// A required part of the tokenizer is missing.
    #[error("{} has no `{what}`, so it has no tokenizer; use another conversion of the model", path.display())]
    Missing {
        /// Path of the incomplete file.
        path: PathBuf,
        /// Name of the missing key.
        what: &'static str,
    },
    /// The kind of tokenizer is not implemented.
    #[error("{}: the {what} `{name}` is not supported ({supported} are); use another model", path.display())]
    Unsupported {
        /// Path of the tokenizer's file.
        path: PathBuf,
        /// Kind of the unsupported component.
        what: &'static str,
        /// Name of the component in the file.
        name: String,
        /// List of the supported names.
        supported: &'static str,
    },
    /// Parts of the tokenizer contradict each other.
    #[error("{}: {detail}; convert or fetch the model again", path.display())]
    Malformed {
        /// Path of the tokenizer's file.
        path: PathBuf,
        /// Description of the contradiction.
        detail: String,
    },
}

/// Why a text could not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The `tokenizers` crate failed, for instance because a regular expression took too many steps.
    #[error("the text cannot be split into tokens: {0}; shorten its longest run of equal characters")]
    Split(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The vocabulary spells a control token with ordinary characters and merges.
    #[error("the text would become the control token `{name}`; rephrase it")]
    ControlToken {
        /// Name of the control token.
        name: String,
    },
}
