//! The tokens of a vocabulary as its files spell them: what tells whether two models mean the same by an id.
//!
//! Nothing is encoded or decoded here; what a spelling means is the tokenizer's business, and equal spellings mean the same.

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

/// Bytes of `tokenizer.json`.
const MAX_FILE_BYTES: u64 = 1 << 28;
/// Most tokens of a vocabulary.
const MAX_TOKENS: usize = 1 << 22;

/// Why the tokens of a model cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum TokenListError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}; make it readable or fetch the model again", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is no list of tokens.
    #[error("{} has no usable list of tokens: {source}; fetch the model again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// There is no list, or none that can be kept.
    #[error("{} has no list of tokens, or one beyond any size; give a model with a tokenizer", path.display())]
    None {
        /// The file.
        path: PathBuf,
    },
}

/// The first token that two models spell in two ways.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the draft's tokenizer is another one (token {token} is {draft:?} there and {base:?} in the base): a draft must be of the \
     base's family"
)]
pub struct TokenMismatch {
    /// Its id.
    pub token: u32,
    /// What it is in the draft.
    pub draft: String,
    /// What it is in the base.
    pub base: String,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenList {
    /// By id; empty where there is no such token.
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
    /// Reads those of the model in `files`.
    ///
    /// # Errors
    /// There are none that can be read.
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

    /// That every token of this draft is one of `base` or none there: tokens that only one of them has are never guessed.
    ///
    /// # Errors
    /// The first that differs.
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

    /// Tokens there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spellings.len()
    }

    /// True if there are none.
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
