//! The reverse pass compared with torch, transformers and PEFT (see `tests/golden/README.md`, "Training").

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};
use testkit::paths::{golden, real_model};

use kernels::{ThreadPool, attention::KvPrecision, lora::LoraPrecision};
use model::{
    adapter::{Adapter, LoraModule, MethodWeights},
    backward::{Dropout, Example, Gradients, Loss, SavedScope, TrainableAdapter, Trainer},
    client_weights::client_base::ClientBase,
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    precision::BaseNumerics,
    resident::{LoadedWeights, ResidentModel, ResidentOptions, kv_shape},
    sampling::logprobs,
    shape::source::{Target, WeightSource},
    sources::{dequantized::Dequantized, hf_names::module_name, open::open},
    weights::ResidentLayers,
};
use safetensors::SafeTensors;
use serde::Deserialize;
use types::BlockId;

#[derive(Debug, Deserialize)]
struct TorchExpectation {
    loss: f64,
    logprobs: Vec<Vec<f32>>,
    batches: Vec<Vec<WeightedSequence>>,
}

#[derive(Debug, Deserialize)]
struct WeightedSequence {
    tokens: Vec<u32>,
    weights: Vec<f32>,
}

fn trainer(model: &Path, threads: usize, keep: SavedScope) -> Trainer<ResidentLayers> {
    let layers = ResidentLayers::load(&*open(model).unwrap(), 1, &|_| {}).unwrap();
    let frame = ClientBase::open(model).unwrap().frame;
    let shape = kv_shape(&frame.config, layers.sites().numerics().kv(None));
    let cores: Vec<usize> =
        if threads == 1 { Vec::new() } else { (0..threads).map(|core| core % 2).collect() };
    Trainer::new(frame.into(), layers, shape, ThreadPool::new(&cores).unwrap(), keep).unwrap()
}

fn read_adapter(trainer: &Trainer<ResidentLayers>, config: &Path, tensors: &Path) -> MethodWeights {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(config, dir.path().join("adapter_config.json")).unwrap();
    fs::copy(tensors, dir.path().join("adapter_model.safetensors")).unwrap();
    Adapter::read(dir.path(), &trainer.model().config).unwrap().method
}

struct MeanLoss<'a> {
    weights: &'a [f32],
    total: f32,
    sum: f64,
}

impl<'a> MeanLoss<'a> {
    fn of(weights: &'a [f32]) -> Self {
        Self { weights, total: weights.iter().sum(), sum: 0.0 }
    }

    fn loss(&self) -> f64 {
        self.sum / f64::from(self.total)
    }
}

impl Loss for MeanLoss<'_> {
    fn gradients(&mut self, targets: Range<usize>, log_probabilities: &[f32], gradients: &mut [f32]) {
        for ((&weight, &value), gradient) in
            self.weights[targets].iter().zip(log_probabilities).zip(gradients)
        {
            *gradient = -weight / self.total;
            self.sum -= f64::from(weight) * f64::from(value);
        }
    }
}

struct TorchBatch {
    tokens: Vec<Vec<u32>>,
    targets: Vec<Vec<Option<u32>>>,
    weights: Vec<f32>,
    /// Dropout rate at the matrices' inputs.
    dropped: Option<f64>,
}

impl TorchBatch {
    fn of(sequences: &[WeightedSequence]) -> Self {
        let inputs = |of: &WeightedSequence| of.tokens[..of.tokens.len() - 1].to_vec();
        let targets = |of: &WeightedSequence| of.tokens[1..].iter().map(|&token| Some(token)).collect();
        Self {
            tokens: sequences.iter().map(inputs).collect(),
            targets: sequences.iter().map(targets).collect(),
            weights: sequences.iter().flat_map(|of| of.weights.clone()).collect(),
            dropped: None,
        }
    }

    fn dropping(self, share: f64) -> Self {
        Self { dropped: Some(share), ..self }
    }

