//! An adapter as its files hold it: low-rank deltas (LoRA), vectors that scale (IA3), or keys and values that stand
//! before a prompt (prefix tuning).
//!
//! Adapters come from tenants who are not trusted. Files are read whole before anything is looked at, so that one
//! replaced meanwhile cannot tear; every option, name and shape is checked; and what is not supported is refused by
//! name, never ignored.

mod gguf;
mod ia3;
mod lora;
mod matrix;
mod method;
mod options;
mod patterns;
mod peft;
mod prefix;
mod selection;
mod weight_file;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use self::method::{AdapterKind, LoraModule, Method, Prefix, ScaleVector, Scales, Side};
use crate::{
    config::ModelConfig, generation::Generation, gguf::GgufError, open,
    safetensors_file::SafetensorsFormatError,
};

/// Limits on what an adapter may be.
pub mod limits {
    /// Largest rank of a module.
    pub const MAX_RANK: usize = 1 << 10;
    /// Most virtual tokens of a prefix.
    pub const MAX_VIRTUAL_TOKENS: usize = 1 << 10;
    /// Bytes of `adapter_config.json`.
    pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
    /// Bytes of the weights' safetensors header.
    pub const MAX_HEADER_BYTES: u64 = 1 << 20;
    /// Bytes of the weights.
    pub const MAX_WEIGHT_BYTES: u64 = 1 << 31;
    /// Entries of a pattern or a list of modules.
    pub const MAX_PATTERNS: usize = 1 << 10;
    /// Bytes of one pattern.
    pub const MAX_PATTERN_BYTES: usize = 1 << 12;
    /// Bytes of all patterns that are no plain names.
    pub const MAX_EXPRESSION_BYTES: usize = 1 << 12;
}

/// An adapter, read and checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Content hash of weights and configuration.
    pub generation: Generation,
    /// What it does.
    pub method: Method,
    /// `base_model_name_or_path` of its configuration, for messages.
    pub base_model: Option<String>,
    /// True if every number was stored in 16 bits, so that 16 bits hold it exactly.
    pub stored_in_16_bits: bool,
}

/// Why an adapter is refused.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; an adapter is a directory with adapter_config.json and adapter_model.safetensors, or a GGUF file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Weights in a format that can run code when it is read.
    #[error("{} is a pickle file, which is never read; save the adapter as safetensors", path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A file that is no adapter at all.
    #[error("{} is no adapter; give a PEFT directory or a GGUF adapter", path.display())]
    NotAnAdapter {
        /// The file or directory.
        path: PathBuf,
    },
    /// The files changed while they were read.
    #[error("{} changed while it was read; load the adapter again once it is written", path.display())]
    Changing {
        /// The directory.
        path: PathBuf,
    },
    /// The configuration is not JSON.
    #[error("{} is not a usable configuration: {source}; save the adapter again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The configuration asks for something that is not supported.
    #[error("{}: `{option}` is {value}, which is not supported; train the adapter as plain LoRA, IA3 or prefix tuning", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The option.
        option: String,
        /// Its value, shortened.
        value: String,
    },
    /// An option is missing or makes no sense.
    #[error("{}: `{option}` {problem}; correct the configuration", path.display())]
    Option {
        /// The file.
        path: PathBuf,
        /// The option.
        option: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The weight file is broken.
    #[error("{} is not a usable safetensors file: {source}; save the adapter again", path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: SafetensorsFormatError,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor that is nothing of a linear layer of the base model.
    #[error("{}: tensor `{tensor}` changes nothing that the base model lets an adapter change; save the adapter without it", path.display())]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A copy of the base model's own weights, which may or may not equal those of the base that is served.
    #[error(
        "{}: tensor `{tensor}` is a copy of the base model's weights; save the adapter without it (in PEFT: save_pretrained(..., save_embedding_layers=False))", path.display())]
    BaseCopy {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor that another one already stood for.
    #[error("{}: tensor `{tensor}` is there twice under different prefixes; save the adapter again", path.display())]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The configuration does not target a layer that the weights adapt.
    #[error("{}: there are weights for `{module}`, which `target_modules` does not select; configuration and weights do not belong together", path.display())]
    NotTargeted {
        /// The file.
        path: PathBuf,
        /// The layer.
        module: String,
    },
    /// The configuration targets a layer that the weights do not adapt, or by halves.
    #[error("{}: tensor `{tensor}` is missing; save the adapter again", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another shape than base model and configuration call for.
    #[error("{}: tensor `{tensor}` has the shape {found:?} where {expected:?} is expected; the adapter is not for this base model", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// `[rows, cols]`.
        expected: [usize; 2],
        /// As stored.
        found: Vec<usize>,
    },
    /// A rank of 0, or beyond [`limits::MAX_RANK`].
    #[error("{}: `{module}` has rank {rank}, and ranks from 1 to {} are supported", path.display(), limits::MAX_RANK)]
    Rank {
        /// The file.
        path: PathBuf,
        /// The layer.
        module: String,
        /// The rank.
        rank: usize,
    },
    /// A weight that is not a number, or infinite.
    #[error("{}: tensor `{tensor}` has the value {value} at element {index}; the training went wrong", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Which element.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// No layer is adapted.
    #[error("{}: no tensor adapts a layer of the base model; an adapter that does nothing is not loaded", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

impl Adapter {
    /// Its low-rank layers; none if it is of another kind.
    #[must_use]
    pub fn modules(&self) -> &[LoraModule] {
        match &self.method {
            Method::Lora(modules) => modules,
            Method::Ia3(_) | Method::Prefix(_) => &[],
        }
    }

    /// Reads the adapter at `path` for the base model of shape `config`: a PEFT directory, a GGUF file, or a directory
    /// with a single GGUF file. `config` must have passed [`crate::layout::check_config`].
    ///
    /// # Errors
    /// If anything is missing, broken, not supported, beyond [`limits`], or of another shape than the base model.
    pub fn read(path: &Path, config: &ModelConfig) -> Result<Self, AdapterError> {
        let failed = |source| AdapterError::Read { path: path.to_path_buf(), source };
        if !std::fs::metadata(path).map_err(failed)?.is_dir() {
            return match extension(path) {
                "gguf" => gguf::read(path, config),
                "bin" | "pt" | "pth" | "pkl" => Err(AdapterError::Pickle { path: path.to_path_buf() }),
                _ => Err(AdapterError::NotAnAdapter { path: path.to_path_buf() }),
            };
        }
        if path.join(peft::CONFIG_FILE).exists() {
            return peft::read(path, config);
        }
        match open::gguf_files(path).map_err(failed)?.as_slice() {
            [only] => gguf::read(only, config),
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
