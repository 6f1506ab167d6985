//! Random adapters in memory, without files.
//!
//! All layers of an adapter, and all adapters of a rank, share the same values. [`in_image`] gives each
//! adapter memory of its own, as distinct adapters would have.

use std::sync::Arc;

use anyhow::{Context, Result};
use kernels::lora::{FACTOR_ALIGNMENT, LoraPrecision, SharedBytes};
use model::{
    adapter::{Adapter, LoraModule, MethodWeights},
    deltas::{
        matrices::{ImageNumber, ModuleLayout},
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use shmproto::region::SealedBytes;
use types::AdapterVersion;

/// True rank of an adapter and the rank it is stored with; zeros fill the difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PaddedRank {
    pub(crate) own: usize,
    pub(crate) stored: usize,
}

impl PaddedRank {
    pub(crate) fn true_rank(rank: usize) -> Self {
        Self { own: rank, stored: rank }
    }
}

/// Random adapter on `targets` of every layer; all layers share the same values.
pub(crate) fn encoded(
    config: &ModelConfig,
    rank: PaddedRank,
    targets: &[Target],
    precision: LoraPrecision,
) -> EncodedAdapter {
    let mut random = StdRng::seed_from_u64(rank.own as u64);
    let modules = targets.iter().map(|&target| module(config, rank, target, &mut random)).collect();
    let (generation, method) = (AdapterVersion([0; 32]), MethodWeights::Lora(modules));
    let adapter = Adapter { generation, method, base_model: None, stored_in_16_bits: false };
    let mut encoded = EncodedAdapter::new(&adapter, config, precision);
    let first = std::mem::take(&mut encoded.modules);
    let in_layer = |layer| first.iter().map(move |module| ModuleLayout { layer, ..*module });
    encoded.modules = (0..config.layers).flat_map(in_layer).collect();
    encoded
}

fn module(config: &ModelConfig, rank: PaddedRank, target: Target, random: &mut StdRng) -> LoraModule {
    let [rows, columns] = linear_shape(config, target);
    let PaddedRank { own, stored } = rank;
    let mut numbers = |count, bound: f32| (0..count).map(|_| random.random_range(-bound..bound)).collect();
    let (mut a, own_b): (Vec<f32>, Vec<f32>) = (numbers(own * columns, 0.05), numbers(rows * own, 0.01));
    a.resize(stored * columns, 0.0);
    let mut b = vec![0.0; rows * stored];
    for (row, own_row) in b.chunks_mut(stored).zip(own_b.chunks(own)) {
        row[..own].copy_from_slice(own_row);
    }
    LoraModule { layer: 0, target, rank: stored, scale: 1.0, a, b }
}

/// Copies an adapter, layer by layer, into sealed shared memory, as an executor keeps it. A `number` other
/// than 0 registers that memory with a device; with 0, the device stages the bytes.
///
/// # Errors
/// If there is no memory.
pub(crate) fn in_image(
    config: &ModelConfig,
    mut encoded: EncodedAdapter,
    number: ImageNumber,
) -> Result<PreparedAdapter> {
    let mut layer = std::mem::take(&mut encoded.bytes);
    layer.resize(layer.len().next_multiple_of(FACTOR_ALIGNMENT), 0);
    for module in &mut encoded.modules {
        module.matrix.a.offset += module.layer * layer.len();
        module.matrix.b.offset += module.layer * layer.len();
    }
    let layers = vec![layer.as_slice(); config.layers];
    let image = SealedBytes::build("holobiont-bench", &layers).context("no memory for an adapter")?;
    let bytes: SharedBytes = Arc::new(image);
    Ok(PreparedAdapter::over(&encoded, config, number, &bytes)?)
}

#[cfg(test)]
mod tests {
    use kernels::lora::MatrixLayout;
    use model::{shape::source::WeightSource as _, sources::random::RandomSource};

    use super::*;

    const SHAPE: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 320}"#;

    fn config() -> ModelConfig {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), SHAPE).unwrap();
        RandomSource::open(folder.path(), 1).unwrap().config().clone()
    }

    #[test]
    fn a_padded_adapter_is_as_large_as_one_of_the_larger_rank_and_has_its_own_numbers() {
        let of = |rank| encoded(&config(), rank, &[Target::Q], LoraPrecision::Exact);
        let [own, padded, large] =
            [PaddedRank::true_rank(8), PaddedRank { own: 8, stored: 32 }, PaddedRank::true_rank(32)].map(of);
        let layout = |adapter: &EncodedAdapter| -> MatrixLayout { adapter.modules[0].matrix };
        assert_eq!(layout(&padded), layout(&large));
        assert_eq!(padded.bytes.len(), large.bytes.len());
        let numbers = |adapter: &EncodedAdapter| adapter.bytes.iter().filter(|byte| **byte != 0).count();
        assert_eq!(numbers(&padded), numbers(&own));
    }
}