    /// The batch without tokens of weight zero.
    fn of_weight(&self) -> Self {
        let mut weights = self.weights.iter();
        let mut asked = |target: &Option<u32>| target.filter(|_| *weights.next().unwrap() != 0.0);
        let targets = self.targets.iter().map(|of| of.iter().map(&mut asked).collect()).collect();
        let weights = self.weights.iter().copied().filter(|&weight| weight != 0.0).collect();
        Self { tokens: self.tokens.clone(), targets, weights, dropped: self.dropped }
    }

    fn examples(&self) -> Vec<Example<'_>> {
        let dropout = |key| self.dropped.map(|rate| Dropout { rate, key });
        let all = (7..).zip(self.tokens.iter().zip(&self.targets));
        all.map(|(key, (tokens, targets))| Example { tokens, targets, dropout: dropout(key) }).collect()
    }
}

fn learn(
    trainer: &mut Trainer<ResidentLayers>,
    method: &MethodWeights,
    batch: &TorchBatch,
    together: usize,
) -> (f64, Vec<f32>, Gradients) {
    let learner = TrainableAdapter::new(method, &trainer.model().config, LoraPrecision::Exact).unwrap();
    let (mut gradients, mut all, mut loss) =
        (Gradients::zero(method), Vec::new(), MeanLoss::of(&batch.weights));
    for (examples, turn) in batch.examples().chunks(together).zip(gradients.turns()) {
        let tape = trainer.forward(&learner, examples).unwrap();
        let first = all.len();
        all.extend(trainer.log_probabilities(&learner, &tape).unwrap());
        let mut part = LossPart { loss: &mut loss, first };
        trainer.reverse(&learner, tape, &mut part, turn).unwrap();
    }
    (loss.loss(), all, gradients)
}

/// Loss of a part of a batch, whose examples begin at an offset.
struct LossPart<'a, 'b> {
    loss: &'a mut MeanLoss<'b>,
    first: usize,
}

impl Loss for LossPart<'_, '_> {
    fn gradients(&mut self, targets: Range<usize>, log_probabilities: &[f32], gradients: &mut [f32]) {
        let targets = self.first + targets.start..self.first + targets.end;
        self.loss.gradients(targets, log_probabilities, gradients);
    }
}

/// Largest difference, relative to the largest expected value.
fn off(got: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(got.len(), wanted.len());
    let largest = wanted.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let off = got.iter().zip(wanted).fold(0.0f32, |most, (got, wanted)| most.max((got - wanted).abs()));
    assert!(off.is_finite());
    if largest == 0.0 { off } else { off / largest }
}

const MODELS: [&str; 14] = [
    "llama-tied",
    "llama-rope3",
    "mistral-window",
    "qwen2-bias",
    "qwen3-qknorm",
    "gemma3",
    "granite",
    "olmo2",
    "phi3",
    "gemma2",
    "mixtral",
    "qwen3moe",
    "qwen3moe-steps",
    "gptoss",
];

/// Replaces the gradients of A of layers with a common input, where PEFT has one matrix, by their sum.
fn sum_shared(method: &MethodWeights, gradients: &mut [Vec<f32>]) {
    let MethodWeights::Lora(modules) = method else { return };
    let group = |module: &LoraModule| match module.target {
        Target::Q | Target::K | Target::V => Some((module.layer, 0)),
        Target::Gate | Target::Up => Some((module.layer, 1)),
        _ => None,
    };
    for first in 0..modules.len() {
        let Some(of) = group(&modules[first]) else { continue };
        let members: Vec<usize> = (0..modules.len()).filter(|&at| group(&modules[at]) == Some(of)).collect();
        if members[0] != first {
            continue;
        }
        let mut sum = vec![0.0; gradients[2 * first].len()];
        for &member in &members {
            sum.iter_mut().zip(&gradients[2 * member]).for_each(|(sum, g)| *sum += g);
        }
        members.iter().for_each(|&member| gradients[2 * member].clone_from(&sum));
    }
}

fn cases() -> Vec<(String, PathBuf)> {
    let training = golden("training");
    let mut cases = Vec::new();
    for model in MODELS {
        for method in ["lora", "lora-all", "rslora", "ia3", "prefix", "lm-head"] {
            let case = training.join(model).join(method);
            // In mixtures attention learns, and in plain feed-forward blocks also the scaled vectors.
            if case.exists() || !["mixtral", "qwen3moe", "qwen3moe-steps", "gptoss"].contains(&model) {
                cases.push((model.to_owned(), case));
            }
        }
    }
    cases
}

