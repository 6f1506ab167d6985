//! The forward pass judged by Hugging Face transformers and PEFT (see `tests/golden/README.md`).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use model::{
    adapter::Adapter,
    forward::{BlockId, ForwardPass, LogitRows, SequenceSlice},
    open::open,
    prepared_adapter::PreparedAdapter,
    resident::{KvDtype, LoadedWeights, ResidentModel, ResidentOptions},
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Index {
    models: Vec<IndexedModel>,
    refused: Vec<Refused>,
}

#[derive(Deserialize)]
struct IndexedModel {
    name: String,
    adapters: Vec<String>,
}

#[derive(Deserialize)]
struct Refused {
    name: String,
    model: String,
    because: String,
}

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
    margins: Vec<f32>,
}

fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn resident(model: &Path) -> ResidentModel {
    let source = open(model).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    let options = ResidentOptions { cores: vec![0], kv_bytes: 16 << 20, kv_dtype: KvDtype::Auto };
    ResidentModel::new(weights, &options).unwrap()
}

fn adapter(model: &Path, path: &Path) -> Arc<PreparedAdapter> {
    let source = open(model).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    let adapter = Adapter::read(path, source.config()).unwrap();
    Arc::new(PreparedAdapter::new(&adapter, source.config(), weights.adapter_precision()).unwrap())
}

/// First-step logits and greedy tokens of `prompt`.
fn generate(
    model: &mut ResidentModel,
    adapter: Option<&Arc<PreparedAdapter>>,
    prompt: &[u32],
    count: usize,
) -> (Vec<f32>, Vec<u32>) {
    let mut input = vec![0; adapter.map_or(0, |adapter| adapter.virtual_tokens())];
    input.extend(prompt);
    let blocks: Vec<BlockId> = (0..(input.len() + count).div_ceil(16) as u32).map(BlockId).collect();
    let (mut logits, mut first, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
    let mut start = 0;
    for _ in 0..count {
        let slice =
            SequenceSlice { tokens: &input, start, blocks: &blocks, adapter, logits: LogitRows::Last };
        model.forward(&[slice], &mut logits);
        if first.is_empty() {
            first.clone_from(&logits);
        }
        start += input.len();
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        tokens.push(best as u32);
        input = vec![best as u32];
    }
    (first, tokens)
}

/// Checks one golden file; returns the largest logit error.
fn check(
    model: &mut ResidentModel,
    adapter: Option<&Arc<PreparedAdapter>>,
    name: &str,
    file: &Path,
    tolerance: f32,
) -> f32 {
    let golden: Golden = read(file);
    let mut worst = 0.0f32;
    for case in &golden.cases {
        let (logits, tokens) = generate(model, adapter, &case.prompt, case.greedy.len());
        assert_eq!(logits.len(), case.logits.len(), "{name}");
        let error = logits.iter().zip(&case.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error <= tolerance, "{name}, prompt of {}: logit error {error}", case.prompt.len());
        worst = worst.max(error);
        // Where the two best logits are closer than the error, either may win; after that the texts differ.
        let sure =
            case.margins.iter().position(|&margin| margin <= 2.0 * tolerance).unwrap_or(case.margins.len());
        assert_eq!(tokens[..sure], case.greedy[..sure], "{name}, prompt of {}", case.prompt.len());
        assert!(sure > 0 || tolerance > 1e-2, "{name}: the first token is decided");
    }
    worst
}

#[test]
fn every_model_and_adapter_gives_the_logits_and_tokens_of_transformers() {
    let dir = golden_dir();
    let index: Index = read(&dir.join("index.json"));
    for model in &index.models {
        let path = dir.join("models").join(&model.name);
        // Weights of 16 bits meet activations of 16 bits; all others must agree to 1e-3.
        let tolerance = if model.name.contains("bf16") { 0.15 } else { 1e-3 };
        let mut resident = resident(&path);
        let expected = dir.join("expected").join(&model.name);
        let error = check(&mut resident, None, &model.name, &expected.join("base.json"), tolerance);
        println!("{}: logit error {error:.2e}", model.name);
        for name in &model.adapters {
            let prepared = adapter(&path, &dir.join("adapters").join(&model.name).join(name));
            let label = format!("{}/{name}", model.name);
            let error = check(
                &mut resident,
                Some(&prepared),
                &label,
                &expected.join(format!("{name}.json")),
                tolerance,
            );
            println!("{label}: logit error {error:.2e}");
        }
    }
}

#[test]
fn adapters_that_are_not_supported_are_refused_by_name() {
    let dir = golden_dir();
    let index: Index = read(&dir.join("index.json"));
    assert!(!index.refused.is_empty());
    for refused in &index.refused {
        let source = open(&dir.join("models").join(&refused.model)).unwrap();
        let error =
            Adapter::read(&dir.join("adapters/refused").join(&refused.name), source.config()).unwrap_err();
        let text = format!("{error}");
        assert!(
            text.contains(&refused.because),
            "{}: {text} does not name {}",
            refused.name,
            refused.because
        );
    }
}

#[derive(Deserialize)]
struct RealGolden {
    probe_ids: Vec<usize>,
    cases: Vec<RealCase>,
}

#[derive(Deserialize)]
struct RealCase {
    prompt: Vec<u32>,
    top: Vec<(u32, f32)>,
    probes: Vec<f32>,
    greedy: Vec<u32>,
    margins: Vec<f32>,
}

/// Largest error of a logit that 4-bit weights and activations of 8 bits may cause; logits span about 40.
const Q4_1_TOLERANCE: f32 = 1.5;

/// The real model: `HOLOBIONT_TEST_MODEL`, or where `scripts/fetch-model` puts it.
fn real_model() -> PathBuf {
    let path = std::env::var_os("HOLOBIONT_TEST_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    assert!(path.exists(), "{} is missing; run ./scripts/fetch-model", path.display());
    path
}

#[test]
fn the_real_model_agrees_with_its_dequantized_weights() {
    let path = real_model();
    let mut resident = resident(&path);
    let dir = golden_dir();
    for name in ["base", "pirate", "json", "haiku"] {
        let example = dir.join("../../examples/adapters").join(name);
        let adapter = (name != "base").then(|| adapter(&path, &example));
        let golden: RealGolden = read(&dir.join("expected/smollm2-q4_1").join(format!("{name}.json")));
        let (mut worst, mut squares, mut count, mut agreed, mut steps) = (0.0f32, 0.0f64, 0, 0, 0);
        for case in &golden.cases {
            let (logits, tokens) = generate(&mut resident, adapter.as_ref(), &case.prompt, case.greedy.len());
            let tops = case.top.iter().map(|&(id, value)| (id as usize, value));
            for (id, value) in tops.chain(golden.probe_ids.iter().copied().zip(case.probes.iter().copied())) {
                let error = (logits[id] - value).abs();
                worst = worst.max(error);
                squares += f64::from(error).powi(2);
                count += 1;
            }
            let same = tokens.iter().zip(&case.greedy).take_while(|(a, b)| a == b).count();
            agreed += same;
            steps += tokens.len();
            if same < tokens.len() {
                assert!(
                    case.margins[same] <= 2.0 * Q4_1_TOLERANCE,
                    "{name}: token {same} differs though its margin is {}",
                    case.margins[same]
                );
            }
        }
        println!(
            "{name}: largest logit error {worst:.3}, rms {:.3}, {agreed} of {steps} greedy tokens before the first difference",
            (squares / f64::from(count)).sqrt()
        );
        assert!(worst <= Q4_1_TOLERANCE, "{name}: logit error {worst}");
    }
}
