//! What every source of a Granite model knows, whatever its files are.

use crate::shape::config::Traits;

/// What Granite does that Llama does not: embeddings, scores and updates are multiplied with these.
pub(super) fn traits(embeddings: Option<f32>, scores: Option<f32>, updates: Option<f32>) -> Traits {
    // What changes nothing need not be computed.
    let other = |scale: Option<f32>| scale.filter(|&scale| scale != 1.0);
    Traits {
        embedding_scale: other(embeddings),
        score_scale: scores,
        update_scale: other(updates),
        ..Traits::default()
    }
}
