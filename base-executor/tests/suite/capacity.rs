//! `base-executor capacity` computes from a model's header what a running executor reports.

use std::{path::Path, process::Command};

use serde_json::Value;
use shmproto::message::{LoadAdapter, Stats, ToExecutor, ToGateway};

use crate::{
    gateway::{EVERYBODY, Gateway},
    process::{ChildProcess, ProcessFixture},
    tiny,
    worker::golden,
};

/// Runs `capacity` with the settings of [`ProcessFixture::command_for`]; returns exit code, stdout and stderr.
fn capacity(model: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_base-executor"))
        .args(["capacity", "--socket", "s", "--model"])
        .arg(model)
        .args(arguments)
        .env("HOLOBIONT_KV_BYTES", "1MiB")
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn capacity_report(model: &Path, arguments: &[&str]) -> Value {
    let (code, out, err) = capacity(model, arguments);
    assert_eq!((code, out.lines().count()), (0, 1), "{out}{err}");
    serde_json::from_str(&out).unwrap()
}

/// Loads the golden adapter of rank 16 for all linear layers, and waits until the device has it.
async fn load(gateway: &mut Gateway, path: &Path) -> Stats {
    let call = LoadAdapter::of_one(900, path.display().to_string(), EVERYBODY);
    gateway.send(ToExecutor::LoadAdapter(call)).await;
    let answer = gateway.answer().await;
    assert!(matches!(answer, ToGateway::AdapterLoaded(_)), "{answer:?}");
    gateway.stats_when(|stats| stats.memory.adapter_blocks > 0).await
}

#[tokio::test]
async fn the_forecast_is_what_a_running_executor_reports() {
    for (model, arguments) in [
        ("llama-tied", &[][..]),
        ("llama-tied", &["--precision", "exact", "--adapter-dtype", "f16", "--device-bytes", "3MiB"]),
        ("llama-tied", &["--kv-dtype", "int8", "--adapter-dtype", "bf16", "--process-memory", "2GiB"]),
        ("llama-gptq", &["--context-length", "40"]),
        ("gemma2", &["--kv-dtype", "f32", "--kv-bytes", "300KiB", "--device-adapter-bytes", "5MiB"]),
        ("phi3", &["--precision", "int15", "--adapter-bytes", "7MiB", "--adapter-dtype", "f16"]),
        ("qwen3-qknorm", &["--precision", "bf16", "--kv-dtype", "auto"]),
    ] {
        let (place, path) = (ProcessFixture::new(), golden("models").join(model));
        let forecast = capacity_report(&path, arguments);
        let mut process = ChildProcess(place.command_for(&path, "", arguments).spawn().unwrap());
        process.ready();
        let mut gateway = Gateway::connect(&place.socket()).await;
        let welcome = gateway.hello(1).await;
        let stats = load(&mut gateway, &golden("adapters").join(model).join("rank16-all-linear")).await;
        let (memory, held) = (&stats.memory, &stats.memory.held);
        let adapters = &forecast["adapters"];
        let sizes = adapters["sizes"].as_array().unwrap();
        let adapter =
            sizes.iter().find(|size| size["targets"] == "all-linear" && size["rank"] == 16).unwrap();
        for (name, forecast, real) in [
            ("weights", &forecast["weights"]["bytes"], held.weights_bytes),
            ("pool", &forecast["host"]["pool_bytes"], held.blocks_bytes),
            ("limit", &forecast["host"]["limit_bytes"], held.limit_bytes),
            ("block", &forecast["kv"]["block_bytes"], memory.block_bytes),
            ("blocks", &forecast["kv"]["pool_blocks"], stats.kv_blocks_total.into()),
            ("context", &forecast["context_length"], welcome.context_length.into()),
            ("host tier", &adapters["host_bytes"], welcome.adapter_budget_bytes),
            ("device tier", &adapters["device_bytes"], welcome.device_budget_bytes),
            ("adapter", &adapter["bytes"], stats.adapters[0].bytes),
            ("copy", &adapter["device_bytes"], u64::from(memory.adapter_blocks) * memory.block_bytes),
        ] {
            assert_eq!(forecast.as_u64(), Some(real), "{name} of {model} with {arguments:?}");
        }
    }
}

#[test]
fn a_gpu_need_not_be_there_if_its_memory_is_given() {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(directory.path());
    let of = |bytes: &str| capacity(directory.path(), &["--device", "cuda:7", "--device-memory", bytes]);
    let forecast: Value = serde_json::from_str(&of("1GiB").1).unwrap();
    let (gpu, host) = (&forecast["gpu"], &forecast["host"]);
    assert_eq!((gpu["free_bytes"].as_u64(), host["pool_bytes"].as_u64()), (Some(1 << 30), Some(0)));
    // The fixture's limit of the KV cache, and the default of adapters on the device.
    assert_eq!(gpu["pool_bytes"].as_u64(), Some((1 << 20) + (512 << 20)));
    let (code, _, told) = of("64MiB");
    assert!(code == 1 && told.contains("cuda:7 has 64.0 MiB") && told.contains("--device cpu"), "{told}");
}

#[test]
fn what_cannot_be_computed_is_refused_with_the_next_step() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    tiny::write_model(&model);
    let missing = capacity(&directory.path().join("none"), &[]);
    assert!(missing.0 != 0 && missing.2.contains("none"), "{missing:?}");
    let (code, _, told) = capacity(&model, &["--device-memory", "1GiB"]);
    assert!(code == 1 && told.contains("set --device cuda"), "{told}");
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    std::fs::write(model.join("config.json"), config.replace("Llama", "Unknown")).unwrap();
    let (code, _, told) = capacity(&model, &[]);
    assert!(code == 2 && told.contains("Unknown"), "{told}");
}
