//! Why the files of a Hugging Face directory are refused.

use std::{io, path::PathBuf};

use model_files::weight_files::WeightFilesError;

use crate::{
    shape::layout::LayoutError,
    sources::{hf_config::HfConfigError, safetensors::file::SafetensorsFormatError},
};

/// Why a directory is no model that can be run.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsSourceError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; a model directory has config.json and model.safetensors", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The configuration is refused.
    #[error("{}: {source}; use a Llama, Mistral, Qwen2 or Qwen3 model", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: HfConfigError,
    },
    /// The list of weight files is no use.
    #[error(transparent)]
    Files(#[from] WeightFilesError),
    /// A weight file is broken.
    #[error("{} is not a usable safetensors file: {source}; fetch the file again", path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: SafetensorsFormatError,
    },
    /// A tensor that no model of this architecture has.
    #[error("{}: tensor `{tensor}` is not supported; the model is not of the architecture it names", path.display())]
    UnknownTensor {
        /// The directory.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor is in two weight files.
    #[error("{}: tensor `{tensor}` is stored twice; fetch the model again", path.display())]
    Duplicate {
        /// The directory.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The tensors are not those the configuration calls for.
    #[error("{}: {source}; fetch the model again", path.display())]
    Layout {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        source: LayoutError,
    },
}
