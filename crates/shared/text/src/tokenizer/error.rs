//! What can go wrong with tokenizers.

use std::{io, path::PathBuf};

use model_files::{generation_defaults::GenerationDefaultsError, gguf::GgufError};

/// Why a tokenizer could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A GGUF value has another type than its key calls for.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The tokens that end an answer could not be read.
    #[error(transparent)]
    Defaults(#[from] GenerationDefaultsError),
    /// A file could not be read.
    #[error("cannot read {}: {source}; make it readable or fetch the model again", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not the JSON it should be.
    #[error("{} is not usable: {source}; fetch the model again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// Something a tokenizer must have is not there.
    #[error("{} has no `{what}`, so it has no tokenizer; use another conversion of the model", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The key.
        what: &'static str,
    },
    /// A kind of tokenizer we do not implement.
    #[error("{}: the {what} `{name}` is not supported ({supported} are); use another model", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What kind of thing it is.
        what: &'static str,
        /// Its name in the file.
        name: String,
        /// What there is instead.
        supported: &'static str,
    },
    /// The parts do not fit each other.
    #[error("{}: {detail}; convert or fetch the model again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        detail: String,
    },
}

/// Why a text could not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The `tokenizers` crate gave up, for instance because a regular expression took too many steps.
    #[error("the text cannot be split into tokens: {0}; shorten its longest run of equal characters")]
    Split(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The vocabulary spells a control token with ordinary characters and merges.
    #[error("the text would become the control token `{name}`; rephrase it")]
    ControlToken {
        /// The token.
        name: String,
    },
}
