//! Logits and greedy tokens of Hugging Face transformers and PEFT.

use std::{path::Path, sync::Arc};

use model::{
    cuda::{CudaModel, Graphs},
    forward::{BlockId, ForwardPass as _, LogitRows, SequenceSlice},
    prepared_adapter::PreparedAdapter,
    resident::KvDtype,
};
use serde::Deserialize;

use crate::support::{adapter, at, best, device, error, golden, on_device, root};

#[derive(Deserialize)]
struct Index {
    models: Vec<IndexedModel>,
}

#[derive(Deserialize)]
struct IndexedModel {
    name: String,
    adapters: Vec<String>,
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

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// First-step logits and greedy tokens of `prompt`.
fn generate(
    pass: &mut CudaModel,
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
        pass.forward(&[slice], &mut logits).unwrap();
        if first.is_empty() {
            first.clone_from(&logits);
        }
        start += input.len();
        tokens.push(best(&logits));
        input = vec![best(&logits)];
    }
    (first, tokens)
}

fn check(
    pass: &mut CudaModel,
    adapter: Option<&Arc<PreparedAdapter>>,
    name: &str,
    file: &Path,
    tolerance: f32,
) -> f32 {
    let golden: Golden = read(file);
    let mut worst = 0.0f32;
    for case in &golden.cases {
        let (logits, tokens) = generate(pass, adapter, &case.prompt, case.greedy.len());
        let error = error(&logits, &case.logits);
        assert!(error <= tolerance, "{name}, prompt of {}: logit error {error}", case.prompt.len());
        worst = worst.max(error);
        // Where the two best logits are closer than the error, either may win; after that the texts differ.
        let sure =
            case.margins.iter().position(|&margin| margin <= 2.0 * tolerance).unwrap_or(case.margins.len());
        assert_eq!(tokens[..sure], case.greedy[..sure], "{name}, prompt of {}", case.prompt.len());
    }
    worst
}

#[test]
fn the_device_gives_the_logits_and_tokens_of_transformers() {
    let Some(cuda) = device() else { return };
    let index: Index = read(&golden("index.json"));
    for model in &index.models {
        // Weights of 16 bits meet activations of 16 bits; all others must agree to 1e-3.
        let tolerance = match () {
            () if model.name.contains("bf16") => 0.3,
            () if model.name.contains("f16") => 0.03,
            () => 1e-3,
        };
        let mut pass = on_device(&cuda, &model.name, Graphs::Use);
        let expected = golden("expected").join(&model.name);
        let error = check(&mut pass, None, &model.name, &expected.join("base.json"), tolerance);
        println!("{}: logit error {error:.2e}", model.name);
        for name in &model.adapters {
            let prepared = adapter(&pass, &golden("adapters").join(&model.name).join(name));
            let label = format!("{}/{name}", model.name);
            let file = expected.join(format!("{name}.json"));
            let error = check(&mut pass, Some(&prepared), &label, &file, tolerance);
            println!("{label}: logit error {error:.2e}");
        }
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

/// Activations of 16 bits meet weights that are dequantized exactly; logits span about 40.
const REAL_TOLERANCE: f32 = 0.6;

/// Cases and tokens that are tried: the stand-in computes a token of this model in seconds.
const REAL_CASES: usize = 2;
const REAL_TOKENS: usize = 4;

#[test]
fn the_real_model_agrees_with_its_dequantized_weights_on_the_device() {
    let Some(cuda) = device() else { return };
    let path = std::env::var_os("HOLOBIONT_TEST_MODEL")
        .map_or_else(|| root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf"), Into::into);
    if !path.exists() {
        eprintln!("skipped: {} is missing; run ./scripts/fetch-model", path.display());
        return;
    }
    let mut pass = at(&cuda, &path, KvDtype::Auto, Graphs::Use);
    for name in ["base", "pirate"] {
        let example = root().join("examples/adapters").join(name);
        let adapter = (name != "base").then(|| adapter(&pass, &example));
        let golden: RealGolden = read(&golden("expected/smollm2-q4_1").join(format!("{name}.json")));
        for case in golden.cases.iter().take(REAL_CASES) {
            let count = case.greedy.len().min(REAL_TOKENS);
            let (logits, tokens) = generate(&mut pass, adapter.as_ref(), &case.prompt, count);
            let tops = case.top.iter().map(|&(id, value)| (id as usize, value));
            let probes = golden.probe_ids.iter().copied().zip(case.probes.iter().copied());
            let error = tops.chain(probes).map(|(id, value)| (logits[id] - value).abs()).fold(0.0, f32::max);
            println!("{name}: logit error {error:.3}");
            assert!(error <= REAL_TOLERANCE, "{name}: logit error {error}");
            let same = tokens.iter().zip(&case.greedy).take_while(|(a, b)| a == b).count();
            assert!(
                same == count || case.margins[same] <= 2.0 * REAL_TOLERANCE,
                "{name}: token {same} differs though its margin is {}",
                case.margins[same]
            );
        }
    }
}
