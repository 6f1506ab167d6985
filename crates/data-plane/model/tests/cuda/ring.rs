//! The ring path of single sites on the device: the same words as on the CPU, and its guarantees.

use std::{borrow::Cow, fs};

use kernels::{Activations, TensorType};
use model::{
    cuda::{CudaModel, CudaOptions, CudaWeights, Graphs},
    linear_sites::{EvaluateError, EvaluateSites, SiteCall, SiteId, SiteOp, SitePath},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::ModelConfig,
        source::{Tensor, TensorId, WeightSource},
    },
    sources::{open::open, random::RandomSource},
};

use crate::support::{device, golden};

/// Weights of 32 bits and of both 16-bit types, with biases and with a tied head.
const MODELS: [&str; 4] = ["llama-tied", "llama-bf16", "qwen2-bias", "qwen2-f16"];

/// A small model with meaningless weights, whose linear layers use the block formats in turn.
struct MixedFormats(RandomSource);

impl MixedFormats {
    fn new() -> Self {
        let config = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
            "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 100, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false}"#;
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("config.json"), config).unwrap();
        Self(RandomSource::open(directory.path(), 3).unwrap())
    }

    fn kind_of(id: TensorId) -> Option<TensorType> {
        const KINDS: [TensorType; 8] = [
            TensorType::Q4_0,
            TensorType::Q4_1,
            TensorType::Q5_0,
            TensorType::Q5_1,
            TensorType::Q8_0,
            TensorType::Q4K,
            TensorType::Q5K,
            TensorType::Q6K,
        ];
        match id {
            TensorId::Weight(_, target) => Some(KINDS[target.index_in_block().unwrap_or(7) % KINDS.len()]),
            TensorId::TokenEmbedding => Some(TensorType::Q8_0),
            _ => None,
        }
    }
}

impl WeightSource for MixedFormats {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let tensor = self.0.tensor(id)?;
        let Some(kind) = Self::kind_of(id) else { return Some(tensor) };
        let bytes = tensor.rows * kind.row_bytes(tensor.cols).unwrap();
        let salt = format!("{id:?}").bytes().map(usize::from).sum::<usize>();
        // Small bytes give small scales at any position.
        let data: Vec<u8> = (0..bytes).map(|at| ((at * 31 + at / 7 + salt) % 0x2C) as u8).collect();
        Some(Tensor { kind, data: Cow::Owned(data), ..tensor })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.0.kind(id).map(|kind| Self::kind_of(id).unwrap_or(kind))
    }
}

fn sources() -> impl Iterator<Item = (&'static str, Box<dyn WeightSource + Sync>)> {
    let mixed: Box<dyn WeightSource + Sync> = Box::new(MixedFormats::new());
    let model = |name| (name, open(&golden("models").join(name)).unwrap() as _);
    MODELS.into_iter().map(model).chain([("of block formats", mixed)])
}

fn on_cpu(source: &(dyn WeightSource + Sync)) -> ResidentModel {
    let weights = LoadedWeights::load(source, 1).unwrap();
    let options = ResidentOptions { cores: vec![0], kv_bytes: 8 << 20, kv_dtype: None };
    ResidentModel::new(weights, &options).unwrap()
}

fn on_device(weights: CudaWeights) -> CudaModel {
    let options = CudaOptions { kv_bytes: 8 << 20, kv_dtype: None, graphs: Graphs::Avoid };
    CudaModel::new(weights, &options).unwrap()
}

/// Returned words may be NaN as floats.
fn evaluate(base: &mut dyn EvaluateSites, call: SiteCall, count: usize) -> Result<Vec<u32>, EvaluateError> {
    // Without a ring path the call is rejected for any rows.
    let (input, output) = base.sites()[call.site.0 as usize].words(call).unwrap_or((1, 1));
    let mut rows = Activations::default();
    rows.reshape(count, input);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ u64::from(call.site.0);
    for half in rows.values_mut() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *half = f32::from_bits((state >> 32) as u32);
    }
    let mut out = vec![f32::NAN; count * output];
    base.evaluate(call, &mut rows, &mut out)?;
    Ok(out.into_iter().map(f32::to_bits).collect())
}

fn call(site: usize, part: Option<usize>, op: SiteOp) -> SiteCall {
    SiteCall { site: SiteId(site as u32), part: part.map(|part| part as u8), op, path: SitePath::Ring }
}

#[test]
fn every_site_has_the_words_and_the_promises_of_the_cpu() {
    let Some(cuda) = device() else { return };
    for (name, source) in sources() {
        let mut weights = CudaWeights::load(&*source, &cuda, 2, &|_| {}).unwrap();
        weights.commit(&*source, 2).unwrap();
        let (mut gpu, mut cpu) = (on_device(weights), on_cpu(&*source));
        cpu.commit();
        for site in 0..cpu.sites().len() {
            let shape = &cpu.sites()[site];
            assert!(shape.ring.is_some(), "{name}, {site}");
            assert_eq!(gpu.sites()[site].ring, shape.ring, "{name}, {site}");
            let last = shape.parts.len() - 1;
            for op in [SiteOp::ForwardNoBias, SiteOp::Backward] {
                for (part, count) in [(None, 1), (None, 9), (Some(0), 2), (Some(last), 3)] {
                    let call = call(site, part, op);
                    let found = evaluate(&mut gpu, call, count).unwrap();
                    assert!(
                        found == evaluate(&mut cpu, call, count).unwrap(),
                        "{name}, {call:?}, {count} rows"
                    );
                }
            }
        }
    }
}

#[test]
fn a_site_that_nobody_committed_to_has_no_ring_path_and_none_adds_a_bias() {
    let Some(cuda) = device() else { return };
    let source = open(&golden("models").join("qwen2-bias")).unwrap();
    let mut weights = CudaWeights::load(&*source, &cuda, 1, &|_| {}).unwrap();
    weights.commit(&*source, 1).unwrap();
    let mut model = on_device(weights);
    let refused = evaluate(&mut model, call(0, None, SiteOp::Forward), 1);
    assert!(matches!(refused, Err(EvaluateError::RingBias(SiteId(0)))));
    let weights = CudaWeights::load(&*source, &cuda, 1, &|_| {}).unwrap();
    let mut model = on_device(weights);
    let refused = evaluate(&mut model, call(0, None, SiteOp::ForwardNoBias), 1);
    assert!(matches!(refused, Err(EvaluateError::NoRing(SiteId(0)))));
}
