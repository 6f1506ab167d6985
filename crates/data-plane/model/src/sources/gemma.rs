//! What every source of a model of Gemma 2 or 3 knows, whatever its files are.

use kernels::elementwise::Gate;

use crate::shape::config::{ArchFlags, BlockNorms};

/// Base of the rotary frequencies of Gemma 3's layers with a window, where the files do not say.
pub(super) const LOCAL_THETA: f32 = 10_000.0;

/// Of so many layers one attends to everything, where the files do not say which: in Gemma 2, and in Gemma 3.
pub(super) const PATTERN_2: usize = 2;
pub(super) const PATTERN_3: usize = 6;

/// What caps scores and logits of Gemma 2, where the files do not say.
pub(super) const SCORE_CAP: f32 = 50.0;
pub(super) const LOGIT_CAP: f32 = 30.0;

/// Layers of the models of 27 billion parameters, which no other model of their generation has: Gemma 2's, and Gemma 3's.
const LAYERS_OF_27B: [usize; 2] = [46, 62];

/// What both do that Llama does not. Scores are divided by the root of `query_scalar`.
pub(super) fn traits(hidden_size: usize, query_scalar: f32, global_layers: Vec<usize>) -> ArchFlags {
    ArchFlags {
        gate: Gate::GeluTanh,
        norms: BlockNorms::Around,
        // In 32 bits whatever the weights are stored in: llama.cpp does so, and transformers where it computes in 32 bits.
        embedding_scale: Some((hidden_size as f32).sqrt()),
        score_scale: Some(1.0 / query_scalar.sqrt()),
        global_layers,
        ..ArchFlags::default()
    }
}

/// What scores are divided by the root of, where the files do not say: the width of a head, but in the models of 27 billion
/// parameters.
pub(super) fn query_scalar(hidden_size: usize, heads: usize, head_dim: usize, layers: usize) -> f32 {
    let is_27b = LAYERS_OF_27B.contains(&layers);
    let width = if is_27b { hidden_size.checked_div(heads).unwrap_or(0) } else { head_dim };
    width as f32
}

/// The last of each `pattern` layers.
pub(super) fn every(pattern: usize, layers: usize) -> Vec<usize> {
    (0..layers).filter(|layer| (layer + 1).is_multiple_of(pattern)).collect()
}
