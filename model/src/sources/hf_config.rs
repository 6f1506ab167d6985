//! `config.json` of a Hugging Face model: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,
//! Gemma3ForCausalLM.

use files::small_json;
use serde::Deserialize;
use serde_json::Value;

use crate::shape::{
    config::{ModelConfig, Rope, RopeScaling, Traits},
    layout::{self, ConfigError},
    source::Target,
};
use crate::sources::{
    gemma,
    quantization::{Quantization, Unsupported},
};

/// Why a `config.json` is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum HfConfigError {
    #[error("it is not the JSON of a model: {0}")]
    Json(#[from] serde_json::Error),
    #[error("`{0}` is missing")]
    Missing(&'static str),
    #[error("`{option}` is {value}, which is not supported")]
    Unsupported { option: &'static str, value: String },
    #[error("{0}")]
    Shape(#[from] ConfigError),
}

/// What a `config.json` says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HfConfig {
    /// The model's shape, checked.
    pub(crate) model: ModelConfig,
    /// The linear layers of a block that have a bias.
    pub(crate) biased: Vec<Target>,
    /// How the weights of norms are stored.
    pub(crate) norms: StoredNorms,
    /// How linear layers were quantized, if they were.
    pub(crate) quantization: Option<Quantization>,
}

/// How the weights of norms are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredNorms {
    /// As they are multiplied with.
    Whole,
    /// Less 1 (Gemma).
    LessOne,
}

/// The architectures that are read, and what they do not write into their files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
}

impl Architecture {
    fn named(name: &str) -> Option<Self> {
        match name {
            "LlamaForCausalLM" => Some(Self::Llama),
            "MistralForCausalLM" => Some(Self::Mistral),
            "Qwen2ForCausalLM" => Some(Self::Qwen2),
            "Qwen3ForCausalLM" => Some(Self::Qwen3),
            "Gemma3ForCausalLM" => Some(Self::Gemma3),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }
}

/// The options that matter. Defaults are those of transformers' configuration classes.
#[derive(Debug, Deserialize)]
struct Raw {
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<String>,
    /// What Gemma calls the above.
    hidden_activation: Option<String>,
    query_pre_attn_scalar: Option<f32>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    use_bidirectional_attention: Option<bool>,
    rope_theta: Option<f32>,
    /// Of Gemma's layers with a window.
    rope_local_base_freq: Option<f32>,
    rope_scaling: Option<RawRope>,
    /// Where transformers 5 puts both of the above.
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f32>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// Of so many layers one attends to everything.
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: Option<usize>,
    quantization_config: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    /// What old files call the above; some have both.
    #[serde(rename = "type")]
    legacy_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
    partial_rotary_factor: Option<f32>,
    /// Where layers differ, in place of all of the above.
    full_attention: Option<Box<RawRope>>,
    sliding_attention: Option<Box<RawRope>>,
}

impl HfConfig {
    /// Reads and checks a `config.json`.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, HfConfigError> {
        let raw: Raw = small_json::parse(json)?;
        let name = raw.architectures.first().ok_or(HfConfigError::Missing("architectures"))?;
        let architecture = Architecture::named(name).ok_or_else(|| unsupported("architectures", name))?;
        refuse_unsupported(&raw, architecture)?;
        let model = raw.model(architecture)?;
        layout::check_config(&model)?;
        let norms =
            if architecture == Architecture::Gemma3 { StoredNorms::LessOne } else { StoredNorms::Whole };
        let quantization = raw.quantization_config.as_ref().map(Quantization::parse).transpose();
        let quantization = quantization
            .map_err(|Unsupported { option, value }| HfConfigError::Unsupported { option, value })?;
        Ok(Self { model, biased: raw.biased(architecture), norms, quantization })
    }
}

fn unsupported(option: &'static str, value: impl std::fmt::Debug) -> HfConfigError {
    HfConfigError::Unsupported { option, value: format!("{value:?}") }
}

