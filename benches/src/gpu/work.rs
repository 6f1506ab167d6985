//! Work of a shape: bytes that a decoded token reads, and operations of a prompt.

use model::shape::{
    config::ModelConfig,
    layout::{BLOCK_TARGETS, linear_shape},
    source::Target,
};

/// Bytes of a weight and of a KV cache element.
const NUMBER_BYTES: usize = 2;

pub(super) fn block_weights(config: &ModelConfig) -> usize {
    let of = |&target| linear_shape(config, target).iter().product::<usize>();
    config.layers * BLOCK_TARGETS.iter().map(of).sum::<usize>()
}

pub(super) fn head_weights(config: &ModelConfig) -> usize {
    linear_shape(config, Target::LmHead).iter().product()
}

/// Bytes that a step over `streams` sequences reads, each with `context` tokens: every linear layer once, and
/// the KV cache of each sequence. The one row of the embedding per token is left out.
pub(super) fn step_bytes(config: &ModelConfig, streams: usize, context: f64) -> f64 {
    let weights = (block_weights(config) + head_weights(config)) * NUMBER_BYTES;
    let token = 2 * config.layers * config.kv_heads * config.head_dim * NUMBER_BYTES;
    weights as f64 + streams as f64 * context * token as f64
}

/// Floating-point operations of a prompt of `tokens` tokens with logits of the last token. Attention counts
/// the causal half.
pub(super) fn prompt_flops(config: &ModelConfig, tokens: usize) -> f64 {
    let linear = 2.0 * (block_weights(config) as f64 * tokens as f64 + head_weights(config) as f64);
    let pairs = tokens as f64 * (tokens as f64 + 1.0) / 2.0;
    let attention = 4.0 * (config.layers * config.heads * config.head_dim) as f64 * pairs;
    linear + attention
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::lab::LLAMA_2_7B;

    /// Expected values come from docs/performance/gpu.md.
    #[test]
    fn the_seven_billion_shape_takes_what_the_documentation_says() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), LLAMA_2_7B).unwrap();
        let source = model::sources::random::RandomSource::open(folder.path(), 1).unwrap();
        let config = model::shape::source::WeightSource::config(&source);
        assert_eq!(block_weights(config), 6_476_005_376);
        assert_eq!(head_weights(config), 131_072_000);
        let step = step_bytes(config, 1, 164.0);
        assert!((step / 1e9 - 13.30).abs() < 0.005, "{step}");
        let prompt = prompt_flops(config, 2048);
        assert!((prompt / 1e12 - 27.63).abs() < 0.005, "{prompt}");
    }
}