#[test]
fn loss_log_probabilities_and_gradients_are_those_of_torch() {
    for (model, case) in cases() {
        let mut trainer = trainer(&golden("models").join(&model), 1, SavedScope::All);
        let expected: TorchExpectation =
            serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
        let config = case.join("start/adapter_config.json");
        let method = read_adapter(&trainer, &config, &case.join("start/adapter_model.safetensors"));
        let wanted = read_adapter(&trainer, &config, &case.join("gradients.safetensors"));
        let batch = TorchBatch::of(&expected.batches[0]);
        let (loss, log_probabilities, gradients) = learn(&mut trainer, &method, &batch, usize::MAX);
        let name = case.display();
        assert!((loss - expected.loss).abs() < 1e-5, "{name}: loss {loss}, not {}", expected.loss);
        let logprobs = expected.logprobs.concat();
        let far = log_probabilities.iter().zip(&logprobs).fold(0.0f32, |far, (a, b)| far.max((a - b).abs()));
        assert!(far < 1e-4, "{name}: log-probabilities are {far} away");
        let mut gradients: Vec<Vec<f32>> = gradients.tensors().iter().map(|of| of.to_vec()).collect();
        if model == "phi3" {
            sum_shared(&method, &mut gradients);
        }
        for (number, (got, wanted)) in gradients.iter().zip(wanted.tensors()).enumerate() {
            let off = off(got, wanted);
            assert!(off < 1e-4, "{name}: gradient {number} is {off} away");
        }
    }
}

#[test]
fn gradients_are_the_same_bits_in_any_batches_on_any_threads_and_whatever_is_kept() {
    for (model, case) in cases() {
        let path = golden("models").join(&model);
        let expected: TorchExpectation =
            serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
        let mut sequences: Vec<WeightedSequence> = expected.batches.into_iter().take(2).flatten().collect();
        // Longer than one partial sum of rows.
        let long = sequences.iter().flat_map(|of| of.tokens.clone()).collect::<Vec<_>>();
        sequences.push(WeightedSequence { weights: vec![1.0; long.len() - 1], tokens: long });
        let whole = TorchBatch::of(&sequences);
        let bits = |batch: &TorchBatch, threads, keep, together| {
            let mut trainer = trainer(&path, threads, keep);
            let start = case.join("start");
            let files = ["adapter_config.json", "adapter_model.safetensors"].map(|name| start.join(name));
            let method = read_adapter(&trainer, &files[0], &files[1]);
            let (_, log_probabilities, gradients) = learn(&mut trainer, &method, batch, together);
            let tensors = gradients.tensors().concat();
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            (bits(log_probabilities), bits(tensors))
        };
        let all = bits(&whole, 1, SavedScope::All, usize::MAX);
        let less = TorchBatch::of(&sequences).dropping(0.25);
        let dropped = bits(&less, 1, SavedScope::All, usize::MAX);
        let is_lora = !["ia3", "prefix"].contains(&case.file_name().unwrap().to_str().unwrap());
        assert_eq!(all != dropped, is_lora, "{}: only matrices are given less", case.display());
        for (threads, keep, together) in [
            (2, SavedScope::All, usize::MAX),
            (1, SavedScope::Inputs, usize::MAX),
            (1, SavedScope::All, 1),
            (2, SavedScope::Inputs, 2),
        ] {
            let what = || format!("{}: {threads} threads, {keep:?}, {together}", case.display());
            assert!(all == bits(&whole, threads, keep, together), "{}", what());
            assert!(dropped == bits(&less, threads, keep, together), "{}, dropping", what());
        }
    }
}