fn refuse_unsupported(raw: &Raw, architecture: Architecture) -> Result<(), HfConfigError> {
    let (option, found, known) = match architecture {
        Architecture::Gemma3 => ("hidden_activation", &raw.hidden_activation, "gelu_pytorch_tanh"),
        _ => ("hidden_act", &raw.hidden_act, "silu"),
    };
    if let Some(activation) = found.as_ref().filter(|activation| *activation != known) {
        return Err(unsupported(option, activation));
    }
    let caps = [
        ("attn_logit_softcapping", raw.attn_logit_softcapping),
        ("final_logit_softcapping", raw.final_logit_softcapping),
    ];
    if let Some((option, cap)) = caps.into_iter().find(|(_, cap)| cap.is_some()) {
        return Err(unsupported(option, cap));
    }
    if raw.use_bidirectional_attention == Some(true) {
        return Err(unsupported("use_bidirectional_attention", true));
    }
    let ropes = [&raw.rope_scaling, &raw.rope_parameters].into_iter().flatten();
    let ropes: Vec<&RawRope> = ropes.flat_map(RawRope::all).collect();
    if architecture != Architecture::Gemma3 && ropes.iter().any(|rope| rope.full_attention.is_some()) {
        return Err(unsupported("rope_parameters", "layers with a rotary embedding of their own"));
    }
    let partial = ropes.iter().map(|rope| rope.partial_rotary_factor);
    let partial = partial.chain([raw.partial_rotary_factor]).flatten();
    match partial.into_iter().find(|&factor| factor != 1.0) {
        Some(factor) => Err(unsupported("partial_rotary_factor", factor)),
        None => Ok(()),
    }
}

