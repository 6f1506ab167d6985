//! A model in a GGUF file: llama (Llama 2 and 3, Mistral, TinyLlama, SmolLM2), qwen2, qwen3 and gemma3.

use std::{
    borrow::Cow,
    collections::HashSet,
    path::{Path, PathBuf},
};

use files::gguf::{GgufError, GgufFile, TensorView};
use kernels::TensorType;

use crate::{
    shape::{
        config::{ModelConfig, Rope, RopeScaling, Traits},
        layout::{self, BLOCK_TARGETS, ConfigError, LayoutError},
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::gemma,
};

/// One divisor for each rotary frequency, where a file has them.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Why a GGUF file is no model that can be run.
#[derive(Debug, thiserror::Error)]
pub enum GgufSourceError {
    /// The file itself is broken.
    #[error(transparent)]
    File(#[from] GgufError),
    /// A metadata key is missing.
    #[error("{}: metadata `{key}` is missing; convert the model again", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// The model needs something that is not implemented.
    #[error("{}: {what} is not supported; use a llama, qwen2, qwen3 or gemma3 model without it", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What the model needs.
        what: String,
    },
    /// The declared shape makes no sense.
    #[error("{}: {source}; convert the model again", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The tensors are not those the shape calls for.
    #[error("{}: {source}; fetch or convert the model again", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: LayoutError,
    },
}

/// The architectures that are read, and how their files differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Architecture {
    /// Stores the rows of q and k for interleaved rotary pairs.
    Llama,
    Qwen2,
    Qwen3,
    /// Stores norms with the 1 added that others add as they read them.
    Gemma3,
}

impl Architecture {
    fn named(name: &str) -> Option<Self> {
        match name {
            "llama" => Some(Self::Llama),
            "qwen2" => Some(Self::Qwen2),
            "qwen3" => Some(Self::Qwen3),
            "gemma3" => Some(Self::Gemma3),
            _ => None,
        }
    }

    /// The linear layers that always have a bias.
    fn biased(self) -> &'static [Target] {
        match self {
            Self::Qwen2 => &[Target::Q, Target::K, Target::V],
            Self::Llama | Self::Qwen3 | Self::Gemma3 => &[],
        }
    }
}

/// A model in a GGUF file, opened and checked.
#[derive(Debug)]
pub struct GgufSource {
    file: GgufFile,
    architecture: Architecture,
    config: ModelConfig,
}

impl GgufSource {
    /// Maps the file at `path` and checks that it holds a whole model of a known architecture.
    ///
    /// # Errors
    /// If the file is broken, of another architecture, or short of a tensor.
    pub fn open(path: &Path) -> Result<Self, GgufSourceError> {
        Self::new(GgufFile::open(path)?)
    }

    /// Checks that an open file holds a whole model of a known architecture.
    ///
    /// # Errors
    /// If it is of another architecture, or short of a tensor.
    pub fn new(file: GgufFile) -> Result<Self, GgufSourceError> {
        let reader = Reader::new(&file)?;
        reader.refuse_unsupported()?;
        let architecture = reader.architecture;
        let config = reader.config()?;
        layout::check_config(&config)
            .map_err(|source| GgufSourceError::Config { path: file.path().to_path_buf(), source })?;
        let source = Self { file, architecture, config };
        source.check_tensors()?;
        Ok(source)
    }

    /// The open file, for its tokenizer and chat template.
    #[must_use]
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    fn check_tensors(&self) -> Result<(), GgufSourceError> {
        let shape = |name: &str| self.file.tensor(name).map(|view| [view.rows(), view.cols()]);
        // Biases are optional: those that are there are checked like everything else.
        let present = |id: &TensorId| self.file.tensor(&tensor_name(*id)).is_some();
        let biases = (0..self.config.layers)
            .flat_map(|layer| BLOCK_TARGETS.map(|target| TensorId::Bias(layer, target)));
        let expected: Vec<TensorId> = layout::required_tensors(&self.config, self.architecture.biased())
            .chain(biases.filter(present))
            .collect();
        layout::check_tensors(&self.config, expected.iter().copied(), tensor_name, shape)
            .map_err(|source| GgufSourceError::Layout { path: self.file.path().to_path_buf(), source })?;
        let mut known: HashSet<String> = expected.iter().map(|&id| tensor_name(id)).collect();
        known.insert(ROPE_FACTORS.to_owned());
        for (name, view) in self.file.tensors() {
            if !known.contains(name) {
                return Err(self.unsupported(format!("tensor `{name}`")));
            }
            if view.rows() == 1 && view.kind.block_elements() != 1 {
                return Err(self.unsupported(format!("the quantized vector `{name}`")));
            }
        }
        Ok(())
    }

    fn unsupported(&self, what: String) -> GgufSourceError {
        GgufSourceError::Unsupported { path: self.file.path().to_path_buf(), what }
    }

