//! Loading, replacing and unloading adapters, and what survives.

use std::time::Duration;

use gateway::config::StartAdapter;
use model::generation::Generation;
use serde_json::{Value, json};

use crate::{
    client::Response,
    fake_executor::{generation, hang_after, say, say_slowly},
    harness::{Harness, eventually},
};

const TEXT: &str = "/v1/completions";

fn hex(weights: &str) -> String {
    Generation(generation(weights.as_bytes())).to_string()
}

async fn load(harness: &Harness, name: &str, weights: &str, extra: &Value) -> Response {
    let path = harness.adapter(name, weights);
    let mut body = json!({ "lora_name": name, "lora_path": path });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    harness.client.post("/v1/load_lora_adapter", &body).await
}

async fn ask(harness: &Harness, model: &str) -> Response {
    harness.client.post(TEXT, &json!({ "model": model, "prompt": "a" })).await
}

#[tokio::test]
async fn a_loaded_adapter_is_a_model_with_its_generation_in_every_answer() {
    let harness = Harness::start(say("x")).await;
    let loaded = load(&harness, "pirate", "one", &json!({})).await;
    assert_eq!((loaded.status, &loaded.json()["generation"]), (200, &json!(hex("one"))));
    for model in ["pirate", "base:pirate"] {
        let answer = ask(&harness, model).await.json();
        assert_eq!((&answer["adapter_generation"], &answer["model"]), (&json!(hex("one")), &json!(model)));
    }
    assert_eq!(ask(&harness, "base").await.json()["adapter_generation"], Value::Null);
    let sent = harness.executor().generates();
    assert_eq!((sent[0].adapter, sent[2].adapter), (Some(generation(b"one")), None));
    let models = harness.client.get("/v1/models").await.json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["parent"]), (&json!("base"), &Value::Null));
    assert_eq!((&models["data"][1]["id"], &models["data"][1]["parent"]), (&json!("pirate"), &json!("base")));
    assert_eq!(harness.client.get("/v1/models/pirate").await.json()["root"], "pirate");
    let listed = &harness.client.get("/v1/lora_adapters").await.json()["data"][0];
    assert_eq!(
        (&listed["rank"], &listed["bytes"], &listed["requests"]),
        (&json!(16), &json!(1000), &json!(0))
    );
}

#[tokio::test]
async fn a_name_that_is_taken_is_replaced_only_when_that_is_said() {
    let harness = Harness::start(say("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    let again = load(&harness, "a", "two", &json!({})).await;
    assert_eq!((again.status, again.code().as_str()), (400, "adapter_already_loaded"));
    let wrong = load(&harness, "a", "two", &json!({ "expected_generation": hex("three") })).await;
    assert_eq!((wrong.status, wrong.code().as_str()), (409, "generation_mismatch"));
    assert_eq!(wrong.header("x-should-retry"), Some("false"));
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
    let right = load(&harness, "a", "two", &json!({ "expected_generation": hex("one") })).await;
    assert_eq!((right.status, &right.json()["generation"]), (200, &json!(hex("two"))));
    assert_eq!(load(&harness, "a", "three", &json!({ "load_inplace": true })).await.status, 200);
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("three")));
    let freed = [generation(b"one"), generation(b"two")];
    eventually("what was replaced is freed", || harness.executor().unloads() == freed).await;
}

#[tokio::test]
async fn a_request_keeps_the_generation_it_started_with() {
    let harness = Harness::start(say_slowly("abcdefgh", Duration::from_millis(30))).await;
    load(&harness, "a", "one", &json!({})).await;
    let client = harness.client.clone();
    let body = json!({ "model": "a", "prompt": "a" });
    let request = tokio::spawn(async move { client.post(TEXT, &body).await.json() });
    eventually("it began", || harness.executor().generates().len() == 1).await;
    load(&harness, "a", "two", &json!({ "load_inplace": true })).await;
    assert!(harness.executor().unloads().is_empty(), "a request still uses it");
    let answer = request.await.unwrap();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["adapter_generation"]),
        (&json!("abcdefgh"), &json!(hex("one")))
    );
    eventually("now it is freed", || harness.executor().unloads() == [generation(b"one")]).await;
}

