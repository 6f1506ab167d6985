//! A model in a Hugging Face directory: `config.json` beside one safetensors file or a sharded set of them.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
};

use kernels::TensorType;

use crate::{
    config::ModelConfig,
    hf_config::{HfConfig, HfConfigError},
    layout::{self, LayoutError},
    safetensors_file::SafetensorsFormatError,
    safetensors_shards::{OtherTypes, Shards},
    source::{Target, Tensor, TensorId, WeightSource},
    whole_file,
};

/// The configuration's name in a model directory.
pub const CONFIG_FILE: &str = "config.json";
/// The name of a model's only weight file.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The name of the list of a model's weight files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bytes of `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

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
    /// The list of weight files is broken.
    #[error("{} is not a usable list of weight files: {reason}; fetch the model again", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
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

/// A model in a Hugging Face directory, opened and checked.
#[derive(Debug)]
pub struct SafetensorsSource {
    directory: PathBuf,
    config: ModelConfig,
    shards: Shards,
}

impl SafetensorsSource {
    /// Maps the weight files in `directory` and checks that they hold a whole model of a known architecture.
    ///
    /// # Errors
    /// If a file is missing or broken, the architecture is another one, or a tensor is missing or too many.
    pub fn open(directory: &Path) -> Result<Self, SafetensorsSourceError> {
        let (path, json) = read_config(directory)?;
        let HfConfig { model: config, biased } =
            HfConfig::parse(&json).map_err(|source| SafetensorsSourceError::Config { path, source })?;
        let shards = Shards::open(directory, OtherTypes::Refused)?;
        let source = Self { directory: directory.to_path_buf(), config, shards };
        source.check_tensors(&biased)?;
        Ok(source)
    }

    /// The weight files.
    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    fn check_tensors(&self, biased: &[Target]) -> Result<(), SafetensorsSourceError> {
        let shape = |name: &str| self.shards.tensor(name)?.matrix_shape();
        layout::check_tensors(
            &self.config,
            layout::required_tensors(&self.config, biased),
            tensor_name,
            shape,
        )
        .map_err(|source| SafetensorsSourceError::Layout { path: self.directory.clone(), source })?;
        let mut known: HashSet<String> =
            layout::required_tensors(&self.config, biased).map(tensor_name).collect();
        // Some models store a tied head once more; transformers ignores it too.
        known.insert(tensor_name(TensorId::Weight(0, Target::LmHead)));
        // Old files keep the rotary frequencies, which the configuration gives as well.
        let unknown = |name: &&str| !known.contains(*name) && !name.ends_with(".rotary_emb.inv_freq");
        match self.shards.names().find(unknown) {
            None => Ok(()),
            Some(tensor) => Err(SafetensorsSourceError::UnknownTensor {
                path: self.directory.clone(),
                tensor: tensor.escape_debug().to_string(),
            }),
        }
    }
}

impl WeightSource for SafetensorsSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        if self.config.tied_head && id == TensorId::Weight(0, Target::LmHead) {
            return None;
        }
        let name = tensor_name(id);
        let stored = self.shards.tensor(&name)?;
        let [rows, cols] = stored.matrix_shape()?;
        Some(Tensor { kind: stored.kind, rows, cols, data: self.shards.bytes(&name)?.into() })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.tensor(id).map(|tensor| tensor.kind)
    }

    fn release(&self, id: TensorId) {
        self.shards.release(&tensor_name(id));
    }

    fn unchanged(&self) -> bool {
        self.shards.unchanged()
    }
}

/// `config.json` of a directory, not parsed yet, and where it is.
pub(crate) fn read_config(directory: &Path) -> Result<(PathBuf, Vec<u8>), SafetensorsSourceError> {
    let path = directory.join(CONFIG_FILE);
    match whole_file::read(&path, MAX_CONFIG_BYTES) {
        Ok(json) => Ok((path, json)),
        Err(source) => Err(SafetensorsSourceError::Read { path, source }),
    }
}

/// What the files call a tensor.
pub(crate) fn tensor_name(id: TensorId) -> String {
    match id {
        TensorId::TokenEmbedding => "model.embed_tokens.weight".to_owned(),
        TensorId::OutputNorm => "model.norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
        TensorId::FeedForwardNorm(layer) => format!("model.layers.{layer}.post_attention_layernorm.weight"),
        TensorId::QueryNorm(layer) => format!("model.layers.{layer}.self_attn.q_norm.weight"),
        TensorId::KeyNorm(layer) => format!("model.layers.{layer}.self_attn.k_norm.weight"),
        TensorId::Weight(layer, target) => format!("{}.weight", module_name(layer, target)),
        TensorId::Bias(layer, target) => format!("{}.bias", module_name(layer, target)),
    }
}

/// What transformers calls a linear layer.
pub(crate) fn module_name(layer: usize, target: Target) -> String {
    let name = match target {
        Target::Q => "self_attn.q_proj",
        Target::K => "self_attn.k_proj",
        Target::V => "self_attn.v_proj",
        Target::O => "self_attn.o_proj",
        Target::Gate => "mlp.gate_proj",
        Target::Up => "mlp.up_proj",
        Target::Down => "mlp.down_proj",
        Target::LmHead => return "lm_head".to_owned(),
    };
    format!("model.layers.{layer}.{name}")
}
