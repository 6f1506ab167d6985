//! Logits and greedy tokens of Hugging Face transformers and PEFT.

use std::path::Path;

use model::{
    adapter::Scales,
    cuda::{CudaWeights, Graphs},
    sources::open::open,
};

use crate::{
    golden_support::{RealGolden, check_all, check_classification, check_embeddings, generate, read},
    support::{adapter, at, brought, device, golden, root},
};

#[test]
fn the_device_gives_the_logits_and_tokens_of_transformers() {
    let Some(cuda) = device() else { return };
    // 16-bit weights have 16-bit activations; all others must agree to 1e-3.
    let tolerance = |name: &str| match name {
        _ if ["bf16", "gptq", "awq"].iter().any(|part| name.contains(part)) => 0.3,
        _ if name.contains("f16") => 0.03,
        _ => 1e-3,
    };
    let load = |path: &Path| {
        let has_sinks = open(path).unwrap().config().traits.sinks;
        (!has_sinks).then(|| at(&cuda, path, None, Graphs::Use))
    };
    check_all(&golden(""), tolerance, load, |pass, _, asked| {
        // The device computes neither biases, nor a DoRA over layers with biases, nor adapters of experts.
        let has_offsets = asked.scales.as_ref().is_some_and(Scales::have_offsets);
        let is_computed = !has_offsets && !asked.adapter.changes_experts();
        is_computed.then(|| brought(pass, asked.prepared(pass.config(), pass.adapter_precision())))
    });
}

#[test]
fn a_model_that_only_a_cpu_computes_is_refused_by_name() {
    let Some(cuda) = device() else { return };
    let source = open(&golden("models/gptoss-mxfp4")).unwrap();
    let error = CudaWeights::load(&*source, &cuda, 1, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("sinks") && error.contains("--device cpu"), "{error}");
}

#[test]
fn hidden_states_are_those_of_transformers_on_the_device() {
    let Some(cuda) = device() else { return };
    let load = |path: &_| at(&cuda, path, None, Graphs::Use);
    check_embeddings(&golden(""), 1e-3, load, |pass, _, path| adapter(pass, path));
}

#[test]
fn class_and_token_logits_are_those_of_transformers_on_the_device() {
    let Some(cuda) = device() else { return };
    let load = |path: &_| at(&cuda, path, None, Graphs::Use);
    check_classification(&golden(""), 1e-3, load, |pass, _, asked| {
        brought(pass, asked.prepared(pass.config(), pass.adapter_precision()))
    });
}

/// 16-bit activations with exactly dequantized weights; logits span about 40.
const REAL_TOLERANCE: f32 = 0.6;

/// Tokens after the shortest prompt: the stand-in needs seconds per token of this model.
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
    let mut pass = at(&cuda, &path, None, Graphs::Use);
    for name in ["base", "pirate"] {
        let example = root().join("examples/adapters").join(name);
        let adapter = (name != "base").then(|| adapter(&pass, &example));
        let golden: RealGolden = read(&golden("expected/smollm2-q4_1").join(format!("{name}.json")));
        let case = golden.cases.iter().min_by_key(|case| case.prompt.len()).unwrap();
        let count = case.greedy.len().min(REAL_TOKENS);
        let (logits, tokens) = generate(&mut pass, adapter.as_ref(), &case.prompt, count);
        let errors = golden.errors(case, &logits);
        println!("{name}: logit error {:.3}", errors.iter().copied().fold(0.0, f32::max));
        assert!(errors.iter().all(|&error| error <= REAL_TOLERANCE), "{name}: logit errors {errors:?}");
        case.same(name, &tokens, REAL_TOLERANCE);
    }
}
