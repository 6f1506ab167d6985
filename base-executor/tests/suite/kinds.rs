//! The program with further adapter methods, as PEFT computes them: several at once, DoRA, embeddings and
//! saved modules.

use serde_json::Value;
use shmproto::message::{AdapterPart, ErrorCode, Generate, LoadAdapter, ToExecutor, ToGateway};

use crate::{
    common::request,
    gateway::{EVERYBODY, Gateway},
    process::{ChildProcess, ProcessFixture},
    worker::golden,
};

fn start(place: &ProcessFixture, model: &str, arguments: &[&str]) -> ChildProcess {
    let model = golden("models").join(model);
    let mut process = ChildProcess(place.command_for(&model, "", arguments).spawn().unwrap());
    process.ready();
    process
}

fn part(path: &str, weight: f32) -> AdapterPart {
    AdapterPart { path: golden("adapters").join(path).display().to_string(), weight }
}

async fn load(gateway: &mut Gateway, parts: Vec<AdapterPart>) -> ToGateway {
    gateway.send(ToExecutor::LoadAdapter(LoadAdapter { request: 900, parts, owner: EVERYBODY })).await;
    gateway.answer().await
}

fn cases(file: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
    let text = std::fs::read(golden("expected").join(file)).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let tokens = |value: &Value| serde_json::from_value(value.clone()).unwrap();
    let cases = golden["cases"].as_array().unwrap().iter();
    cases.map(|case| (tokens(&case["prompt"]), tokens(&case["greedy"]))).collect()
}

#[tokio::test]
async fn sums_doras_embeddings_and_saved_modules_give_the_tokens_of_peft() {
    for (model, parts, file) in [
        (
            "llama-tied",
            vec![part("llama-tied/rank4-attention", 0.7), part("llama-tied/rank16-rslora", 0.5)],
            "llama-tied/sum/0.json",
        ),
        ("llama-tied", vec![part("dora/llama-tied/everything", 1.0)], "llama-tied/dora/everything.json"),
        ("llama-rope3", vec![part("dora/llama-rope3/head", 1.0)], "llama-rope3/dora/head.json"),
        ("qwen2-bias", vec![part("dora/qwen2-bias/biased", 1.0)], "qwen2-bias/dora/biased.json"),
        (
            "llama-tied",
            vec![part("embedding/llama-tied/with-layers", 1.0)],
            "llama-tied/embedding/with-layers.json",
        ),
        ("gemma3", vec![part("embedding/gemma3/alone", 1.0)], "gemma3/embedding/alone.json"),
        ("llama-tied", vec![part("saved/llama-tied/two", 1.0)], "llama-tied/saved/two.json"),
        ("llama-rope3", vec![part("saved/llama-rope3/both", 1.0)], "llama-rope3/saved/both.json"),
    ] {
        let place = ProcessFixture::new();
        let _process = start(&place, model, &[]);
        let mut gateway = Gateway::greet(&place.socket(), 1).await;
        let loaded = load(&mut gateway, parts).await;
        let ToGateway::AdapterLoaded(loaded) = loaded else { panic!("{file}: {loaded:?}") };
        // The gateway would reject an adapter that changes nothing.
        assert!(loaded.modules > 0, "{file}");
        for (id, (prompt, greedy)) in (1..).zip(cases(file)) {
            let asked = request(id, prompt, u32::try_from(greedy.len()).unwrap());
            let (adapter, namespace) = (Some(loaded.adapter), loaded.generation);
            gateway.send(ToExecutor::Generate(Generate { adapter, namespace, ..asked })).await;
            assert_eq!(gateway.tokens(id).await, greedy, "{file}, request {id}");
        }
    }
}

#[tokio::test]
async fn a_dora_over_weights_that_come_from_a_disk_is_refused_by_name() {
    let place = ProcessFixture::new();
    let model = golden("models/llama-tied");
    let told =
        ChildProcess(place.command_for(&model, "", &["--resident-weight-bytes", "1"]).spawn().unwrap())
            .fails(1);
    let least = told.split("raise it to ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
    let _process = start(&place, "llama-tied", &["--resident-weight-bytes", least]);
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    let answer = load(&mut gateway, vec![part("dora/llama-tied/everything", 1.0)]).await;
    let ToGateway::Failed(failed) = answer else { panic!("it is refused: {answer:?}") };
    assert_eq!(failed.error.code, ErrorCode::InvalidAdapter);
    for said in ["use_dora", "self_attn.q_proj", "--resident-weight-bytes"] {
        assert!(failed.error.message.contains(said), "{}", failed.error.message);
    }
    let answer = load(&mut gateway, vec![part("llama-tied/rank4-attention", 1.0)]).await;
    assert!(matches!(answer, ToGateway::AdapterLoaded(_)), "{answer:?}");
}
