//! Adapters that trainers send to the gateway: snapshots stay in memory, named adapters go to the disk.

use std::path::Path;

use gateway::config::GatewayConfig;
use serde_json::{Value, json};
use types::AdapterVersion;

use crate::{
    fake_executor::{generation, reply_with},
    fake_trainer::{FakeTrainerService, weights},
    harness::{Harness, eventually},
    tinker_kept::TinkerRun,
};

async fn start(trainers: &FakeTrainerService, change: impl FnOnce(&mut GatewayConfig)) -> Harness {
    Harness::start_with(reply_with("x"), |config| {
        config.training.trainer_socket = Some(trainers.socket());
        change(config);
    })
    .await
}

/// Number of adapters below `directory`.
fn count(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.filter(|entry| !entry.as_ref().unwrap().file_name().to_string_lossy().starts_with('.')).count()
}

fn on_disk(harness: &Harness) -> usize {
    count(&harness.directory.path().join("state/adapters"))
}

fn in_memory(harness: &Harness) -> usize {
    let entries = std::fs::read_dir(harness.directory.path()).unwrap().map(Result::unwrap);
    let own = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("holobiont-"));
    own.map(|own| count(&own.path())).sum()
}

/// Generation of the adapter `name`, and whether it outlives the gateway.
async fn served(harness: &Harness, name: &str) -> (Value, Value) {
    let mut found = harness.client.get(&format!("/v1/adapters/{name}")).await.json();
    (found["generation"].take(), found["durable"].take())
}

fn hex(number: usize) -> Value {
    AdapterVersion(generation(weights(number).as_bytes())).to_string().into()
}

#[tokio::test]
async fn a_snapshot_is_in_memory_a_named_adapter_on_disk_and_both_are_the_files_of_a_load_by_path() {
    let trainers = FakeTrainerService::start(4);
    let mut harness = start(&trainers, |_| {}).await;
    let client = harness.client.clone();
    let mut run = TinkerRun::begin(&client).await;
    run.ask("save_weights_for_sampler", json!({ "sampling_session_seq_id": 0 })).await;
    assert_eq!((on_disk(&harness), in_memory(&harness)), (0, 1));
    let snapshot = format!("tinker-{}~1", run.name());
    assert_eq!(served(&harness, &snapshot).await, (hex(0), json!(false)));
    run.ask("save_weights_for_sampler", json!({ "path": "kept" })).await;
    assert_eq!((on_disk(&harness), in_memory(&harness)), (1, 1));
    let named = format!("tinker-{}-kept", run.name());
    assert_eq!(served(&harness, &named).await, (hex(1), json!(true)));
    let body = json!({ "lora_name": "path", "lora_path": harness.adapter("path", &weights(1)) });
    let loaded = client.post("/v1/load_lora_adapter", &body).await.json();
    assert_eq!(loaded["generation"], hex(1));
    harness.restart_executor(reply_with("y")).await;
    harness.wait_ready().await;
    for name in [&snapshot, &named] {
        let completion = json!({ "model": name, "prompt": "x", "max_tokens": 1 });
        assert_eq!(client.post("/v1/completions", &completion).await.status, 200, "{name}");
    }
}

#[tokio::test]
async fn a_model_has_four_snapshots_and_without_memory_these_are_on_disk() {
    for (memory_bytes, wanted) in [(1 << 20, (0, 4)), (4, (4, 0))] {
        let trainers = FakeTrainerService::start(4);
        let harness = start(&trainers, |config| config.ephemeral.bytes = memory_bytes).await;
        let mut run = TinkerRun::begin(&harness.client).await;
        for number in 0..6 {
            let saved =
                run.ask("save_weights_for_sampler", json!({ "sampling_session_seq_id": number })).await;
            assert!(saved["sampling_session_id"].is_string(), "{saved}");
        }
        eventually("the oldest are gone", || (on_disk(&harness), in_memory(&harness)) == wanted).await;
        assert_eq!(served(&harness, &format!("tinker-{}~6", run.name())).await.0, hex(5));
    }
}

#[tokio::test]
async fn an_adapter_that_is_too_large_is_refused_and_the_model_goes_on() {
    let trainers = FakeTrainerService::start(4);
    let harness = start(&trainers, |config| config.max_adapter_file_bytes = 4).await;
    let mut run = TinkerRun::begin(&harness.client).await;
    for body in [json!({ "path": "a" }), json!({ "sampling_session_seq_id": 0 })] {
        let refused = run.ask("save_weights_for_sampler", body).await;
        assert!(refused["error"].as_str().unwrap().contains("--max-adapter-file-bytes"), "{refused}");
        let stepped = run.ask("optim_step", json!({})).await;
        assert_eq!(stepped["type"], "optim_step", "the refused weights were no reply: {stepped}");
    }
    assert_eq!((on_disk(&harness), in_memory(&harness)), (0, 0));
}
