//! Fixtures for the unit tests of several modules.

use model::shape::config::{ArchFlags, ModelConfig, Rope, RopeScaling};

/// A model of one head, all of whose sides are `width`.
pub(crate) fn square_model(width: usize, layers: usize) -> ModelConfig {
    ModelConfig {
        architecture: "llama".to_owned(),
        vocab_size: width,
        hidden_size: width,
        intermediate_size: width,
        layers,
        heads: 1,
        kv_heads: 1,
        head_dim: width,
        norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        qk_norm: false,
        tied_head: true,
        context_length: 64,
        sliding_window: None,
        traits: ArchFlags::default(),
        experts: None,
    }
}
