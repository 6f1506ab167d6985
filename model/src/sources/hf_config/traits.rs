//! What families do that Llama does not, by the options of a `config.json`.

use super::{
    HfConfigError,
    raw::{Raw, RawRope},
    unsupported,
};
use crate::{
    shape::config::{Rope, RopeScaling, Traits},
    sources::{family::Family, gemma, granite},
};

impl Raw {
    /// What a model of this family does that Llama does not.
    pub(super) fn traits(
        &self,
        family: Family,
        hidden_size: usize,
        layers: usize,
    ) -> Result<Traits, HfConfigError> {
        Ok(match family {
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => Traits::default(),
            Family::Granite => self.granite(),
            Family::Gemma3 => self.gemma3(hidden_size, layers)?,
        })
    }

    fn granite(&self) -> Traits {
        let scores = self.attention_multiplier.unwrap_or(1.0);
        granite::traits(self.embedding_multiplier, Some(scores), self.residual_multiplier)
    }

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

    /// How far attention looks back, which must be the same in every layer that does not see everything.
    pub(super) fn window(&self, family: Family, layers: usize) -> Result<Option<usize>, HfConfigError> {
        let window = match family {
            Family::Llama | Family::Granite => return Ok(None),
            Family::Gemma3 => return Ok(Some(self.sliding_window.unwrap_or(4096))),
            Family::Mistral => self.sliding_window,
            Family::Qwen2 | Family::Qwen3 => {
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
        match (family, self.max_window_layers) {
            (Family::Mistral, _) | (_, Some(0)) => Ok(Some(window)),
            (_, Some(first)) if first >= layers => Ok(None),
            (_, first) => Err(unsupported("max_window_layers", first)),
        }
    }
}
