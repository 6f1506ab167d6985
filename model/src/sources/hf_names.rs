//! What transformers calls the tensors and linear layers of a model.

use crate::shape::{
    config::ModelConfig,
    source::{Target, TensorId},
};

/// What safetensors files call a tensor of a model.
pub(crate) fn tensor_name(config: &ModelConfig, id: TensorId) -> String {
    match id {
        TensorId::TokenEmbedding => "model.embed_tokens.weight".to_owned(),
        TensorId::OutputNorm => "model.norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
        // Behind attention and before the feed-forward: one place, unless something is normed at both.
        TensorId::FeedForwardNorm(layer) if config.norms_updates() => {
            format!("model.layers.{layer}.pre_feedforward_layernorm.weight")
        }
        TensorId::FeedForwardNorm(layer) | TensorId::AttentionUpdateNorm(layer) => {
            format!("model.layers.{layer}.post_attention_layernorm.weight")
        }
        TensorId::FeedForwardUpdateNorm(layer) => {
            format!("model.layers.{layer}.post_feedforward_layernorm.weight")
        }
        TensorId::QueryNorm(layer) => format!("model.layers.{layer}.self_attn.q_norm.weight"),
        TensorId::KeyNorm(layer) => format!("model.layers.{layer}.self_attn.k_norm.weight"),
        TensorId::Weight(layer, target) => format!("{}.weight", module_name(layer, target)),
        TensorId::Bias(layer, target) => format!("{}.bias", module_name(layer, target)),
    }
}

/// What transformers calls a linear layer.
#[must_use]
pub fn module_name(layer: usize, target: Target) -> String {
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