    fn is_interleaved(&self, id: TensorId) -> bool {
        self.architecture == Architecture::Llama
            && matches!(
                id,
                TensorId::Weight(_, Target::Q | Target::K) | TensorId::Bias(_, Target::Q | Target::K)
            )
    }
}

impl WeightSource for GgufSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let TensorView { kind, data, .. } = self.file.tensor(&tensor_name(id))?;
        let [rows, cols] = layout::tensor_shape(&self.config, id);
        let data = if self.is_interleaved(id) {
            // An output feature is a row of a matrix, and an element of a bias.
            let features = if let TensorId::Bias(..) = id { cols } else { rows };
            Cow::Owned(half_rotation_rows(data, data.len() / features, self.config.head_dim))
        } else {
            Cow::Borrowed(data)
        };
        Some(Tensor { kind, rows, cols, data })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        Some(self.file.tensor(&tensor_name(id))?.kind)
    }

    fn release(&self, id: TensorId) {
        self.file.release(&tensor_name(id));
    }

    fn unchanged(&self) -> bool {
        self.file.unchanged()
    }
}

/// Reorders the output features of q or k from interleaved rotary pairs, `(0, 1), (2, 3), ...`, to pairs half a head
/// apart, `(0, d/2), (1, d/2 + 1), ...`. `data` holds whole heads, each feature `feature_bytes` long; features are
/// moved and never looked into, so any encoding will do.
pub(crate) fn half_rotation_rows(data: &[u8], feature_bytes: usize, head_dim: usize) -> Vec<u8> {
    let mut reordered = Vec::with_capacity(data.len());
    for head in data.chunks_exact(feature_bytes * head_dim) {
        for first in [0, feature_bytes] {
            for pair in head.chunks_exact(2 * feature_bytes) {
                reordered.extend_from_slice(&pair[first..first + feature_bytes]);
            }
        }
    }
    reordered
}

/// What the file calls a tensor.
pub(crate) fn tensor_name(id: TensorId) -> String {
    match id {
        TensorId::TokenEmbedding => "token_embd.weight".to_owned(),
        TensorId::OutputNorm => "output_norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => format!("blk.{layer}.attn_norm.weight"),
        TensorId::FeedForwardNorm(layer) => format!("blk.{layer}.ffn_norm.weight"),
        TensorId::AttentionUpdateNorm(layer) => format!("blk.{layer}.post_attention_norm.weight"),
        TensorId::FeedForwardUpdateNorm(layer) => format!("blk.{layer}.post_ffw_norm.weight"),
        TensorId::QueryNorm(layer) => format!("blk.{layer}.attn_q_norm.weight"),
        TensorId::KeyNorm(layer) => format!("blk.{layer}.attn_k_norm.weight"),
        TensorId::Weight(layer, target) => format!("{}.weight", linear_name(layer, target)),
        TensorId::Bias(layer, target) => format!("{}.bias", linear_name(layer, target)),
    }
}

/// What GGUF files call a linear layer.
pub(crate) fn linear_name(layer: usize, target: Target) -> String {
    let name = match target {
        Target::Q => "attn_q",
        Target::K => "attn_k",
        Target::V => "attn_v",
        Target::O => "attn_output",
        Target::Gate => "ffn_gate",
        Target::Up => "ffn_up",
        Target::Down => "ffn_down",
        Target::LmHead => return "output".to_owned(),
    };
    format!("blk.{layer}.{name}")
}

/// Reads a file's metadata, whose keys begin with the architecture's name.
struct Reader<'a> {
    file: &'a GgufFile,
    prefix: &'a str,
    architecture: Architecture,
}

impl<'a> Reader<'a> {
    fn new(file: &'a GgufFile) -> Result<Self, GgufSourceError> {
        const KEY: &str = "general.architecture";
        let path = || file.path().to_path_buf();
        let prefix = file
            .str(KEY)?
            .ok_or_else(|| GgufSourceError::MissingKey { path: path(), key: KEY.to_owned() })?;
        let architecture = Architecture::named(prefix).ok_or_else(|| GgufSourceError::Unsupported {
            path: path(),
            what: format!("the architecture \"{}\"", prefix.escape_debug()),
        })?;
        Ok(Self { file, prefix, architecture })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn count(&self, name: &str) -> Result<Option<usize>, GgufSourceError> {
        Ok(self.file.usize(&self.key(name))?)
    }

    fn required(&self, name: &str) -> Result<usize, GgufSourceError> {
        self.count(name)?.ok_or_else(|| self.missing(self.key(name)))
    }

    fn number(&self, name: &str) -> Result<Option<f32>, GgufSourceError> {
        Ok(self.file.f32(&self.key(name))?)
    }

    fn missing(&self, key: String) -> GgufSourceError {
        GgufSourceError::MissingKey { path: self.file.path().to_path_buf(), key }
    }

    fn unsupported(&self, what: impl Into<String>) -> GgufSourceError {
        GgufSourceError::Unsupported { path: self.file.path().to_path_buf(), what: what.into() }
    }

    fn refuse_unsupported(&self) -> Result<(), GgufSourceError> {
        if let Some(kind) = self.file.str("general.type")?.filter(|kind| *kind != "model") {
            return Err(self.unsupported(format!("a file of type \"{}\" as a model", kind.escape_debug())));
        }
        if self.file.u32("split.count")?.unwrap_or(1) > 1 {
            return Err(
                self.unsupported("a model split over several files (llama-gguf-split --merge joins them)")
            );
        }
        if self.count("expert_count")?.unwrap_or(0) > 0 {
            return Err(self.unsupported("a mixture of experts"));
        }
        for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if self.number(cap)?.is_some_and(|cap| cap > 0.0) {
                return Err(self.unsupported(format!("`{}`", self.key(cap))));
            }
        }
        if self.file.bool(&self.key("attention.causal"))? == Some(false) {
            return Err(self.unsupported("attention that is not causal"));
        }
        Ok(())
    }

