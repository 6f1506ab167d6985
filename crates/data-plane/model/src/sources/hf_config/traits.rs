//! Deviations of families from Llama, from the options of a `config.json`.

use super::{
    HfConfigError,
    raw::{RawHfConfig, RawRope},
    unsupported,
};
use crate::{
    shape::config::{ArchFlags, Rope, RopeScaling},
    sources::{families, family::Family, gemma},
};

impl RawHfConfig {
    pub(super) fn traits(
        &self,
        family: Family,
        [hidden_size, head_dim, layers]: [usize; 3],
    ) -> Result<ArchFlags, HfConfigError> {
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let magnitude = rope.and_then(RawRope::yarn_magnitude).filter(|&magnitude| magnitude != 1.0);
        let traits = match family {
            Family::Llama
            | Family::Mistral
            | Family::Mixtral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Qwen3Moe => ArchFlags::default(),
            Family::Granite => self.granite(),
            Family::Olmo2 => families::olmo2(),
            Family::Phi3 => self.phi3(head_dim),
            Family::Gemma2 => self.gemma2(hidden_size, layers)?,
            Family::Gemma3 => self.gemma3(hidden_size, layers)?,
            Family::GptOss => families::gpt_oss(
                self.swiglu_limit.unwrap_or(families::SWIGLU_LIMIT),
                self.global_layers(gemma::PATTERN_2, layers)?,
            ),
        };
        // Phi's longrope is named `yarn` in some files, and has a factor of its own.
        let rotary_magnitude = traits.rotary_magnitude.or(magnitude.filter(|_| family != Family::Phi3));
        Ok(ArchFlags { rotary_magnitude, ..traits })
    }

    fn granite(&self) -> ArchFlags {
        let scores = self.attention_multiplier.unwrap_or(1.0);
        families::granite([
            self.embedding_multiplier,
            Some(scores),
            self.residual_multiplier,
            self.logits_scaling,
        ])
    }

    fn phi3(&self, head_dim: usize) -> ArchFlags {
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let part = rope.and_then(|rope| rope.partial_rotary_factor).or(self.partial_rotary_factor);
        // transformers rounds down, too.
        let rotary_dim = (head_dim as f32 * part.unwrap_or(1.0)) as usize;
        families::phi3(head_dim, rotary_dim, self.longrope().map_or(1.0, |(_, magnitude)| magnitude))
    }

    /// Returns longrope's original context length and its factor of rotated features.
    fn longrope(&self) -> Option<(usize, f32)> {
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let rope = rope.filter(|rope| rope.is_longrope())?;
        let original = rope.original_max_position_embeddings.map(|length| length as usize);
        let original = original.or(self.original_max_position_embeddings).unwrap_or(4096);
        let stretched = self.max_position_embeddings.unwrap_or(original) as f32 / original as f32;
        let magnitude = families::longrope_magnitude(rope.factor.unwrap_or(stretched), original);
        Some((original, rope.attention_factor.unwrap_or(magnitude)))
    }

    /// Returns the maximum sequence length. With longrope, sequences beyond the original context would need
    /// other frequencies at all positions, so the original context is the limit.
    pub(super) fn context_length(&self, family: Family) -> Result<usize, HfConfigError> {
        let whole = self.max_position_embeddings.ok_or(HfConfigError::Missing("max_position_embeddings"))?;
        let longrope = self.longrope().filter(|_| family == Family::Phi3);
        Ok(longrope.map_or(whole, |(original, _)| original.min(whole)))
    }

    fn gemma2(&self, hidden_size: usize, layers: usize) -> Result<ArchFlags, HfConfigError> {
        let global = self.global_layers(gemma::PATTERN_2, layers)?;
        let traits = gemma::traits(hidden_size, self.query_pre_attn_scalar.unwrap_or(256.0), global);
        Ok(ArchFlags {
            score_cap: self.attn_logit_softcapping.unwrap_or(Some(gemma::SCORE_CAP)),
            logit_cap: self.final_logit_softcapping.unwrap_or(Some(gemma::LOGIT_CAP)),
            ..traits
        })
    }

    fn gemma3(&self, hidden_size: usize, layers: usize) -> Result<ArchFlags, HfConfigError> {
        let local = self.rope_parameters.as_ref().and_then(|rope| rope.sliding_attention.as_deref());
        let theta = local.and_then(|rope| rope.rope_theta).or(self.rope_local_base_freq);
        let scaling = local.map_or(Ok(RopeScaling::None), RawRope::scaling)?;
        let local_rope = Rope { theta: theta.unwrap_or(gemma::LOCAL_THETA), scaling };
        let global = self.global_layers(gemma::PATTERN_3, layers)?;
        let traits = gemma::traits(hidden_size, self.query_pre_attn_scalar.unwrap_or(256.0), global);
        Ok(ArchFlags { local_rope: Some(local_rope), ..traits })
    }

    /// Returns the layers with global attention; by default one of `usual` layers.
    fn global_layers(&self, usual: usize, layers: usize) -> Result<Vec<usize>, HfConfigError> {
        let Some(types) = &self.layer_types else {
            let pattern = self.sliding_window_pattern.unwrap_or(usual);
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

    /// Returns the sliding window, which must be equal in all layers without global attention.
    pub(super) fn window(&self, family: Family, layers: usize) -> Result<Option<usize>, HfConfigError> {
        let window = match family {
            Family::Llama | Family::Granite | Family::Olmo2 => return Ok(None),
            Family::Gemma2 | Family::Gemma3 => return Ok(Some(self.sliding_window.unwrap_or(4096))),
            Family::GptOss => return Ok(Some(self.sliding_window.unwrap_or(families::GPT_OSS_WINDOW))),
            Family::Mistral | Family::Mixtral | Family::Phi3 => self.sliding_window,
            Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
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
        // Qwen models, except its mixtures, use the window from this layer on.
        match (family, self.max_window_layers) {
            (Family::Mistral | Family::Mixtral | Family::Phi3 | Family::Qwen3Moe, _) | (_, Some(0)) => {
                Ok(Some(window))
            }
            (_, Some(first)) if first >= layers => Ok(None),
            (_, first) => Err(unsupported("max_window_layers", first)),
        }
    }
}
