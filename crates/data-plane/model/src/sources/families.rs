//! Facts about Granite, OLMo 2, Phi and gpt-oss models that hold for every file format.

use kernels::elementwise::Gate;

use crate::shape::config::{ArchFlags, BlockNorms};

/// Default limit of the gate's inputs in gpt-oss.
pub(super) const SWIGLU_LIMIT: f32 = 7.0;
/// Default sliding window of gpt-oss.
pub(super) const GPT_OSS_WINDOW: usize = 128;
/// Default base of the rotary frequencies in gpt-oss.
pub(super) const GPT_OSS_THETA: f32 = 150_000.0;

/// Returns Granite's deviations from Llama: factors of embeddings, scores, updates; a divisor of logits.
pub(super) fn granite([embeddings, scores, updates, logits]: [Option<f32>; 4]) -> ArchFlags {
    // A factor of 1 changes nothing and need not be computed.
    let other = |scale: Option<f32>| scale.filter(|&scale| scale != 1.0);
    ArchFlags {
        embedding_scale: other(embeddings),
        score_scale: scores,
        update_scale: other(updates),
        logit_divisor: other(logits),
        ..ArchFlags::default()
    }
}

pub(super) fn olmo2() -> ArchFlags {
    ArchFlags { norms: BlockNorms::Behind, wide_query_norms: true, ..ArchFlags::default() }
}

/// Returns Phi's deviations from Llama: `rotary_dim` rotated features per head, times `magnitude`.
pub(super) fn phi3(head_dim: usize, rotary_dim: usize, magnitude: f32) -> ArchFlags {
    ArchFlags {
        rotary_dim: Some(rotary_dim).filter(|&rotary_dim| rotary_dim != head_dim),
        rotary_magnitude: Some(magnitude).filter(|&magnitude| magnitude != 1.0),
        ..ArchFlags::default()
    }
}

/// Returns deviations of gpt-oss from Llama: sinks, biased experts, a gate within `limit`.
pub(super) fn gpt_oss(limit: f32, global_layers: Vec<usize>) -> ArchFlags {
    ArchFlags {
        gate: Gate::SwigluOai { limit },
        sinks: true,
        expert_biases: true,
        global_layers,
        ..ArchFlags::default()
    }
}

/// Returns longrope's factor of rotated features for files that do not state it. The model was stretched from
/// a context of `original` tokens by `factor` (LongRoPE, section 3.3; transformers' `attention_factor`).
pub(super) fn longrope_magnitude(factor: f32, original: usize) -> f32 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f32).ln()).sqrt() }
}
