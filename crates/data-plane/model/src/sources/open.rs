//! Opens a model's weights in any supported file format.

use std::path::{Path, PathBuf};

use model_files::{
    generation_defaults::GenerationDefaultsError,
    gguf::GgufError,
    model_files::{FindError, ModelFiles},
    text_hash::TextHashError,
};

use crate::{
    shape::source::WeightSource,
    sources::{
        gguf::{GgufSource, GgufSourceError},
        safetensors::{SafetensorsSource, SafetensorsSourceError},
    },
};

/// Reasons why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path holds no model, or several.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The path is a client's sparse copy, without linear layers.
    #[error("{} is a client's sparse copy, without linear layers; give the path of the whole model", path.display())]
    Sparse {
        /// Path of the file or directory.
        path: PathBuf,
    },
    /// The GGUF file is refused.
    #[error(transparent)]
    Gguf(#[from] GgufSourceError),
    /// The directory is refused.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsSourceError),
    /// The tokenizer or chat template cannot be read.
    #[error(transparent)]
    Text(#[from] TextHashError),
    /// The sampling defaults are refused.
    #[error(transparent)]
    Defaults(#[from] GenerationDefaultsError),
}

impl OpenError {
    /// True if the files seem intact and only the architecture, or one of its options, is unsupported.
    #[must_use]
    pub fn is_of_configuration(&self) -> bool {
        matches!(self, Self::Safetensors(SafetensorsSourceError::Config { .. }))
    }
}

/// Opens the model at `path`: a GGUF file, a directory with a single one, or a Hugging Face directory.
///
/// # Errors
/// There is no model, more than one, or one that cannot be run.
pub fn open(path: &Path) -> Result<Box<dyn WeightSource + Send + Sync>, OpenError> {
    weights(&ModelFiles::at(path)?)
}

/// Opens the weights of a model that was found.
///
/// # Errors
/// The errors of opening either format, or the model is a sparse copy without linear layers.
pub fn weights(files: &ModelFiles) -> Result<Box<dyn WeightSource + Send + Sync>, OpenError> {
    if files.is_sparse_copy() {
        return Err(OpenError::Sparse { path: files.path().to_path_buf() });
    }
    sparse_weights(files)
}

/// Opens the weights, including those of a sparse copy, for callers that need no linear layers.
pub(crate) fn sparse_weights(files: &ModelFiles) -> Result<Box<dyn WeightSource + Send + Sync>, OpenError> {
    Ok(match files {
        ModelFiles::Gguf(path) => Box::new(GgufSource::open(path)?),
        ModelFiles::Directory(path) => Box::new(SafetensorsSource::open(path)?),
    })
}

impl From<GgufError> for OpenError {
    fn from(error: GgufError) -> Self {
        Self::Gguf(error.into())
    }
}
