//! An adapter as its files hold it: low-rank deltas (LoRA), these with magnitudes beside (DoRA), of the token embedding as well, or
//! with an embedding or a head of their own, vectors that scale (IA3), or keys and values that stand before a prompt (prefix tuning).
//!
//! Adapters come from tenants who are not trusted. Files are read whole before anything is looked at, so that one
//! replaced meanwhile cannot tear; every option, name and shape is checked; and what is not supported is refused by
//! name, never ignored.

pub mod by_name;
pub mod dora;
mod draft;
mod embedding;
mod error;
mod gguf;
mod hasher;
mod ia3;
mod invocation;
mod kind;
pub mod limits;
mod lora;
mod matrix;
pub mod merge;
mod method;
mod modules_to_save;
mod options;
mod patterns;
mod peft;
mod prefix;
mod selection;
mod stored_vocabulary;
mod tensor_names;
mod torch_random;
mod vera;
mod vocabulary;
mod warning;
mod weight_file;
pub mod writing;

use std::path::Path;

use model_files::model_files;

pub use self::{
    embedding::EmbeddingFactors,
    error::AdapterError,
    invocation::Invocation,
    kind::AdapterKind,
    method::{
        Adapter, AnyAdapter, DoraAdapter, DraftAdapter, DraftShape, LoraModule, MethodWeights, Prefix,
        ScaleVector, ScaledSide, Scales, VocabularyAdapter,
    },
    vocabulary::{EmbeddingChange, SavedMatrix, VocabularyChanges},
    warning::AdapterWarning,
};
use crate::shape::config::ModelConfig;

impl Adapter {
    /// As [`AnyAdapter::read`], for those who want answers of it.
    ///
    /// # Errors
    /// As there, and if it does anything else.
    pub fn read(path: &Path, config: &ModelConfig) -> Result<Self, AdapterError> {
        AnyAdapter::read(path, config)?.answering(path)
    }
}

impl AnyAdapter {
    /// What it is, if requests are answered by it and it is nothing besides; `path` is where it was read.
    ///
    /// # Errors
    /// It is a draft, or a DoRA, which needs the base's weights, or changes embedding or head.
    pub fn answering(self, path: &Path) -> Result<Adapter, AdapterError> {
        match self {
            Self::Answers(adapter) => Ok(adapter),
            Self::Drafts(_) => Err(AdapterError::Draft { path: path.to_path_buf() }),
            Self::Decomposed(_) => Err(AdapterError::Dora { path: path.to_path_buf() }),
            Self::Vocabulary(_) => Err(AdapterError::Vocabulary { path: path.to_path_buf() }),
        }
    }

    /// Reads the adapter at `path` for the base model of shape `config`: a PEFT directory, a GGUF file, or a directory
    /// with a single GGUF file. `config` must have passed [`crate::shape::layout::check_config`].
    ///
    /// # Errors
    /// If anything is missing, broken, not supported, beyond [`limits`], or of another shape than the base model.
    pub fn read(path: &Path, config: &ModelConfig) -> Result<Self, AdapterError> {
        Self::read_with_notes(path, config).map(|(adapter, _)| adapter)
    }

    /// As [`read`](Self::read), and what in the files has no effect.
    ///
    /// # Errors
    /// As there.
    pub fn read_with_notes(
        path: &Path,
        config: &ModelConfig,
    ) -> Result<(Self, Vec<AdapterWarning>), AdapterError> {
        let of_gguf = |path: &Path| gguf::read(path, config).map(|adapter| (adapter, Vec::new()));
        let failed = |source| AdapterError::Read { path: path.to_path_buf(), source };
        if !std::fs::metadata(path).map_err(failed)?.is_dir() {
            return match extension(path) {
                "gguf" => of_gguf(path),
                "bin" | "pt" | "pth" | "pkl" => Err(AdapterError::Pickle { path: path.to_path_buf() }),
                _ => Err(AdapterError::NotAnAdapter { path: path.to_path_buf() }),
            };
        }
        if path.join(writing::CONFIG_FILE).exists() {
            return peft::read(path, config);
        }
        match model_files::gguf_files(path).map_err(failed)?.as_slice() {
            [only] => of_gguf(only),
            _ => Err(AdapterError::NotAnAdapter { path: path.to_path_buf() }),
        }
    }

    /// Why [`read`](Self::read) refuses the adapter at `path`: everything that is wrong with its layers and tensors,
    /// where its format allows to go on after the first, else that. Empty if nothing is.
    #[must_use]
    pub fn problems(path: &Path, config: &ModelConfig) -> Vec<AdapterError> {
        let Err(first) = Self::read(path, config) else { return Vec::new() };
        match peft::problems(path, config) {
            Ok(problems) if !problems.is_empty() => problems,
            _ => vec![first],
        }
    }
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}
