//! Reads `config.json` of a Hugging Face model.
//!
//! # Layout
//!
//! - this file: the shape of the model.
//! - `raw`: the options as they are stored.
//! - `traits`: deviations of families from Llama.
//! - `experts`: configuration of mixtures of experts.

mod experts;
mod raw;
mod traits;

use model_files::bounded_json;

use self::raw::{RawHfConfig, RawRope};
use crate::sources::quantization::{Quantization, UnsupportedOption};
use crate::{
    shape::{
        config::{ModelConfig, Rope, RopeScaling},
        layout::{self, ModelConfigError},
        source::Target,
    },
    sources::{families::GPT_OSS_THETA, family::Family},
};

/// Reasons for refusing a `config.json`.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum HfConfigError {
    #[error("it is not the configuration of a model: {0}")]
    Json(#[from] serde_json::Error),
    #[error("`{0}` is missing")]
    Missing(&'static str),
    #[error("`{option}` is {value}, which is not supported")]
    Unsupported { option: &'static str, value: String },
    #[error("{0}")]
    Shape(#[from] ModelConfigError),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HfConfig {
    pub(crate) model: ModelConfig,
    /// Linear layers of a block with a bias.
    pub(crate) biased: Vec<Target>,
    /// Whether norm weights are stored minus 1 (Gemma).
    pub(crate) norms_less_one: bool,
    pub(crate) quantization: Option<Quantization>,
    /// Whether experts are stored as MXFP4 blocks (gpt-oss).
    pub(crate) has_mxfp4_experts: bool,
}

impl HfConfig {
    pub(crate) fn parse(json: &[u8]) -> Result<Self, HfConfigError> {
        let raw: RawHfConfig = bounded_json::parse(json)?;
        let name = raw.architectures.first().ok_or(HfConfigError::Missing("architectures"))?;
        let family = Family::of_class(name).ok_or_else(|| unsupported("architectures", name))?;
        refuse_unsupported(&raw, family)?;
        let model = raw.model(family)?;
        layout::check_config(&model)?;
        let quantized = raw.quantization_config.as_ref();
        let has_mxfp4_experts = family == Family::GptOss && quantized.is_some_and(Quantization::is_mxfp4);
        let quantized = quantized.filter(|_| !has_mxfp4_experts);
        let quantization = quantized.map(Quantization::parse).transpose();
        let quantization = quantization
            .map_err(|UnsupportedOption { option, value }| HfConfigError::Unsupported { option, value })?;
        let (biased, norms_less_one) = (raw.biased(family), family.is_gemma());
        Ok(Self { model, biased, norms_less_one, quantization, has_mxfp4_experts })
    }
}

fn unsupported(option: &'static str, value: impl std::fmt::Debug) -> HfConfigError {
    HfConfigError::Unsupported { option, value: format!("{value:?}") }
}

fn refuse_unsupported(raw: &RawHfConfig, family: Family) -> Result<(), HfConfigError> {
    let (option, found, known) = match family.is_gemma() {
        true => ("hidden_activation", &raw.hidden_activation, "gelu_pytorch_tanh"),
        false => ("hidden_act", &raw.hidden_act, "silu"),
    };
    if let Some(activation) = found.as_ref().filter(|activation| *activation != known) {
        return Err(unsupported(option, activation));
    }
    let caps = [
        ("attn_logit_softcapping", raw.attn_logit_softcapping),
        ("final_logit_softcapping", raw.final_logit_softcapping),
    ];
    let capped = caps.into_iter().find_map(|(option, cap)| Some((option, cap.flatten()?)));
    if let Some((option, cap)) = capped.filter(|_| family != Family::Gemma2) {
        return Err(unsupported(option, cap));
    }
    if raw.use_bidirectional_attention == Some(true) {
        return Err(unsupported("use_bidirectional_attention", true));
    }
    let ropes = [&raw.rope_scaling, &raw.rope_parameters].into_iter().flatten();
    let ropes: Vec<&RawRope> = ropes.flat_map(RawRope::all).collect();
    if family != Family::Gemma3 && ropes.iter().any(|rope| rope.full_attention.is_some()) {
        return Err(unsupported("rope_parameters", "layers with a rotary embedding of their own"));
    }
    let partial = ropes.iter().map(|rope| rope.partial_rotary_factor);
    let partial = partial.chain([raw.partial_rotary_factor]).flatten();
    match partial.into_iter().find(|&factor| factor != 1.0 && family != Family::Phi3) {
        Some(factor) => Err(unsupported("partial_rotary_factor", factor)),
        None => Ok(()),
    }
}

impl RawHfConfig {
    fn model(&self, family: Family) -> Result<ModelConfig, HfConfigError> {
        let hidden_size = self.hidden_size.ok_or(HfConfigError::Missing("hidden_size"))?;
        let heads = self.num_attention_heads.ok_or(HfConfigError::Missing("num_attention_heads"))?;
        let layers = self.num_hidden_layers.ok_or(HfConfigError::Missing("num_hidden_layers"))?;
        let head_dim = self.head_dim.unwrap_or_else(|| match family.is_gemma() {
            true => 256,
            false if family == Family::GptOss => 64,
            false => hidden_size.checked_div(heads).unwrap_or(0),
        });
        Ok(ModelConfig {
            architecture: family.name().to_owned(),
            vocab_size: self.vocab_size.ok_or(HfConfigError::Missing("vocab_size"))?,
            hidden_size,
            intermediate_size: self.intermediate_size.ok_or(HfConfigError::Missing("intermediate_size"))?,
            layers,
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            head_dim,
            norm_eps: self.rms_norm_eps.unwrap_or(match family {
                Family::Olmo2 | Family::Phi3 | Family::Mixtral | Family::GptOss => 1e-5,
                _ => 1e-6,
            }),
            rope: self.rope(family)?,
            qk_norm: family.norms_queries(),
            tied_head: self.tie_word_embeddings.unwrap_or(family.is_gemma()),
            context_length: self.context_length(family)?,
            sliding_window: self.window(family, layers)?,
            traits: self.traits(family, [hidden_size, head_dim, layers])?,
            experts: self.experts(family, layers)?,
        })
    }

    fn biased(&self, family: Family) -> Vec<Target> {
        let attention: &[Target] = match family {
            // These families have no such option.
            Family::Qwen2 | Family::Mistral | Family::Mixtral | Family::Phi3 => family.biased(),
            Family::GptOss if self.attention_bias != Some(false) => family.biased(),
            _ if self.attention_bias == Some(true) => &[Target::Q, Target::K, Target::V, Target::O],
            _ => &[],
        };
        let feed_forward: &[Target] = match family {
            Family::Llama | Family::Granite if self.mlp_bias == Some(true) => {
                &[Target::Gate, Target::Up, Target::Down]
            }
            _ => &[],
        };
        [attention, feed_forward].concat()
    }

    fn rope(&self, family: Family) -> Result<Rope, HfConfigError> {
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let rope = rope.map(|rope| rope.full_attention.as_deref().unwrap_or(rope));
        let theta = rope.and_then(|rope| rope.rope_theta).or(self.rope_theta);
        let theta = theta.unwrap_or(match family {
            Family::Gemma3 | Family::Mixtral => 1e6,
            Family::GptOss => GPT_OSS_THETA,
            _ => 1e4,
        });
        let scaling = match rope {
            Some(rope) if family == Family::Phi3 && rope.is_longrope() => rope.longrope()?,
            Some(rope) => rope.scaling()?,
            None if family == Family::GptOss => return Err(HfConfigError::Missing("rope_parameters")),
            None => RopeScaling::None,
        };
        Ok(Rope { theta, scaling })
    }
}
