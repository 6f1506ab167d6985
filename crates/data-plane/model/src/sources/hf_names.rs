//! Names of a model's tensors and linear layers in transformers.

use super::{family::Family, fused::TensorLocation};
use crate::shape::{
    config::ModelConfig,
    experts::{ExpertPart, ExpertTarget},
    layout::LinearGroup,
    source::{Target, TensorId},
};

pub(crate) const EMBEDDING: &str = "model.embed_tokens";

/// Whether the embedding scale applies to embeddings of tokens, and not to other inputs of the first layer.
pub(crate) fn scales_tokens_alone(config: &ModelConfig) -> bool {
    Family::named(&config.architecture).is_some_and(Family::is_gemma)
}

pub(super) fn place(config: &ModelConfig, id: TensorId) -> TensorLocation {
    TensorLocation::of(config, id, || tensor_name(config, id), fused_module_name)
}

/// Whether files have gate and up of an expert in one tensor whose outputs are those of both in turns.
pub(crate) fn interleaves_experts(config: &ModelConfig) -> bool {
    Family::named(&config.architecture) == Some(Family::GptOss)
}

/// Returns the location of a tensor in files with stacked experts, the memory layout of transformers 5: gate
/// and up of an expert, then those of the next.
pub(super) fn stacked_place(config: &ModelConfig, id: TensorId) -> TensorLocation {
    let (layer, expert, part, experts) = match (id, &config.experts) {
        (TensorId::Expert(layer, expert, part), Some(experts)) => (layer, expert, part, experts),
        (TensorId::Router(layer), _) => {
            let name = || format!("model.layers.{layer}.mlp.gate.weight");
            return TensorLocation::of(config, id, name, fused_module_name);
        }
        _ => return place(config, id),
    };
    let (nth, of) = (usize::from(expert.0), experts.count);
    let (group, place) = match part {
        ExpertPart::Gate => (LinearGroup::ExpertGateUp(expert), (2 * nth, 2 * of)),
        ExpertPart::Up => (LinearGroup::ExpertGateUp(expert), (2 * nth + 1, 2 * of)),
        ExpertPart::Down => (LinearGroup::ExpertDown(expert), (nth, of)),
    };
    TensorLocation::stacked(config, (id, group), fused_module_name(layer, group), place)
}

pub(crate) fn tensor_name(config: &ModelConfig, id: TensorId) -> String {
    match id {
        TensorId::TokenEmbedding => format!("{EMBEDDING}.weight"),
        TensorId::OutputNorm => "model.norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
        // The name means the norm before the feed-forward or after attention; two names exist if both do.
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
        TensorId::Sinks(layer) => format!("model.layers.{layer}.self_attn.sinks"),
        TensorId::Router(layer) => format!("{}.weight", router_name(config, layer)),
        TensorId::RouterBias(layer) => format!("{}.bias", router_name(config, layer)),
        TensorId::Expert(..) => format!("{}.weight", linear_name(config, id)),
        TensorId::ExpertBias(layer, expert, part) => {
            format!("{}.bias", linear_name(config, TensorId::Expert(layer, expert, part)))
        }
    }
}

fn router_name(config: &ModelConfig, layer: usize) -> String {
    let name = if interleaves_experts(config) { "router" } else { "gate" };
    format!("model.layers.{layer}.{}.{name}", mixture_name(config))
}

fn mixture_name(config: &ModelConfig) -> &'static str {
    if is_mixtral(config) { "block_sparse_moe" } else { "mlp" }
}

/// Whether experts have Mixtral's names, the default because GGUF calls Mixtral `llama`.
fn is_mixtral(config: &ModelConfig) -> bool {
    !matches!(Family::named(&config.architecture), Some(Family::Qwen3Moe | Family::GptOss))
}

/// Returns the name of the linear layer with these weights in transformers. The result is empty for tensors
/// that are no weights of a linear layer.
#[must_use]
pub fn linear_name(config: &ModelConfig, id: TensorId) -> String {
    match id {
        TensorId::Weight(layer, target) => module_name(layer, target),
        TensorId::Expert(layer, expert, part) => {
            let [usual, of_mixtral] = match part {
                ExpertPart::Gate => ["gate_proj", "w1"],
                ExpertPart::Up => ["up_proj", "w3"],
                ExpertPart::Down => ["down_proj", "w2"],
            };
            let part = if is_mixtral(config) { of_mixtral } else { usual };
            format!("model.layers.{layer}.{}.experts.{}.{part}", mixture_name(config), expert.0)
        }
        _ => String::new(),
    }
}

pub(crate) fn fused_module_name(layer: usize, group: LinearGroup) -> String {
    let name = match group {
        LinearGroup::Qkv => "self_attn.qkv_proj",
        LinearGroup::O => "self_attn.o_proj",
        LinearGroup::GateUp => "mlp.gate_up_proj",
        LinearGroup::Down => "mlp.down_proj",
        LinearGroup::ExpertGateUp(_) => "mlp.experts.gate_up_proj",
        LinearGroup::ExpertDown(_) => "mlp.experts.down_proj",
        LinearGroup::Head => return "lm_head".to_owned(),
    };
    format!("model.layers.{layer}.{name}")
}

/// Returns the name of a linear layer in transformers.
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
        Target::Expert(expert, target) => {
            let name = match target {
                ExpertTarget::GateUp => "gate_up_proj",
                ExpertTarget::Gate => "gate_proj",
                ExpertTarget::Up => "up_proj",
                ExpertTarget::Down => "down_proj",
            };
            return format!("{}.{}.{name}", experts_name(layer), expert.0);
        }
    };
    format!("model.layers.{layer}.{name}")
}

/// Returns the name of the module that holds a block's experts in transformers 5.
pub(crate) fn experts_name(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.experts")
}