#[test]
fn a_target_that_counts_nothing_changes_no_bit_of_a_gradient() {
    for (model, case) in cases() {
        let mut trainer = trainer(&golden("models").join(&model), 1, SavedScope::All);
        let start = case.join("start");
        let files = ["adapter_config.json", "adapter_model.safetensors"].map(|name| start.join(name));
        let method = read_adapter(&trainer, &files[0], &files[1]);
        // Prompts of which one ends within the first partial sum, and one in the second.
        let sequence = |prompt: usize| WeightedSequence {
            tokens: (0..150).map(|at| (at * 7 + 3) % 60).collect(),
            weights: (0..149).map(|at| if at < prompt { 0.0 } else { 1.0 }).collect(),
        };
        let all = TorchBatch::of(&[sequence(10), sequence(70)]);
        let bits =
            |gradients: Gradients| gradients.tensors().concat().into_iter().map(f32::to_bits).collect();
        let [all, asked]: [Vec<u32>; 2] =
            [&all, &all.of_weight()].map(|batch| bits(learn(&mut trainer, &method, batch, usize::MAX).2));
        assert!(all == asked, "{}", case.display());
    }
}

#[test]
fn gradients_are_what_the_loss_changes_by_where_something_is_dropped() {
    for method in ["lora-all", "lm-head"] {
        let mut trainer = trainer(&golden("models/llama-rope3"), 1, SavedScope::All);
        let case = golden("training/llama-rope3").join(method);
        let expected: TorchExpectation =
            serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
        let start = case.join("start");
        let mut method = read_adapter(
            &trainer,
            &start.join("adapter_config.json"),
            &start.join("adapter_model.safetensors"),
        );
        let batch = TorchBatch::of(&expected.batches[0]).dropping(0.3);
        let (_, _, gradients) = learn(&mut trainer, &method, &batch, usize::MAX);
        let length: f64 = gradients.tensors().concat().iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        let step = (0.01 / length) as f32;
        let mut moved = |by: f32| {
            for (numbers, gradients) in method.tensors_mut().into_iter().zip(gradients.tensors()) {
                numbers.iter_mut().zip(gradients).for_each(|(number, g)| *number += by * g);
            }
            learn(&mut trainer, &method, &batch, usize::MAX).0
        };
        let change = moved(step) - moved(-2.0 * step);
        let expected = 2.0 * f64::from(step) * length;
        assert!((change / expected - 1.0).abs() < 0.02, "{change}, not {expected}");
    }
}

/// Bits of the log-probabilities that an engine reports for the following tokens.
fn served(model: &Path, adapter: &Path, batch: &TorchBatch) -> Vec<u32> {
    let weights = LoadedWeights::load(&*open(model).unwrap(), 2).unwrap();
    let read = Adapter::read(adapter, weights.config()).unwrap();
    let prepared =
        PreparedAdapter::new(&read, weights.config(), weights.adapter_precision()).map(Arc::new).unwrap();
    let options = ResidentOptions { cores: vec![0], kv_bytes: 64 << 20, kv_dtype: None };
    let mut engine = ResidentModel::new(weights, &options).unwrap();
    let (vocabulary, mut all, mut logits) = (engine.vocab_size(), Vec::new(), Vec::new());
    for (tokens, targets) in batch.tokens.iter().zip(&batch.targets) {
        let virtual_tokens = prepared.virtual_tokens();
        let tokens: Vec<u32> = [vec![0; virtual_tokens], tokens.clone()].concat();
        let blocks: Vec<BlockId> = (0..).take(tokens.len().div_ceil(BLOCK_TOKENS)).map(BlockId).collect();
        // In chunks, as in a chunked prefill.
        for (number, chunk) in tokens.chunks(13).enumerate() {
            let (start, adapter) = (13 * number, Some(&prepared));
            let slice = SequenceSlice {
                trunk: &[],
                tokens: chunk,
                start,
                blocks: &blocks,
                adapter,
                logits: LogitRows::All,
            };
            engine.forward(&[slice], &mut logits).unwrap();
            for (row, logits) in logits.chunks(vocabulary).enumerate() {
                let Some(at) = (start + row).checked_sub(virtual_tokens) else { continue };
                all.push(logprobs(logits, targets[at].unwrap(), 0).0.to_bits());
            }
        }
    }
    all
}