    fn config(&self) -> Result<ModelConfig, GgufSourceError> {
        let embedding = self.file.tensor("token_embd.weight");
        let hidden_size = self.required("embedding_length")?;
        let heads = self.required("attention.head_count")?;
        let head_dim = self.head_dim(hidden_size, heads)?;
        let layers = self.required("block_count")?;
        let is_gemma3 = self.architecture == Architecture::Gemma3;
        Ok(ModelConfig {
            architecture: self.prefix.to_owned(),
            vocab_size: embedding.ok_or_else(|| self.missing("token_embd.weight".to_owned()))?.rows(),
            hidden_size,
            intermediate_size: self.required("feed_forward_length")?,
            layers,
            heads,
            kv_heads: self.count("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            norm_eps: self
                .number("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| self.missing(self.key("attention.layer_norm_rms_epsilon")))?,
            rope: Rope {
                theta: self.number("rope.freq_base")?.unwrap_or(if is_gemma3 { 1e6 } else { 1e4 }),
                scaling: self.scaling()?,
            },
            qk_norm: matches!(self.architecture, Architecture::Qwen3 | Architecture::Gemma3),
            tied_head: self.file.tensor("output.weight").is_none(),
            context_length: self.required("context_length")?,
            sliding_window: self.count("attention.sliding_window")?.filter(|&window| window > 0),
            traits: if is_gemma3 { self.gemma3(hidden_size, heads, layers)? } else { Traits::default() },
        })
    }

    /// What Gemma 3 does that Llama does not.
    fn gemma3(&self, hidden_size: usize, heads: usize, layers: usize) -> Result<Traits, GgufSourceError> {
        let scaled_by = gemma::query_scalar(hidden_size, heads, self.head_dim(hidden_size, heads)?, layers);
        let theta = self.number("rope.freq_base_swa")?.unwrap_or(gemma::LOCAL_THETA);
        let local_rope = Rope { theta, scaling: RopeScaling::None };
        Ok(gemma::gemma3(hidden_size, scaled_by, local_rope, gemma::every(gemma::PATTERN, layers)))
    }

    fn head_dim(&self, hidden_size: usize, heads: usize) -> Result<usize, GgufSourceError> {
        let by_width = hidden_size.checked_div(heads).unwrap_or(0);
        let head_dim = self.count("attention.key_length")?.unwrap_or(by_width);
        if self.count("attention.value_length")?.is_some_and(|width| width != head_dim) {
            return Err(self.unsupported("a width of value heads that is not that of key heads"));
        }
        if self.count("rope.dimension_count")?.is_some_and(|width| width != head_dim) {
            return Err(self.unsupported("a rotary embedding of a part of each head"));
        }
        Ok(head_dim)
    }

    fn scaling(&self) -> Result<RopeScaling, GgufSourceError> {
        let kind = self.file.str(&self.key("rope.scaling.type"))?;
        // Old files declare linear scaling by its factor alone.
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        let linear = match (kind, factor) {
            (None | Some("none"), None) => RopeScaling::None,
            (Some("none"), Some(_)) => RopeScaling::None,
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (Some("linear"), None) => return Err(self.missing(self.key("rope.scaling.factor"))),
            (Some(other), _) => {
                return Err(self.unsupported(format!("rope scaling of type \"{}\"", other.escape_debug())));
            }
        };
        match (self.factors()?, linear) {
            (None, linear) => Ok(linear),
            (Some(factors), RopeScaling::None) => Ok(RopeScaling::Factors(factors)),
            (Some(_), _) => Err(self.unsupported(format!("linear rope scaling beside `{ROPE_FACTORS}`"))),
        }
    }

    fn factors(&self) -> Result<Option<Vec<f32>>, GgufSourceError> {
        let Some(view) = self.file.tensor(ROPE_FACTORS) else {
            return Ok(None);
        };
        if view.kind != TensorType::F32 {
            return Err(self.unsupported(format!("{:?} for `{ROPE_FACTORS}`", view.kind)));
        }
        let (numbers, _) = view.data.as_chunks();
        Ok(Some(numbers.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()))
    }
}
