//! What every source of a Gemma model knows, whatever its files are.

use kernels::elementwise::Gate;

use crate::shape::config::{BlockNorms, Rope, Traits};

/// Base of the rotary frequencies of layers with a window, where the files do not say.
pub(super) const LOCAL_THETA: f32 = 10_000.0;

/// Of so many layers one attends to everything, where the files do not say which.
pub(super) const PATTERN: usize = 6;

const LAYERS_OF_27B: usize = 62;

/// What Gemma 3 does that Llama does not. Scores are divided by the root of `query_scalar`.
pub(super) fn gemma3(
    hidden_size: usize,
    query_scalar: f32,
    local_rope: Rope,
    global_layers: Vec<usize>,
) -> Traits {
    Traits {
        gate: Gate::GeluTanh,
        norms: BlockNorms::Around,
        // In 32 bits whatever the weights are stored in: llama.cpp does so, and transformers where it computes in 32 bits.
        embedding_scale: Some((hidden_size as f32).sqrt()),
        score_scale: Some(1.0 / query_scalar.sqrt()),
        global_layers,
        local_rope: Some(local_rope),
    }
}

/// What scores are divided by the root of, where the files do not say: the width of a head, but in the model of 27 billion
/// parameters, which alone has so many layers.
pub(super) fn query_scalar(hidden_size: usize, heads: usize, head_dim: usize, layers: usize) -> f32 {
    let width = if layers == LAYERS_OF_27B { hidden_size.checked_div(heads).unwrap_or(0) } else { head_dim };
    width as f32
}

/// The last of each `pattern` layers.
pub(super) fn every(pattern: usize, layers: usize) -> Vec<usize> {
    (0..layers).filter(|layer| (layer + 1).is_multiple_of(pattern)).collect()
}
