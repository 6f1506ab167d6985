//! Reads adapter files: LoRA and methods that are read as one, DoRA, IA3, biases, virtual tokens, changed or
//! replaced token embeddings and heads, and classification heads.
//!
//! Adapters come from untrusted tenants. Each file is read completely before it is parsed, so a concurrent
//! replacement cannot mix two versions. Unsupported options, names and shapes are refused by name.

mod beft;
pub mod by_name;
mod classification;
pub mod combination;
mod converted;
pub mod dora;
mod draft;
mod embedding;
mod error;
mod expert_names;
mod experts;
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
pub mod peft_types;
mod prefix;
mod product;
mod prompt;
mod selection;
mod stored_classification;
mod stored_vocabulary;
mod svd;
mod tensor_names;
mod torch_random;
mod trained_tokens;
mod virtual_tokens;
mod vocabulary;
mod warning;
mod weight_file;
pub mod writing;

use std::path::Path;

use model_files::model_files;

pub use self::{
    classification::ClassificationHead,
    embedding::EmbeddingFactors,
    error::AdapterError,
    invocation::Invocation,
    kind::AdapterKind,
    method::{
        Adapter, AnyAdapter, BiasedAdapter, ClassificationAdapter, DoraAdapter, DraftAdapter, DraftShape,
        LoraModule, MethodWeights, ScaleVector, ScaledSide, Scales, VocabularyAdapter,
    },
    virtual_tokens::{Prefix, PromptEmbeddings},
    vocabulary::{EmbeddingChange, HeadChange, SavedMatrix, TokenRows, VocabularyChanges},
    warning::AdapterWarning,
};
use crate::shape::config::ModelConfig;

impl Adapter {
    /// Reads an adapter that answers requests; see [`AnyAdapter::read`].
    ///
    /// # Errors
    /// Any error of [`AnyAdapter::read`], or the adapter does not answer requests on its own.
    pub fn read(path: &Path, config: &ModelConfig) -> Result<Self, AdapterError> {
        AnyAdapter::read(path, config)?.answering(path)
    }
}

impl AnyAdapter {
    /// Returns the adapter if it answers requests without the base's weights; errors name its `path`.
    ///
    /// # Errors
    /// The adapter is a draft adapter, a DoRA (which needs the base's weights), changes embedding, head or
    /// biases, or classifies.
    pub fn answering(self, path: &Path) -> Result<Adapter, AdapterError> {
        match self {
            Self::Answers(adapter) => Ok(adapter),
            Self::Drafts(_) => Err(AdapterError::Draft { path: path.to_path_buf() }),
            Self::Decomposed(_) => Err(AdapterError::Dora { path: path.to_path_buf() }),
            Self::Vocabulary(_) | Self::Biased(_) => {
                Err(AdapterError::Vocabulary { path: path.to_path_buf() })
            }
            Self::Classifies(_) => Err(AdapterError::Classification { path: path.to_path_buf() }),
        }
    }

    /// Reads the adapter at `path` for the base model of shape `config`: a PEFT directory, a GGUF file, or a
    /// directory with a single GGUF file. `config` must have passed [`crate::shape::layout::check_config`].
    ///
    /// # Errors
    /// The adapter is incomplete, malformed, unsupported, beyond [`limits`], or does not fit the base.
    pub fn read(path: &Path, config: &ModelConfig) -> Result<Self, AdapterError> {
        Self::read_with_notes(path, config).map(|(adapter, _)| adapter)
    }

    /// Reads an adapter as [`read`](Self::read) does, with warnings about file contents that have no effect.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
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

    /// Returns the reasons why [`read`](Self::read) refuses the adapter at `path`; empty for a valid one.
    /// PEFT directories give every error of layers and tensors; other formats give the first one.
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
