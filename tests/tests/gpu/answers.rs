//! The base on a GPU or its stand-in: the real programs over HTTP, compared with the CPU.
//!
//! The model and the rule for skipping: see [`e2e_tests::gpu`].

use std::{fs, time::Duration};

use client::transport::local::LocalConnector;
use e2e_tests::{
    BASE, CompletionAnswer, Deployment, DeploymentPlan, DeploymentProcess, StateDirectory, WATCHDOG,
    eventually,
    fixtures::prompt,
    gpu::{
        NEVER_GBPS, SEED, VOCABULARY, adapter, assert_alike, copy_adapter, has_device, is_stand_in, plan,
        question, small_model,
    },
    split::tenant::{OPEN, SplitTenant},
};
use model::{
    forward::{ForwardPass as _, LogitRows, SequenceSlice},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    sources::random::RandomSource,
};
use serde_json::json;
use types::BlockId;

fn ask(deployment: &Deployment, model: &str, seed: u32) -> CompletionAnswer {
    deployment.client.ask(&question(model, seed, 20, 6)).answer
}

#[test]
fn a_gpu_answers_as_the_cpu_does_with_and_without_adapters() {
    if !has_device() {
        return;
    }
    let (model, place) = (small_model(), tempfile::tempdir().expect("a temporary directory"));
    let adapters = [("narrow", 2), ("wide", 24)].map(|(name, rank)| {
        adapter(rank, rank as usize, &place.path().join(name));
        name
    });
    let answers = |device| {
        let deployment = plan(model.path(), device).start();
        let mut answers: Vec<CompletionAnswer> = (1..4).map(|seed| ask(&deployment, BASE, seed)).collect();
        for name in adapters {
            // Loads the adapters while the deployment serves.
            let to = deployment.place().adapters().join(name);
            copy_adapter(&place.path().join(name), &to);
            deployment.client.load(name, &to);
            answers.extend((1..4).map(|seed| ask(&deployment, name, seed)));
        }
        let device = deployment.client.status()["device"].clone();
        assert!(deployment.stop().success());
        (answers, device)
    };
    let ((cpu, host), (gpu, device)) = (answers("cpu"), answers("cuda:0"));
    assert_eq!((&host["kind"], &device["kind"]), (&json!("cpu"), &json!("cuda")));
    assert!(device["memory_free_bytes"].as_u64() < device["memory_bytes"].as_u64(), "{device}");
    for (cpu, gpu) in cpu.iter().zip(&gpu) {
        assert_alike(cpu, gpu);
    }
    assert_ne!(gpu[0], gpu[3], "an adapter changes the answer");
}

fn logits_on_the_cpu(tokens: &[u32]) -> Vec<f32> {
    let directory = small_model();
    let source = RandomSource::open(directory.path(), SEED).expect("the shape is a model's");
    let weights = LoadedWeights::load(&source, 1).expect("the weights are whole");
    let options = ResidentOptions { cores: Vec::new(), kv_bytes: 1 << 20, kv_dtype: None };
    let mut model = ResidentModel::new(weights, &options).expect("there is memory");
    let (blocks, mut logits): (Vec<BlockId>, _) = ((0..8).map(BlockId).collect(), Vec::new());
    let slice = SequenceSlice {
        trunk: &[],
        tokens,
        start: 0,
        blocks: &blocks,
        adapter: None,
        logits: LogitRows::All,
    };
    let Ok(()) = model.forward(&[slice], &mut logits);
    logits
}

#[test]
fn a_split_client_rents_the_layers_of_a_gpu() {
    if !has_device() {
        return;
    }
    let model = small_model();
    let deployment = plan(model.path(), "cuda:0").start();
    let socket = deployment.place().state().join("layers.sock");
    let connector = Box::new(LocalConnector::new(socket, Duration::ZERO, WATCHDOG));
    let tenant = SplitTenant::rent(model.path(), connector, OPEN, None, WATCHDOG);
    let tokens: Vec<u32> = prompt(5, 40).into_iter().map(|token| token % VOCABULARY as u32).collect();
    let logits = tenant.expect("the executor takes a client in").logits(&tokens);
    let expected = logits_on_the_cpu(&tokens);
    assert_eq!(logits.len(), expected.len());
    let difference = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference < 0.2, "{difference}");
    assert!(deployment.stop().success());
}