#[test]
fn log_probabilities_are_bit_for_bit_those_that_serving_reports() {
    let real = real_model();
    let example = golden("../../examples/adapters/pirate");
    let tiny = cases().into_iter().map(|(model, case)| {
        let path = golden("models").join(model);
        (path, case.join("start"), case.join("expected.json"))
    });
    let real = [(real, example, golden("training/smollm2/expected.json"))];
    for (model, adapter, expected) in tiny.chain(real) {
        let expected: TorchExpectation = serde_json::from_slice(&fs::read(expected).unwrap()).unwrap();
        let batch = TorchBatch::of(&expected.batches[0]);
        let mut trainer = trainer(&model, 2, SavedScope::Inputs);
        let method = Adapter::read(&adapter, &trainer.model().config).unwrap().method;
        let precision = LoadedWeights::load(&*open(&model).unwrap(), 2).unwrap().adapter_precision();
        let learner = TrainableAdapter::new(&method, &trainer.model().config, precision).unwrap();
        let tape = trainer.forward(&learner, &batch.examples()).unwrap();
        let learned = trainer.log_probabilities(&learner, &tape).unwrap();
        let learned: Vec<u32> = learned.into_iter().map(f32::to_bits).collect();
        assert!(learned == served(&model, &adapter, &batch), "{}", adapter.display());
    }
}

/// Largest difference of any tensor's gradients from torch's on the dequantized weights, relative to its
/// largest.
fn off_on_the_real_model(source: &(dyn WeightSource + Sync), kv: KvPrecision, near: f32) -> f32 {
    let (model, golden) = (real_model(), golden("training/smollm2"));
    let layers = ResidentLayers::load(source, 2, &|_| {}).unwrap();
    let frame = ClientBase::open(&model).unwrap().frame;
    let shape = kv_shape(&frame.config, kv);
    let mut trainer =
        Trainer::new(frame.into(), layers, shape, ThreadPool::new(&[0, 1]).unwrap(), SavedScope::All)
            .unwrap();
    let expected: TorchExpectation =
        serde_json::from_slice(&fs::read(golden.join("expected.json")).unwrap()).unwrap();
    let method = Adapter::read(&testkit::paths::example_adapter("pirate"), &trainer.model().config);
    let (method, batch) = (method.unwrap().method, TorchBatch::of(&expected.batches[0]));
    let (loss, log_probabilities, gradients) = learn(&mut trainer, &method, &batch, usize::MAX);
    assert!((loss - expected.loss).abs() < f64::from(near) / 10.0, "loss {loss}, not {}", expected.loss);
    let far = log_probabilities.iter().zip(expected.logprobs.concat()).map(|(a, b)| (a - b).abs());
    assert!(far.fold(0.0, f32::max) < near);
    let file = fs::read(golden.join("gradients.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let (tensors, mut compared, mut largest) = (gradients.tensors(), 0, 0.0_f32);
    let MethodWeights::Lora(modules) = &method else { panic!("a low-rank adapter") };
    for (number, module) in modules.iter().enumerate() {
        for (part, values) in ["A", "B"].into_iter().zip(&tensors[2 * number..]) {
            let name = module_name(module.layer, module.target);
            let Ok(wanted) = file.tensor(&format!("base_model.model.{name}.lora_{part}.weight")) else {
                continue;
            };
            let wanted = wanted.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            largest = largest.max(off(values, &wanted.collect::<Vec<f32>>()));
            compared += 1;
        }
    }
    assert_eq!(compared, 12);
    largest
}

#[test]
fn gradients_of_the_real_model_are_those_of_torch_on_its_dequantized_weights() {
    let source = Dequantized(open(&real_model()).unwrap());
    let off = off_on_the_real_model(&source, BaseNumerics::Exact.kv(Some(KvPrecision::F32)), 1e-3);
    assert!(off < 1e-3, "{off} away");
}

/// Rounding in serving has a visible but small effect: 0.6 in the logarithm of a probability of 4e-10, 0.2
/// above 1e-5.
#[test]
fn gradients_of_the_weights_as_they_are_served_are_near_those_of_torch() {
    let source = open(&real_model()).unwrap();
    let off = off_on_the_real_model(&*source, BaseNumerics::Rounded.kv(None), 0.8);
    assert!(off < 0.25, "{off} away");
}
