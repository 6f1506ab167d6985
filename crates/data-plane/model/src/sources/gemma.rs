//! Facts about Gemma 2 and 3 models that hold for every file format.

use kernels::elementwise::Gate;

use crate::shape::config::{ArchFlags, BlockNorms};

/// Default base of the rotary frequencies in Gemma 3's layers with a window.
pub(super) const LOCAL_THETA: f32 = 10_000.0;

/// Default distance of the layers with global attention in Gemma 2, then in Gemma 3.
pub(super) const PATTERN_2: usize = 2;
pub(super) const PATTERN_3: usize = 6;

/// Default soft limits of scores and logits in Gemma 2.
pub(super) const SCORE_CAP: f32 = 50.0;
pub(super) const LOGIT_CAP: f32 = 30.0;

/// Number of layers of the 27B models of Gemma 2 and Gemma 3, unique in each generation.
const LAYERS_OF_27B: [usize; 2] = [46, 62];

/// Returns the common deviations from Llama. Scores are divided by the square root of `query_scalar`.
pub(super) fn traits(hidden_size: usize, query_scalar: f32, global_layers: Vec<usize>) -> ArchFlags {
    ArchFlags {
        gate: Gate::GeluTanh,
        norms: BlockNorms::Around,
        // The factor is a 32-bit float, as in llama.cpp, and in transformers when it computes in 32 bits.
        embedding_scale: Some((hidden_size as f32).sqrt()),
        score_scale: Some(1.0 / query_scalar.sqrt()),
        global_layers,
        ..ArchFlags::default()
    }
}

/// Returns the default query scalar: the width of a head, except in the 27B models.
pub(super) fn query_scalar(hidden_size: usize, heads: usize, head_dim: usize, layers: usize) -> f32 {
    let is_27b = LAYERS_OF_27B.contains(&layers);
    let width = if is_27b { hidden_size.checked_div(heads).unwrap_or(0) } else { head_dim };
    width as f32
}

/// Returns the last of each `pattern` layers.
pub(super) fn every(pattern: usize, layers: usize) -> Vec<usize> {
    (0..layers).filter(|layer| (layer + 1).is_multiple_of(pattern)).collect()
}
