//! The forward pass compared with Hugging Face transformers and PEFT (see `tests/golden/README.md`).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use testkit::paths::{golden, real_model};

use kernels::lora::LoraPrecision;
use model::{
    adapter::{Adapter, AnyAdapter},
    deltas::prepared::PreparedAdapter,
    forward::ForwardPass as _,
    linear_sites::SitePath,
    precision::Precision,
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    sources::{dequantized::Dequantized, open::open},
};
use serde::Deserialize;

use crate::golden_support::{
    GoldenAdapter, RealGolden, check_all, check_classification, check_embeddings, generate, read,
};

#[derive(Deserialize)]
struct Refusals {
    refused: Vec<ExpectedRefusal>,
}

#[derive(Deserialize)]
struct ExpectedRefusal {
    name: String,
    model: String,
    because: String,
}

fn resident(model: &Path) -> ResidentModel {
    resident_with(model, Precision::default(), None)
}

fn resident_with(model: &Path, precision: Precision, kv_dtype: Option<KvPrecision>) -> ResidentModel {
    let source = open(model).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap().with_precision(precision);
    let options = ResidentOptions { cores: vec![0], kv_bytes: 16 << 20, kv_dtype };
    ResidentModel::new(weights, &options).unwrap()
}

fn adapter(model: &Path, path: &Path) -> Arc<PreparedAdapter> {
    let adapter = Adapter::read(path, open(model).unwrap().config()).unwrap();
    prepared(model, adapter.into())
}

fn prepared(model: &Path, asked: GoldenAdapter) -> Arc<PreparedAdapter> {
    let source = open(model).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    Arc::new(asked.prepared(source.config(), weights.adapter_precision()))
}

#[test]
fn every_model_and_adapter_gives_the_logits_and_tokens_of_transformers() {
    // 16-bit weights have 16-bit activations, and 4-bit or 8-bit ones rounded activations; all others must
    // agree to 1e-3.
    let tolerance = |name: &str| match name {
        _ if ["gptq", "awq"].iter().any(|part| name.contains(part)) => 0.3,
        // Gates of this model are steep: some exceed their limit.
        _ if name.contains("mxfp4") => 1.0,
        _ if name.contains("bf16") => 0.15,
        _ => 1e-3,
    };
    let load = |model: &Path| Some(resident(model));
    check_all(&golden(""), tolerance, load, |_, model, asked| Some(prepared(model, asked)));
}

#[test]
fn hidden_states_are_those_of_transformers() {
    check_embeddings(&golden(""), 1e-3, resident, |_, model, path| adapter(model, path));
}

#[test]
fn class_and_token_logits_are_those_of_transformers() {
    check_classification(&golden(""), 1e-3, resident, |_, model, asked| prepared(model, asked));
}

#[test]
fn quantized_layers_are_the_weights_that_they_stand_for() {
    let load = |path: &Path| {
        let source = Dequantized(open(path).unwrap());
        let options =
            ResidentOptions { cores: vec![0], kv_bytes: 16 << 20, kv_dtype: Some(KvPrecision::F32) };
        Some(ResidentModel::new(LoadedWeights::load(&source, 1).unwrap(), &options).unwrap())
    };
    // No rounding, also of adapters.
    let exact = |_: &ResidentModel, model: &Path, asked: GoldenAdapter| {
        Some(Arc::new(asked.prepared(open(model).unwrap().config(), LoraPrecision::Exact)))
    };
    // Exceptions: minima and 16-bit weights in some of these (`sources::safetensors::quantized`).
    let tolerance = |name: &str| if name.contains("gptq") || name.contains("awq") { 5e-2 } else { 1e-3 };
    check_all(&golden(""), tolerance, load, exact);
}

#[test]
fn a_dora_is_refused_by_name_where_the_bases_weights_are_not_at_hand() {
    let dir = golden("");
    let source = open(&dir.join("models/llama-tied")).unwrap();
    let path = dir.join("adapters/dora/llama-tied/everything");
    let error = Adapter::read(&path, source.config()).unwrap_err().to_string();
    assert!(error.contains("use_dora") && error.contains("an executor"), "{error}");
    let AnyAdapter::Decomposed(dora) = AnyAdapter::read(&path, source.config()).unwrap() else {
        panic!("it is a DoRA")
    };
    let error = dora.over(source.config(), |_, _| None).unwrap_err().to_string();
    assert!(error.contains("`model.layers.0.self_attn.q_proj`"), "{error}");
}

