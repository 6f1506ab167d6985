//! What every source of a Granite, OLMo 2 or Phi model knows, whatever its files are.

use crate::shape::config::{ArchFlags, BlockNorms};

/// What Granite does that Llama does not: embeddings, scores and updates are multiplied with these, and logits divided.
pub(super) fn granite([embeddings, scores, updates, logits]: [Option<f32>; 4]) -> ArchFlags {
    // What changes nothing need not be computed.
    let other = |scale: Option<f32>| scale.filter(|&scale| scale != 1.0);
    ArchFlags {
        embedding_scale: other(embeddings),
        score_scale: scores,
        update_scale: other(updates),
        logit_divisor: other(logits),
        ..ArchFlags::default()
    }
}

/// What OLMo 2 does that Llama does not.
pub(super) fn olmo2() -> ArchFlags {
    ArchFlags { norms: BlockNorms::Behind, wide_query_norms: true, ..ArchFlags::default() }
}

/// What Phi does that Llama does not: only `rotary_dim` features of a head are rotated, and multiplied with `magnitude`.
pub(super) fn phi3(head_dim: usize, rotary_dim: usize, magnitude: f32) -> ArchFlags {
    ArchFlags {
        rotary_dim: Some(rotary_dim).filter(|&rotary_dim| rotary_dim != head_dim),
        rotary_magnitude: Some(magnitude).filter(|&magnitude| magnitude != 1.0),
        ..ArchFlags::default()
    }
}

/// What longrope multiplies rotated features with, if the files do not say, in a model that was stretched from a context of
/// `original` tokens to `factor` times as many (LongRoPE, section 3.3; transformers' `attention_factor`).
pub(super) fn longrope_magnitude(factor: f32, original: usize) -> f32 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f32).ln()).sqrt() }
}
