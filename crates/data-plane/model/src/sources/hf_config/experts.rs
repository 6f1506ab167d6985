//! Mixtures of experts in `config.json`. Defaults are those of transformers' configuration classes.

use super::{HfConfigError, raw::RawHfConfig, unsupported};
use crate::{shape::experts::Experts, sources::family::Family};

impl RawHfConfig {
    pub(super) fn experts(&self, family: Family, layers: usize) -> Result<Option<Experts>, HfConfigError> {
        let count = self.num_local_experts.or(self.num_experts);
        match family {
            Family::Mixtral => Ok(Some(Experts {
                count: count.unwrap_or(8),
                chosen: self.num_experts_per_tok.unwrap_or(2),
                width: self.intermediate_size.ok_or(HfConfigError::Missing("intermediate_size"))?,
                normalized: true,
                dense_layers: Vec::new(),
            })),
            Family::GptOss => Ok(Some(Experts {
                count: count.unwrap_or(128),
                chosen: self.num_experts_per_tok.unwrap_or(4),
                width: self.intermediate_size.ok_or(HfConfigError::Missing("intermediate_size"))?,
                // A softmax of the chosen logits alone is a softmax of all, divided by the sum of the chosen.
                normalized: true,
                dense_layers: Vec::new(),
            })),
            Family::Qwen3Moe => Ok(Some(Experts {
                count: count.unwrap_or(128),
                chosen: self.num_experts_per_tok.unwrap_or(8),
                width: self.moe_intermediate_size.unwrap_or(768),
                normalized: self.norm_topk_prob.unwrap_or(false),
                dense_layers: self.dense_layers(layers)?,
            })),
            _ => Ok(None),
        }
    }

    /// Returns the blocks with a plain feed-forward: the listed ones, and those outside of the sparse step.
    fn dense_layers(&self, layers: usize) -> Result<Vec<usize>, HfConfigError> {
        let named = self.mlp_only_layers.as_deref().unwrap_or_default();
        match self.decoder_sparse_step.unwrap_or(1) {
            0 => Err(unsupported("decoder_sparse_step", 0)),
            step => {
                let is_dense = |layer: &usize| named.contains(layer) || !(layer + 1).is_multiple_of(step);
                Ok((0..layers).filter(is_dense).collect())
            }
        }
    }
}
