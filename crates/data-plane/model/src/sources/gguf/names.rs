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
        (TensorId::Expert(_, expert, part), Some(experts)) => {
            let group = match part {
                ExpertPart::Gate | ExpertPart::Up => LinearGroup::ExpertGateUp(expert),
                ExpertPart::Down => LinearGroup::ExpertDown(expert),
            };
            let nth = (usize::from(expert.0), experts.count);
            TensorLocation::stacked(config, (id, group), tensor_name(id), nth)
        }
        _ => TensorLocation::of(config, id, || tensor_name(id), fused_name),
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

pub(crate) fn tensor_name(id: TensorId) -> String {
    match id {
        TensorId::TokenEmbedding => "token_embd.weight".to_owned(),
        TensorId::OutputNorm => "output_norm.weight".to_owned(),
        TensorId::AttentionNorm(layer) => format!("blk.{layer}.attn_norm.weight"),
        TensorId::FeedForwardNorm(layer) => format!("blk.{layer}.ffn_norm.weight"),
        TensorId::AttentionUpdateNorm(layer) => format!("blk.{layer}.post_attention_norm.weight"),
        TensorId::FeedForwardUpdateNorm(layer) => format!("blk.{layer}.post_ffw_norm.weight"),
        TensorId::QueryNorm(layer) => format!("blk.{layer}.attn_q_norm.weight"),
        TensorId::KeyNorm(layer) => format!("blk.{layer}.attn_k_norm.weight"),
        TensorId::Weight(layer, target) => format!("{}.weight", linear_name(layer, target)),
        TensorId::Bias(layer, target) => format!("{}.bias", linear_name(layer, target)),
        TensorId::Router(layer) => format!("blk.{layer}.ffn_gate_inp.weight"),
        // One tensor holds all experts.
        TensorId::Expert(layer, _, ExpertPart::Gate) => format!("blk.{layer}.ffn_gate_exps.weight"),
        TensorId::Expert(layer, _, ExpertPart::Up) => format!("blk.{layer}.ffn_up_exps.weight"),
        TensorId::Expert(layer, _, ExpertPart::Down) => format!("blk.{layer}.ffn_down_exps.weight"),
    }
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