impl Raw {
    fn model(&self, architecture: Architecture) -> Result<ModelConfig, HfConfigError> {
        let hidden_size = self.hidden_size.ok_or(HfConfigError::Missing("hidden_size"))?;
        let heads = self.num_attention_heads.ok_or(HfConfigError::Missing("num_attention_heads"))?;
        let layers = self.num_hidden_layers.ok_or(HfConfigError::Missing("num_hidden_layers"))?;
        Ok(ModelConfig {
            architecture: architecture.name().to_owned(),
            vocab_size: self.vocab_size.ok_or(HfConfigError::Missing("vocab_size"))?,
            hidden_size,
            intermediate_size: self.intermediate_size.ok_or(HfConfigError::Missing("intermediate_size"))?,
            layers,
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            head_dim: self.head_dim.unwrap_or_else(|| match architecture {
                Architecture::Gemma3 => 256,
                _ => hidden_size.checked_div(heads).unwrap_or(0),
            }),
            norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope: self.rope(architecture)?,
            qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Gemma3),
            tied_head: self.tie_word_embeddings.unwrap_or(architecture == Architecture::Gemma3),
            context_length: self
                .max_position_embeddings
                .ok_or(HfConfigError::Missing("max_position_embeddings"))?,
            sliding_window: self.window(architecture, layers)?,
            traits: match architecture {
                Architecture::Gemma3 => self.gemma3(hidden_size, layers)?,
                _ => Traits::default(),
            },
        })
    }

    /// What Gemma 3 does that Llama does not.
    fn gemma3(&self, hidden_size: usize, layers: usize) -> Result<Traits, HfConfigError> {
        let local = self.rope_parameters.as_ref().and_then(|rope| rope.sliding_attention.as_deref());
        let theta = local.and_then(|rope| rope.rope_theta).or(self.rope_local_base_freq);
        let scaling = local.map_or(Ok(RopeScaling::None), RawRope::scaling)?;
        let local_rope = Rope { theta: theta.unwrap_or(gemma::LOCAL_THETA), scaling };
        let query_scalar = self.query_pre_attn_scalar.unwrap_or(256.0);
        Ok(gemma::gemma3(hidden_size, query_scalar, local_rope, self.global_layers(layers)?))
    }

    /// The layers that attend to everything.
    fn global_layers(&self, layers: usize) -> Result<Vec<usize>, HfConfigError> {
        let Some(types) = &self.layer_types else {
            let pattern = self.sliding_window_pattern.unwrap_or(gemma::PATTERN);
            return Ok(gemma::every(pattern, layers));
        };
        let known = |kind: &&String| ["full_attention", "sliding_attention"].contains(&kind.as_str());
        if let Some(other) = types.iter().find(|kind| !known(kind)) {
            return Err(unsupported("layer_types", other));
        }
        if types.len() != layers {
            return Err(unsupported("layer_types", format!("{} types of {layers} layers", types.len())));
        }
        Ok((0..layers).filter(|&layer| types[layer] == "full_attention").collect())
    }

    fn biased(&self, architecture: Architecture) -> Vec<Target> {
        let attention: &[Target] = match architecture {
            Architecture::Qwen2 => &[Target::Q, Target::K, Target::V],
            Architecture::Llama | Architecture::Qwen3 | Architecture::Gemma3
                if self.attention_bias == Some(true) =>
            {
                &[Target::Q, Target::K, Target::V, Target::O]
            }
            _ => &[],
        };
        let feed_forward: &[Target] = match architecture {
            Architecture::Llama if self.mlp_bias == Some(true) => &[Target::Gate, Target::Up, Target::Down],
            _ => &[],
        };
        [attention, feed_forward].concat()
    }

    fn rope(&self, architecture: Architecture) -> Result<Rope, HfConfigError> {
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let rope = rope.map(|rope| rope.full_attention.as_deref().unwrap_or(rope));
        let theta = rope.and_then(|rope| rope.rope_theta).or(self.rope_theta);
        let theta = theta.unwrap_or(if architecture == Architecture::Gemma3 { 1e6 } else { 1e4 });
        let scaling = rope.map_or(Ok(RopeScaling::None), RawRope::scaling)?;
        Ok(Rope { theta, scaling })
    }

    /// How far attention looks back, which must be the same in every layer that does not see everything.
    fn window(&self, architecture: Architecture, layers: usize) -> Result<Option<usize>, HfConfigError> {
        let window = match architecture {
            Architecture::Llama => return Ok(None),
            Architecture::Gemma3 => return Ok(Some(self.sliding_window.unwrap_or(4096))),
            Architecture::Mistral => self.sliding_window,
            Architecture::Qwen2 | Architecture::Qwen3 => {
                self.sliding_window.filter(|_| self.use_sliding_window == Some(true))
            }
        };
        let Some(window) = window else { return Ok(None) };
        if let Some(types) = &self.layer_types {
            let sliding = types.iter().filter(|kind| *kind == "sliding_attention").count();
            return match sliding {
                0 => Ok(None),
                _ if sliding == types.len() => Ok(Some(window)),
                _ => Err(unsupported("layer_types", "full and sliding attention mixed")),
            };
        }
        // Qwen slides from this layer on.
        match (architecture, self.max_window_layers) {
            (Architecture::Mistral, _) | (_, Some(0)) => Ok(Some(window)),
            (_, Some(first)) if first >= layers => Ok(None),
            (_, first) => Err(unsupported("max_window_layers", first)),
        }
    }
}

impl RawRope {
    /// It, and those of kinds of layers.
    fn all(&self) -> impl Iterator<Item = &Self> {
        let of_layers = [&self.full_attention, &self.sliding_attention].into_iter().flatten();
        std::iter::once(self).chain(of_layers.map(|rope| &**rope))
    }

    fn scaling(&self) -> Result<RopeScaling, HfConfigError> {
        let factor = || self.factor.ok_or(HfConfigError::Missing("rope_scaling.factor"));
        match self.rope_type.as_deref().or(self.legacy_type.as_deref()) {
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: self
                    .low_freq_factor
                    .ok_or(HfConfigError::Missing("rope_scaling.low_freq_factor"))?,
                high_freq_factor: self
                    .high_freq_factor
                    .ok_or(HfConfigError::Missing("rope_scaling.high_freq_factor"))?,
                original_context: self
                    .original_max_position_embeddings
                    .ok_or(HfConfigError::Missing("rope_scaling.original_max_position_embeddings"))?,
            }),
            Some(other) => Err(unsupported("rope_scaling.rope_type", other)),
        }
    }
}