#[tokio::test]
async fn unloading_refuses_new_requests_and_waits_for_those_that_run() {
    let harness = Harness::start(hang_after("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    let exchange =
        harness.client.open_post(TEXT, &json!({ "model": "a", "prompt": "a", "stream": true })).await;
    eventually("it began", || harness.executor().generates().len() == 1).await;
    let client = harness.client.clone();
    let unload = json!({ "lora_name": "a", "lora_int_id": 1 });
    let unloading = tokio::spawn(async move { client.post("/v1/unload_lora_adapter", &unload).await });
    let client = harness.client.clone();
    let refused = async {
        while client.get("/v1/models/a").await.status != 404 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(crate::harness::WATCHDOG, refused).await.expect("new requests are refused");
    assert_eq!(ask(&harness, "a").await.code(), "model_not_found");
    assert!(!unloading.is_finished() && harness.executor().unloads().is_empty());
    drop(exchange);
    let unloaded = unloading.await.unwrap();
    assert_eq!((unloaded.status, &unloaded.json()["freed_bytes"]), (200, &json!(1000)));
    assert_eq!(harness.executor().unloads(), [generation(b"one")]);
}

#[tokio::test]
async fn unloading_what_is_not_there_is_an_error_that_names_it() {
    let harness = Harness::start(say("x")).await;
    let error = harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "nobody" })).await;
    assert_eq!((error.status, error.code().as_str()), (404, "model_not_found"));
    assert!(error.body.contains("nobody"));
}

#[tokio::test]
async fn two_names_of_one_generation_are_freed_with_the_second() {
    let harness = Harness::start(say("x")).await;
    load(&harness, "a", "same", &json!({})).await;
    load(&harness, "b", "same", &json!({})).await;
    harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "a" })).await;
    assert!(harness.executor().unloads().is_empty());
    assert_eq!(ask(&harness, "b").await.status, 200);
    harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "b" })).await;
    assert_eq!(harness.executor().unloads(), [generation(b"same")]);
}

#[tokio::test]
async fn adapters_outside_of_the_root_are_refused_also_through_links() {
    let harness = Harness::start(say("x")).await;
    let outside = harness.directory.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("weights"), "one").unwrap();
    let link = harness.directory.path().join("adapters/link");
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    let dotted = harness.directory.path().join("adapters/../outside");
    for path in [outside, link, dotted] {
        let body = json!({ "lora_name": "a", "lora_path": path });
        let error = harness.client.post("/v1/load_lora_adapter", &body).await;
        assert_eq!(
            (error.status, error.code().as_str()),
            (400, "adapter_outside_root"),
            "{}",
            path.display()
        );
    }
    let body = json!({ "lora_name": "a", "lora_path": "nowhere" });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &body).await.code(), "invalid_adapter_path");
    assert!(harness.executor().loads().is_empty());
}

#[tokio::test]
async fn an_adapter_that_cannot_be_used_leaves_no_name_behind() {
    let harness = Harness::start(say("x")).await;
    let path = harness.adapter("a", "one");
    std::fs::remove_file(path.join("weights")).unwrap();
    let body = json!({ "lora_name": "a", "lora_path": path });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &body).await.code(), "invalid_adapter");
    assert_eq!(load(&harness, "a", "empty", &json!({})).await.code(), "invalid_adapter");
    assert_eq!(
        harness.executor().unloads(),
        [generation(b"empty")],
        "one that changes nothing is freed again"
    );
    for name in ["base", "a:b", ""] {
        let body = json!({ "lora_name": name, "lora_path": harness.adapter("b", "one") });
        assert_eq!(harness.client.post("/v1/load_lora_adapter", &body).await.status, 400, "{name}");
    }
    assert_eq!(harness.client.get("/v1/lora_adapters").await.json()["data"], json!([]));
}

#[tokio::test]
async fn the_registry_survives_a_restart_of_the_gateway() {
    let mut harness = Harness::start(say("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    load(&harness, "b", "two", &json!({})).await;
    harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "b" })).await;
    harness.restart_gateway().await;
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
    assert_eq!(ask(&harness, "b").await.code(), "model_not_found");
}

#[tokio::test]
async fn a_restarted_executor_gets_its_adapters_back() {
    let mut harness = Harness::start(say("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    harness.restart_executor(say("x")).await;
    eventually("it is loaded again", || harness.executor().loads().len() == 1).await;
    harness.wait_ready().await;
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
}

#[tokio::test]
async fn an_adapter_whose_files_changed_is_not_served_under_the_old_generation() {
    let mut harness = Harness::start(say("x")).await;
    load(&harness, "a", "one", &json!({})).await;
    harness.adapter("a", "other");
    harness.restart_executor(say("x")).await;
    eventually("the other one is freed", || harness.executor().unloads() == [generation(b"other")]).await;
    harness.wait_ready().await;
    let error = ask(&harness, "a").await;
    assert_eq!((error.status, error.code().as_str()), (503, "adapter_unavailable"));
    assert_eq!(harness.client.get("/v1/lora_adapters").await.json()["data"][0]["state"], "failed");
    assert_eq!(load(&harness, "a", "other", &json!({ "load_inplace": true })).await.status, 200);
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("other")));
}

#[tokio::test]
async fn adapters_given_at_start_are_there_when_it_is_ready() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("weights"), "one").unwrap();
    let adapter = StartAdapter { name: "a".to_owned(), path: outside.path().to_owned() };
    let harness = Harness::start_with(say("x"), |config| config.adapters = vec![adapter]).await;
    assert_eq!(ask(&harness, "a").await.json()["adapter_generation"], json!(hex("one")));
}
