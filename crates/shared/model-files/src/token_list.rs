//! Lists a vocabulary's tokens as its files spell them, to tell whether an id means the same in two models.
//!
//! Nothing is encoded or decoded here: equal spellings are taken to mean the same token.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::{
    gguf::{GgufError, GgufFile},
    model_files::ModelFiles,
    whole_file,
};

/// Maximum bytes of `tokenizer.json`.
const MAX_FILE_BYTES: u64 = 1 << 28;
/// Maximum number of tokens of a vocabulary.
const MAX_TOKENS: usize = 1 << 22;

/// Error while listing the tokens of a model.
#[derive(Debug, thiserror::Error)]
pub enum TokenListError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}; make it readable or fetch the model again", path.display())]
    Read {
        /// Path of the unreadable file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file does not hold a list of tokens.
    #[error("{} has no usable list of tokens: {source}; fetch the model again", path.display())]
    Json {
        /// Path of the invalid file.
        path: PathBuf,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model has no token list, or one beyond the limits.
    #[error("{} has no list of tokens, or one that is too large; give a model with a \
             tokenizer", path.display())]
    None {
        /// Path of the file without a list.
        path: PathBuf,
    },
}

/// First token that two models spell differently.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the draft model has another tokenizer than the base (token {token} is {draft:?}, not {base:?}); use \
     a draft model of the base's family"
)]
pub struct TokenMismatch {
    /// Id of the differing token.
    pub token: u32,
    /// Spelling in the draft model.
    pub draft: String,
    /// Spelling in the base model.
    pub base: String,
}

/// Spellings of a vocabulary's tokens, by token id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenList {
    /// Spellings by id; empty for an id without a token.
    spellings: Vec<String>,
}

#[derive(Deserialize)]
struct TokenizerJson {
    model: ModelJson,
    #[serde(default)]
    added_tokens: Vec<AddedJson>,
}

#[derive(Deserialize)]
struct ModelJson {
    vocab: HashMap<String, u32>,
}

#[derive(Deserialize)]
struct AddedJson {
    id: u32,
    content: String,
}

impl TokenList {
    /// Reads the tokens of the model in `files`.
    ///
    /// # Errors
    /// If the model has no readable token list.
    pub fn of(files: &ModelFiles) -> Result<Self, TokenListError> {
        match files {
            ModelFiles::Gguf(path) => {
                let file = GgufFile::open(path)?;
                let tokens = file.strings("tokenizer.ggml.tokens")?;
                let tokens = tokens.ok_or_else(|| TokenListError::None { path: path.clone() })?;
                Ok(Self { spellings: tokens.into_iter().map(str::to_owned).collect() })
            }
            ModelFiles::Directory(directory) => Self::of_json(&directory.join("tokenizer.json")),
        }
    }

    fn of_json(path: &Path) -> Result<Self, TokenListError> {
        let failed = |source| TokenListError::Read { path: path.to_path_buf(), source };
        let json = whole_file::read(path, MAX_FILE_BYTES).map_err(failed)?;
        let file: TokenizerJson = serde_json::from_slice(&json)
            .map_err(|source| TokenListError::Json { path: path.to_path_buf(), source })?;
        let added = file.added_tokens.into_iter().map(|added| (added.content, added.id));
        let mut spellings = Vec::new();
        for (spelling, id) in file.model.vocab.into_iter().chain(added) {
            let id = id as usize;
            if id >= MAX_TOKENS {
                return Err(TokenListError::None { path: path.to_path_buf() });
            }
            if id >= spellings.len() {
                spellings.resize(id + 1, String::new());
            }
            spellings[id] = spelling;
        }
        Ok(Self { spellings })
    }

    /// Checks that this draft and `base` spell each id in the range of both lists alike. Ids beyond the
    /// shorter list are never drafted.
    ///
    /// # Errors
    /// The first token whose spellings differ.
    pub fn agrees_with(&self, base: &Self) -> Result<(), TokenMismatch> {
        let differing = self.spellings.iter().zip(&base.spellings).position(|(draft, base)| draft != base);
        match differing {
            None => Ok(()),
            Some(at) => Err(TokenMismatch {
                token: u32::try_from(at).unwrap_or(u32::MAX),
                draft: self.spellings[at].clone(),
                base: base.spellings[at].clone(),
            }),
        }
    }

    /// Returns the number of token ids in the list.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spellings.len()
    }

    /// True if the list has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spellings.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests")]

    use super::*;

    fn list(tokens: &[&str]) -> TokenList {
        TokenList { spellings: tokens.iter().map(|&token| token.to_owned()).collect() }
    }

    #[test]
    fn vocabularies_agree_as_far_as_both_go_and_the_first_difference_is_named() {
        let base = list(&["a", "b", "c"]);
        assert_eq!(list(&["a", "b"]).agrees_with(&base), Ok(()));
        assert_eq!(list(&["a", "b", "c", "d"]).agrees_with(&base), Ok(()));
        let other = list(&["a", "x", "y"]).agrees_with(&base).unwrap_err();
        assert_eq!(other, TokenMismatch { token: 1, draft: "x".to_owned(), base: "b".to_owned() });
        assert!(other.to_string().contains("base's family"));
    }

    #[test]
    fn a_tokenizer_json_lists_its_vocabulary_and_what_was_added() {
        let directory = std::env::temp_dir().join(format!("token-list-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("tokenizer.json");
        let json = r#"{"model": {"vocab": {"b": 1, "a": 0}}, "added_tokens": [{"id": 3, "content": "<s>"}]}"#;
        std::fs::write(&path, json).unwrap();
        assert_eq!(TokenList::of_json(&path).unwrap(), list(&["a", "b", "", "<s>"]));
        std::fs::write(&path, r#"{"model": {"vocab": {"a": 4294967295}}}"#).unwrap();
        assert!(matches!(TokenList::of_json(&path), Err(TokenListError::None { .. })));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