#[test]
fn a_cold_adapter_is_answered_at_once_with_and_without_workers() {
    if !has_device() {
        return;
    }
    let (model, place) = (small_model(), tempfile::tempdir().expect("a temporary directory"));
    adapter(9, 16, place.path());
    let answers = |plan: DeploymentPlan, places: &[&str]| {
        let deployment = plan.start();
        let to = deployment.place().adapters().join("cold");
        copy_adapter(place.path(), &to);
        deployment.client.load("cold", &to);
        let answers: Vec<CompletionAnswer> = (1..4).map(|seed| ask(&deployment, "cold", seed)).collect();
        eventually("it is told where the adapter was computed", || {
            let rows = &deployment.client.adapter("cold")["rank_rows"];
            places.iter().any(|place| rows[place].as_u64() > Some(0))
        });
        assert!(deployment.stop().success());
        answers
    };
    let expected = answers(plan(model.path(), "cpu"), &["device"]);
    for workers in [0, 1] {
        let plan = plan(model.path(), "cuda:0").workers(workers).cold_by("1MiB", NEVER_GBPS);
        let found = answers(plan, &["workers", "executor"]);
        expected.iter().zip(&found).for_each(|(cpu, gpu)| assert_alike(cpu, gpu));
    }
    // If the driver cannot register foreign memory, rows go to workers through the host.
    let plan = plan(model.path(), "cuda:0").workers(1).cold_by("1MiB", NEVER_GBPS);
    let found = answers(plan.environment("CUDA_ON_CPU_REFUSE", "registration"), &["workers", "executor"]);
    expected.iter().zip(&found).for_each(|(cpu, gpu)| assert_alike(cpu, gpu));
}

#[test]
fn a_gpu_that_another_program_has_for_itself_is_told_in_a_line_that_offers_the_cpu() {
    if !has_device() || !is_stand_in() {
        return;
    }
    let model = small_model();
    let text = refusal(&plan(model.path(), "cuda:0").environment("CUDA_ON_CPU_REFUSE", "opening"));
    assert!(text.contains("cuda:0 accepts no further program") && text.contains("--device cpu"), "{text}");
}

#[test]
fn a_gpu_that_is_lost_is_opened_anew_and_no_request_fails() {
    if !has_device() || !is_stand_in() {
        return;
    }
    let model = small_model();
    let whole = plan(model.path(), "cuda:0").start();
    let expected: Vec<CompletionAnswer> = (1..9).map(|seed| ask(&whole, BASE, seed)).collect();
    assert!(whole.stop().success());
    // The stand-in fails permanently after this number of launches, counted per process.
    let plan = plan(model.path(), "cuda:0").restless().set("COLD_START", "cached");
    let place = std::sync::Arc::new(StateDirectory::new());
    let deployment = plan.environment("CUDA_ON_CPU_FAIL_AFTER", "350").start_in(place);
    let first = deployment.process(DeploymentProcess::Executor).expect("an executor");
    for (seed, expected) in (1..9).zip(&expected) {
        assert_alike(expected, &ask(&deployment, BASE, seed));
    }
    eventually("another executor serves", || {
        deployment.process(DeploymentProcess::Executor).is_some_and(|process| process != first)
    });
    assert!(deployment.stop().success());
}

#[test]
fn random_weights_are_those_of_their_seed_and_need_a_shape_and_a_tokenizer_alone() {
    let (whole, bare) = (small_model(), small_model());
    fs::remove_file(bare.path().join("model.safetensors")).expect("it has weights");
    let answers = |plan: DeploymentPlan| {
        let deployment = plan.start();
        let answers: Vec<CompletionAnswer> = (1..4).map(|seed| ask(&deployment, BASE, seed)).collect();
        assert!(deployment.stop().success());
        answers
    };
    let made = |seed: u64| plan(bare.path(), "cpu").set("RANDOM_WEIGHTS", &seed.to_string());
    assert_eq!(answers(plan(whole.path(), "cpu")), answers(made(SEED)), "the files hold the same weights");
    assert_ne!(answers(made(SEED)), answers(made(SEED + 1)));
    fs::remove_file(bare.path().join("tokenizer.json")).expect("it has a tokenizer");
    let text = refusal(&made(SEED));
    assert!(
        text.contains("there is no tokenizer.json in") && text.contains("tokenizer_config.json"),
        "{text}"
    );
}

/// Error of `holobiont up` when it does not start.
fn refusal(plan: &DeploymentPlan) -> String {
    let output = plan.command(&StateDirectory::new()).output().expect("holobiont runs");
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_machine_without_a_driver_says_so_in_a_line_that_offers_the_cpu() {
    if has_device() && !is_stand_in() {
        return;
    }
    let model = small_model();
    let text = refusal(&plan(model.path(), "cuda:0").environment("LD_LIBRARY_PATH", ""));
    let line = text.lines().find(|line| line.contains("NVIDIA driver")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("--device cpu"), "{line}");
    assert_eq!(text.matches("NVIDIA driver").count(), 1, "it is not tried again: {text}");
}

#[test]
fn a_gpu_that_is_not_there_is_named_and_those_there_are_counted() {
    if !has_device() {
        return;
    }
    let model = small_model();
    let text = refusal(&plan(model.path(), "cuda:63"));
    assert!(text.contains("there is no cuda:63") && text.contains("--device cpu"), "{text}");
}

#[test]
fn what_does_not_fit_into_a_gpus_memory_is_told_with_all_figures_before_anything_is_taken() {
    if !has_device() {
        return;
    }
    let model = small_model();
    let text = refusal(&plan(model.path(), "cuda:0").set("KV_BYTES", "999999GiB"));
    for part in ["cuda:0 has", "for weights", "for KV cache and adapters (--device-bytes)", "--device cpu"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}
