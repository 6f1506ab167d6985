//! What transformers calls the tensors and linear layers of a model.

use super::fused::Place;
use crate::shape::{
    config::ModelConfig,
    layout::LinearGroup,
    source::{Target, TensorId},
};

/// Where safetensors files keep a tensor of a model.
pub(super) fn place(config: &ModelConfig, id: TensorId) -> Place {
    Place::of(config, id, || tensor_name(config, id), fused_module_name)
}

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

/// What transformers calls the linear layer that is all of a group.
pub(crate) fn fused_module_name(layer: usize, group: LinearGroup) -> String {
    let name = match group {
        LinearGroup::Qkv => "self_attn.qkv_proj",
        LinearGroup::O => "self_attn.o_proj",
        LinearGroup::GateUp => "mlp.gate_up_proj",
        LinearGroup::Down => "mlp.down_proj",
        LinearGroup::Head => return "lm_head".to_owned(),
    };
    format!("model.layers.{layer}.{name}")
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
