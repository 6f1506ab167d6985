//! The required options of a `config.json`, as they are stored.

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{HfConfigError, unsupported};
use crate::shape::{config::RopeScaling, rope::yarn_magnitude};

/// Options of a `config.json`. Missing values mean the defaults of transformers' configuration classes.
#[derive(Debug, Deserialize)]
pub(super) struct RawHfConfig {
    #[serde(default)]
    pub(super) architectures: Vec<String>,
    pub(super) vocab_size: Option<usize>,
    pub(super) hidden_size: Option<usize>,
    pub(super) intermediate_size: Option<usize>,
    pub(super) num_hidden_layers: Option<usize>,
    pub(super) num_attention_heads: Option<usize>,
    pub(super) num_key_value_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    pub(super) max_position_embeddings: Option<usize>,
    /// Phi's context length before stretching.
    pub(super) original_max_position_embeddings: Option<usize>,
    pub(super) rms_norm_eps: Option<f32>,
    pub(super) hidden_act: Option<String>,
    /// Gemma's name of `hidden_act`.
    pub(super) hidden_activation: Option<String>,
    pub(super) query_pre_attn_scalar: Option<f32>,
    /// Absence means the default limit, and null means no limit.
    #[serde(default, deserialize_with = "said")]
    pub(super) attn_logit_softcapping: Option<Option<f32>>,
    #[serde(default, deserialize_with = "said")]
    pub(super) final_logit_softcapping: Option<Option<f32>>,
    /// Factors in Granite models, here and in the next three fields.
    pub(super) embedding_multiplier: Option<f32>,
    pub(super) attention_multiplier: Option<f32>,
    pub(super) residual_multiplier: Option<f32>,
    pub(super) logits_scaling: Option<f32>,
    pub(super) use_bidirectional_attention: Option<bool>,
    pub(super) rope_theta: Option<f32>,
    /// Frequency base in Gemma's layers with a window.
    pub(super) rope_local_base_freq: Option<f32>,
    pub(super) rope_scaling: Option<RawRope>,
    /// Object of transformers 5 that replaces `rope_theta` and `rope_scaling`.
    pub(super) rope_parameters: Option<RawRope>,
    pub(super) partial_rotary_factor: Option<f32>,
    pub(super) tie_word_embeddings: Option<bool>,
    pub(super) attention_bias: Option<bool>,
    pub(super) mlp_bias: Option<bool>,
    pub(super) sliding_window: Option<usize>,
    pub(super) use_sliding_window: Option<bool>,
    pub(super) max_window_layers: Option<usize>,
    pub(super) layer_types: Option<Vec<String>>,
    /// One of this many layers has global attention.
    #[serde(alias = "_sliding_window_pattern")]
    pub(super) sliding_window_pattern: Option<usize>,
    /// Number of experts, under Mixtral's name and then under Qwen's; transformers 5 writes Mixtral's.
    pub(super) num_local_experts: Option<usize>,
    pub(super) num_experts: Option<usize>,
    pub(super) num_experts_per_tok: Option<usize>,
    pub(super) moe_intermediate_size: Option<usize>,
    pub(super) norm_topk_prob: Option<bool>,
    pub(super) decoder_sparse_step: Option<usize>,
    pub(super) mlp_only_layers: Option<Vec<usize>>,
    /// Limit of the gate's inputs in gpt-oss.
    pub(super) swiglu_limit: Option<f32>,
    pub(super) quantization_config: Option<Value>,
}

/// Distinguishes null from absence.
fn said<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f32>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

#[derive(Debug, Deserialize)]
pub(super) struct RawRope {
    pub(super) rope_type: Option<String>,
    /// Name of `rope_type` in old files; some files have both.
    #[serde(rename = "type")]
    pub(super) legacy_type: Option<String>,
    pub(super) rope_theta: Option<f32>,
    pub(super) factor: Option<f32>,
    pub(super) low_freq_factor: Option<f32>,
    pub(super) high_freq_factor: Option<f32>,
    pub(super) original_max_position_embeddings: Option<f32>,
    pub(super) partial_rotary_factor: Option<f32>,
    /// Divisors of longrope for sequences within the original context.
    pub(super) short_factor: Option<Vec<f32>>,
    pub(super) attention_factor: Option<f32>,
    /// Turns of YaRN's ramp.
    pub(super) beta_fast: Option<f32>,
    pub(super) beta_slow: Option<f32>,
    /// Whether YaRN's ramp begins and ends at whole features; true by default.
    pub(super) truncate: Option<bool>,
    /// Other form of YaRN's factor of rotated features.
    pub(super) mscale: Option<f32>,
    pub(super) mscale_all_dim: Option<f32>,
    /// Separate parameters by kind of layer, in place of all other fields.
    pub(super) full_attention: Option<Box<RawRope>>,
    pub(super) sliding_attention: Option<Box<RawRope>>,
}

impl RawRope {
    /// Returns these parameters and those for each kind of layer.
    pub(super) fn all(&self) -> impl Iterator<Item = &Self> {
        let of_layers = [&self.full_attention, &self.sliding_attention].into_iter().flatten();
        std::iter::once(self).chain(of_layers.map(|rope| &**rope))
    }

    /// Whether the type is longrope, under any of the names in Phi's files.
    pub(super) fn is_longrope(&self) -> bool {
        matches!(self.kind(), Some("longrope" | "su" | "yarn"))
    }

    /// Returns the frequencies for sequences within the original context.
    pub(super) fn longrope(&self) -> Result<RopeScaling, HfConfigError> {
        let factors = self.short_factor.clone();
        factors.map(RopeScaling::Factors).ok_or(HfConfigError::Missing("rope_scaling.short_factor"))
    }

    fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.legacy_type.as_deref())
    }

    /// Returns YaRN's factor of rotated features, or `None` for other types.
    pub(super) fn yarn_magnitude(&self) -> Option<f32> {
        let factor = self.factor.filter(|_| self.kind() == Some("yarn"))?;
        Some(self.attention_factor.unwrap_or_else(|| yarn_magnitude(factor)))
    }

    fn yarn(&self) -> Result<RopeScaling, HfConfigError> {
        let other =
            [("rope_scaling.mscale", self.mscale), ("rope_scaling.mscale_all_dim", self.mscale_all_dim)];
        if let Some((option, value)) = other.into_iter().find_map(|(option, value)| Some((option, value?))) {
            return Err(unsupported(option, value));
        }
        const ORIGINAL: &str = "rope_scaling.original_max_position_embeddings";
        Ok(RopeScaling::Yarn {
            factor: self.factor.ok_or(HfConfigError::Missing("rope_scaling.factor"))?,
            beta_fast: self.beta_fast.unwrap_or(32.0),
            beta_slow: self.beta_slow.unwrap_or(1.0),
            original_context: self
                .original_max_position_embeddings
                .ok_or(HfConfigError::Missing(ORIGINAL))?,
            truncate: self.truncate.unwrap_or(true),
        })
    }

    pub(super) fn scaling(&self) -> Result<RopeScaling, HfConfigError> {
        let factor = || self.factor.ok_or(HfConfigError::Missing("rope_scaling.factor"));
        match self.kind() {
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
            Some("yarn") => self.yarn(),
            Some(other) => Err(unsupported("rope_scaling.rope_type", other)),
        }
    }
}
