//! Reasons for refusing the files of a Hugging Face directory.

use std::{io, path::PathBuf};

use model_files::weight_files::WeightFilesError;

use crate::{
    shape::layout::LayoutError,
    sources::{hf_config::HfConfigError, safetensors::file::SafetensorsFormatError},
};

/// Reasons why a directory cannot be run as a model.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsSourceError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; a model directory has config.json and model.safetensors", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The configuration is refused.
    #[error("{}: {source}; use a Llama, Mistral, Qwen2 or Qwen3 model", path.display())]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// Reason for refusing the configuration.
        source: HfConfigError,
    },
    /// The list of weight files is invalid.
    #[error(transparent)]
    Files(#[from] WeightFilesError),
    /// A weight file is broken.
    #[error("{} is not a usable safetensors file: {source}; fetch the file again", path.display())]
    Weights {
        /// Path of the file.
        path: PathBuf,
        /// Error of the safetensors parser.
        source: SafetensorsFormatError,
    },
    /// A tensor belongs to no model of this architecture.
    #[error("{}: tensor `{tensor}` is not supported; the model differs from its named \
             architecture", path.display())]
    UnknownTensor {
        /// Path of the directory.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// Two weight files have the same tensor.
    #[error("{}: tensor `{tensor}` is stored twice; fetch the model again", path.display())]
    Duplicate {
        /// Path of the directory.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The tensors do not match the configuration.
    #[error("{}: {source}; fetch the model again", path.display())]
    Layout {
        /// Path of the directory.
        path: PathBuf,
        /// First tensor that does not match.
        source: LayoutError,
    },
}
