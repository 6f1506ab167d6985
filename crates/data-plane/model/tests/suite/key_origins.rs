//! Large biases of keys, which a KV cache of few bits does not store.

use std::borrow::Cow;

use kernels::{TensorType, quant::dequantize_row};
use model::{
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::ModelConfig,
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::open::open,
};
use testkit::paths::golden;
use types::BlockId;

const TOKENS: usize = 200;

/// A model with biases, whose keys have `more` in the columns that rotate least.
struct LoudKeys {
    source: Box<dyn WeightSource + Send + Sync>,
    more: f32,
}

impl WeightSource for LoudKeys {
    fn config(&self) -> &ModelConfig {
        self.source.config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let tensor = self.source.tensor(id)?;
        let TensorId::Bias(_, Target::K) = id else { return Some(tensor) };
        let mut bias = vec![0.0; tensor.cols];
        dequantize_row(tensor.kind, &tensor.data, &mut bias);
        for head in bias.chunks_mut(self.config().head_dim) {
            let half = head.len() / 2;
            head.iter_mut()
                .enumerate()
                .filter(|(column, _)| column % half >= half - 2)
                .for_each(|(column, x)| *x += if column % 2 == 0 { self.more } else { -1.3 * self.more });
        }
        let data = Cow::Owned(bias.into_iter().flat_map(f32::to_le_bytes).collect());
        Some(Tensor { kind: TensorType::F32, data, ..tensor })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.source.kind(id)
    }
}

fn logits(model: &str, more: f32, kv_dtype: Option<KvPrecision>) -> Vec<f32> {
    let source = LoudKeys { source: open(&golden("models").join(model)).unwrap(), more };
    let weights = LoadedWeights::load(&source, 1).unwrap();
    let options = ResidentOptions { cores: Vec::new(), kv_bytes: 4 << 20, kv_dtype };
    let mut model = ResidentModel::new(weights, &options).unwrap();
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| (i * 37 + i * i) % 300).collect();
    let blocks: Vec<BlockId> = (0..TOKENS.div_ceil(BLOCK_TOKENS) as u32).map(BlockId).collect();
    let slice = SequenceSlice {
        trunk: &[],
        tokens: &tokens,
        start: 0,
        blocks: &blocks,
        adapter: None,
        logits: LogitRows::All,
    };
    let mut logits = Vec::new();
    model.forward(&[slice], &mut logits);
    logits
}

fn squares(one: &[f32], other: &[f32]) -> f64 {
    one.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

#[test]
fn large_biases_of_keys_take_no_bits_from_a_small_kv_cache() {
    let quiet = logits("qwen2-bias", 0.0, Some(KvPrecision::F32));
    let loud = logits("qwen2-bias", 60.0, Some(KvPrecision::F32));
    assert!(squares(&quiet, &loud) > 1e-6, "rotation moves the larger bias a little");
    for (kv_dtype, most) in [(Some(KvPrecision::Int8), 2.0), (Some(KvPrecision::Bf16), 2.0)] {
        let without = squares(&logits("qwen2-bias", 0.0, kv_dtype), &quiet);
        let with = squares(&logits("qwen2-bias", 60.0, kv_dtype), &loud);
        println!("{kv_dtype:?}: {without:.2e} with small biases, {with:.2e} with large ones");
        assert!(with < most * without, "{kv_dtype:?}: {without:.2e} became {with:.2e}");
    }
}

#[test]
fn beside_sinks_a_small_kv_cache_keeps_biases_in_its_keys() {
    // A key without its bias would have another score relative to the sink.
    let whole = logits("gptoss", 4.0, Some(KvPrecision::F32));
    for kv_dtype in [Some(KvPrecision::Int8), Some(KvPrecision::Bf16)] {
        let error =
            squares(&logits("gptoss", 4.0, kv_dtype), &whole) / squares(&whole, &vec![0.0; whole.len()]);
        println!("{kv_dtype:?}: {error:.2e} of the logits' squares");
        assert!(error < 1e-2, "{kv_dtype:?}: {error:.2e}");
    }
}
