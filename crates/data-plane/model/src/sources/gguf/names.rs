//! Names of a model's tensors in GGUF files.

use crate::{
    shape::{
        config::ModelConfig,
        experts::{ExpertPart, ExpertTarget},
        layout::LinearGroup,
        source::{Target, TensorId},
    },
    sources::fused::TensorLocation,
};

pub(super) fn place(config: &ModelConfig, id: TensorId) -> TensorLocation {
    match (id, &config.experts) {
        (TensorId::Expert(_, expert, part) | TensorId::ExpertBias(_, expert, part), Some(experts)) => {
            let group = match part {
                ExpertPart::Gate | ExpertPart::Up => LinearGroup::ExpertGateUp(expert),
                ExpertPart::Down => LinearGroup::ExpertDown(expert),
            };
            let nth = (usize::from(expert.0), experts.count);
            TensorLocation::stacked(config, (id, group), tensor_name(config, id), nth)
        }
        _ => TensorLocation::of(config, id, || tensor_name(config, id), fused_name),
    }
}

pub(crate) fn fused_name(layer: usize, group: LinearGroup) -> String {
    let name = match group {
        LinearGroup::Qkv => "attn_qkv",
        LinearGroup::O => "attn_output",
        // The tensor holds both gate and up.
        LinearGroup::GateUp => "ffn_up",
        LinearGroup::Down => "ffn_down",
        LinearGroup::ExpertGateUp(_) => "ffn_up_exps",
        LinearGroup::ExpertDown(_) => "ffn_down_exps",
        LinearGroup::Head => return "output".to_owned(),
    };
    format!("blk.{layer}.{name}")
}

pub(crate) fn tensor_name(config: &ModelConfig, id: TensorId) -> String {
    match id {
        TensorId::TokenEmbedding => "token_embd.weight".to_owned(),
        TensorId::OutputNorm => "output_norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => format!("blk.{layer}.attn_norm.weight"),
        // Files of gpt-oss name this norm after its place behind attention.
        TensorId::FeedForwardNorm(layer) if config.traits.sinks => {
            format!("blk.{layer}.post_attention_norm.weight")
        }
        TensorId::FeedForwardNorm(layer) => format!("blk.{layer}.ffn_norm.weight"),
        TensorId::AttentionUpdateNorm(layer) => format!("blk.{layer}.post_attention_norm.weight"),
        TensorId::FeedForwardUpdateNorm(layer) => format!("blk.{layer}.post_ffw_norm.weight"),
        TensorId::QueryNorm(layer) => format!("blk.{layer}.attn_q_norm.weight"),
        TensorId::KeyNorm(layer) => format!("blk.{layer}.attn_k_norm.weight"),
        TensorId::Weight(layer, target) => format!("{}.weight", linear_name(layer, target)),
        TensorId::Bias(layer, target) => format!("{}.bias", linear_name(layer, target)),
        TensorId::Sinks(layer) => format!("blk.{layer}.attn_sinks.weight"),
        TensorId::Router(layer) => format!("blk.{layer}.ffn_gate_inp.weight"),
        TensorId::RouterBias(layer) => format!("blk.{layer}.ffn_gate_inp.bias"),
        TensorId::Expert(layer, _, part) => format!("{}.weight", experts_name(layer, part)),
        TensorId::ExpertBias(layer, _, part) => format!("{}.bias", experts_name(layer, part)),
    }
}

/// Returns the name of a linear layer of all experts, which one tensor holds.
fn experts_name(layer: usize, part: ExpertPart) -> String {
    let part = match part {
        ExpertPart::Gate => "gate",
        ExpertPart::Up => "up",
        ExpertPart::Down => "down",
    };
    format!("blk.{layer}.ffn_{part}_exps")
}

pub(crate) fn linear_name(layer: usize, target: Target) -> String {
    let name = match target {
        Target::Q => "attn_q",
        Target::K => "attn_k",
        Target::V => "attn_v",
        Target::O => "attn_output",
        Target::Gate => "ffn_gate",
        Target::Up => "ffn_up",
        Target::Down => "ffn_down",
        Target::LmHead => return "output".to_owned(),
        Target::Expert(_, ExpertTarget::GateUp) => "ffn_gate_up_exps",
        Target::Expert(_, ExpertTarget::Gate) => "ffn_gate_exps",
        Target::Expert(_, ExpertTarget::Up) => "ffn_up_exps",
        Target::Expert(_, ExpertTarget::Down) => "ffn_down_exps",
    };
    format!("blk.{layer}.{name}")
}