#[test]
fn adapters_that_are_not_supported_are_refused_by_name() {
    let dir = golden("");
    let index: Refusals = read(&dir.join("index.json"));
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

/// Largest error of a logit from 4-bit weights and 8-bit activations; logits span about 40.
const Q4_1_TOLERANCE: f32 = 1.5;

/// Squared error of the real model's logits against its dequantized weights, on its golden prompts.
fn squares_of(resident: &mut ResidentModel, golden: &RealGolden) -> f64 {
    let errors = golden.cases.iter().flat_map(|case| {
        let (logits, _) = generate(resident, None, &case.prompt, case.greedy.len());
        golden.errors(case, &logits)
    });
    errors.map(|error| f64::from(error).powi(2)).sum()
}

#[test]
fn the_finer_activations_are_rounded_the_nearer_is_the_real_model_to_its_dequantized_weights() {
    let path = real_model();
    let golden: RealGolden = read(&golden("expected/smollm2-q4_1/base.json"));
    let of = |precision| squares_of(&mut resident_with(&path, precision, Some(KvPrecision::F32)), &golden);
    let [int8, mixed, bf16, int15, exact] =
        [Precision::Int8, Precision::Mixed, Precision::Bf16, Precision::Int15, Precision::Exact].map(of);
    println!(
        "squares: {int8:.1} of 8 bits, {mixed:.1} mixed, {bf16:.1} of bf16, {int15:.3} of 15, {exact:.3} exact"
    );
    assert!(mixed < int8 / 2.0 && bf16 < mixed && int15 < mixed / 20.0 && exact < mixed / 20.0);
}

#[test]
fn the_finer_keys_and_values_are_kept_the_nearer_is_the_real_model_to_its_dequantized_weights() {
    let path = real_model();
    let golden: RealGolden = read(&golden("expected/smollm2-q4_1/base.json"));
    let of = |kv_dtype| squares_of(&mut resident_with(&path, Precision::Exact, kv_dtype), &golden);
    let [int8, f16, f32] = [Some(KvPrecision::Int8), Some(KvPrecision::F16), Some(KvPrecision::F32)].map(of);
    let rounded = squares_of(&mut resident_with(&path, Precision::Mixed, Some(KvPrecision::F32)), &golden);
    println!(
        "squares: {int8:.2} of 8 bits, {f16:.4} of 16, {f32:.4} of 32; {rounded:.2} of mixed activations"
    );
    assert!(f16 < int8 / 20.0 && f32 <= f16 && int8 < rounded);
}

#[test]
fn an_exact_pass_has_the_bits_of_an_exact_deployment_and_leaves_others_theirs() {
    let path = real_model();
    let golden: RealGolden = read(&golden("expected/smollm2-q4_1/base.json"));
    let prompt = &golden.cases[0].prompt;
    let over = |precision| resident_with(&path, precision, Some(KvPrecision::F16));
    let mut serving = over(Precision::Mixed);
    let before = generate(&mut serving, None, prompt, 4);
    serving.set_path(SitePath::Linear);
    let exact = generate(&mut serving, None, prompt, 4);
    serving.set_path(SitePath::Fast);
    assert_eq!(generate(&mut serving, None, prompt, 4), before);
    assert_eq!(generate(&mut over(Precision::Exact), None, prompt, 4), exact);
    assert_ne!(before, exact);
}

#[test]
fn the_real_model_agrees_with_its_dequantized_weights() {
    let path = real_model();
    let mut resident = resident(&path);
    let dir = golden("");
    for name in ["base", "pirate", "json", "haiku"] {
        let example = dir.join("../../examples/adapters").join(name);
        let adapter = (name != "base").then(|| adapter(&path, &example));
        let golden: RealGolden = read(&dir.join("expected/smollm2-q4_1").join(format!("{name}.json")));
        let (mut errors, mut agreed, mut steps) = (Vec::new(), 0, 0);
        for case in &golden.cases {
            let (logits, tokens) = generate(&mut resident, adapter.as_ref(), &case.prompt, case.greedy.len());
            errors.extend(golden.errors(case, &logits));
            agreed += case.same(name, &tokens, Q4_1_TOLERANCE);
            steps += tokens.len();
        }
        let worst = errors.iter().copied().fold(0.0, f32::max);
        let squares: f64 = errors.iter().map(|&error| f64::from(error).powi(2)).sum();
        println!(
            "{name}: largest logit error {worst:.3}, rms {:.3}, {agreed} of {steps} greedy tokens before the first difference",
            (squares / errors.len() as f64).sqrt()
        );
        assert!(errors.iter().all(|&error| error <= Q4_1_TOLERANCE), "{name}: logit error {worst}");
    }
}

/// Gemma 3 270M, beside the real model; `scripts/fetch-model gemma` downloads it.
fn gemma() -> PathBuf {
    let path = real_model().with_file_name("gemma-3-270m-q4_k_m.gguf");
    assert!(path.exists(), "{} is missing; run ./scripts/fetch-model gemma", path.display());
    path
}

/// Largest error of a logit of Gemma 3 270M, whose logits span about 40: with 32-bit weights, and as served.
const GEMMA_EXACT: f32 = 1e-3;
const GEMMA_SERVED: f32 = 0.6;

/// Compares logits and greedy tokens after short texts, and after one longer than the window of most layers.
fn check_gemma(resident: &mut ResidentModel, what: &str, tolerance: f32) {
    let golden: RealGolden = read(&golden("expected/gemma3-270m-q4_k_m/base.json"));
    assert!(golden.cases.iter().any(|case| case.prompt.len() > 512));
    for case in &golden.cases {
        let (logits, tokens) = generate(resident, None, &case.prompt, case.greedy.len());
        let worst = golden.errors(case, &logits).into_iter().fold(0.0, f32::max);
        let agreed = case.same(what, &tokens, tolerance);
        let of = (case.prompt.len(), case.greedy.len());
        println!("{what}: logit error {worst:.5} behind {} tokens, {agreed} of {} greedy", of.0, of.1);
        assert!(worst <= tolerance, "{what}: logit error {worst} behind {} tokens", of.0);
    }
}

#[test]
fn gemma_in_32_bits_gives_the_logits_and_tokens_of_transformers() {
    let source = Dequantized(open(&gemma()).unwrap());
    let weights = LoadedWeights::load(&source, 2).unwrap();
    let options = ResidentOptions { cores: vec![0, 1], kv_bytes: 64 << 20, kv_dtype: None };
    check_gemma(&mut ResidentModel::new(weights, &options).unwrap(), "32 bits", GEMMA_EXACT);
}

#[test]
fn gemma_as_it_is_served_agrees_with_its_dequantized_weights() {
    check_gemma(&mut resident(&gemma()), "as served", GEMMA_SERVED);
}
