//! Adapters whose weights are the body of a request.

use std::{path::Path, time::Duration};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use types::AdapterVersion;

use crate::{
    client::Response,
    fake_executor::{MAX_RESIDENT, generation, reply_with, say_slowly},
    harness::{Harness, eventually, eventually_async},
};

const KIND: &str = "application/x-safetensors";

/// A safetensors file with PEFT's configuration in its metadata.
fn file(weights: &str) -> String {
    with_header(r#"{"__metadata__":{"adapter_config":"{}"}}"#, weights)
}

fn with_header(header: &str, weights: &str) -> String {
    let length = (header.len() as u64).to_le_bytes();
    format!("{}{header}{weights}", std::str::from_utf8(&length).unwrap())
}

fn hex(file: &str) -> String {
    AdapterVersion(generation(file.as_bytes())).to_string()
}

async fn push(harness: &Harness, name: &str, body: &str) -> Response {
    harness.client.send("POST", &format!("/v1/adapters/{name}"), KIND, body).await
}

async fn ask(harness: &Harness, model: &str) -> Response {
    harness.client.post("/v1/completions", &json!({ "model": model, "prompt": "a" })).await
}

async fn generation_of(harness: &Harness, model: &str) -> Value {
    ask(harness, model).await.json()["adapter_generation"].take()
}

/// Names in `directory`; none if it is missing.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn on_disk(harness: &Harness) -> Vec<String> {
    names(&harness.directory.path().join("state/adapters"))
}

/// Names in the directory of ephemeral adapters.
fn in_memory(harness: &Harness) -> Vec<String> {
    let own = names(harness.directory.path()).into_iter().find(|name| name.starts_with("holobiont-"));
    own.map_or_else(Vec::new, |own| names(&harness.directory.path().join(own)))
}

#[tokio::test]
async fn a_pushed_adapter_is_a_model_with_the_generation_of_the_answer() {
    let harness = Harness::start(reply_with("x")).await;
    for (durable, kept) in [("true", [1, 0]), ("false", [1, 1])] {
        let (name, body) = (format!("run/{durable}"), file(durable));
        let pushed = push(&harness, &format!("{name}?durable={durable}&pinned=true"), &body).await;
        let told = pushed.json();
        assert_eq!((pushed.status, &told["status"]), (200, &json!("loaded")), "{}", pushed.body);
        assert_eq!((&told["generation"], &told["pinned"]), (&json!(hex(&body)), &json!(true)));
        assert_eq!(told["durable"], json!(durable == "true"));
        assert_eq!(generation_of(&harness, &name).await, told["generation"]);
        assert_eq!([on_disk(&harness).len(), in_memory(&harness).len()], kept);
        let found = harness.client.get(&format!("/v1/adapters/{name}")).await;
        assert_eq!((&found.json()["name"], &found.json()["state"]), (&json!(name), &json!("ready")));
    }
    let expecting = |digits: &str| format!("/v1/adapters/run/true?expected_generation={digits}");
    let other = harness.client.send("DELETE", &expecting("0123456789ab"), KIND, "").await;
    assert_eq!((other.status, other.code().as_str()), (409, "generation_mismatch"));
    for name in ["run/true", "run/false"] {
        let removed = harness.client.send("DELETE", &format!("/v1/adapters/{name}"), KIND, "").await;
        assert_eq!((removed.status, &removed.json()["freed_bytes"]), (200, &json!(1000)));
        assert_eq!(harness.client.get(&format!("/v1/adapters/{name}")).await.code(), "model_not_found");
    }
    assert_eq!((on_disk(&harness), in_memory(&harness)), (Vec::new(), Vec::new()));
}

#[tokio::test]
async fn the_configuration_may_be_in_a_header_and_the_weights_are_those_of_a_path() {
    let harness = Harness::start(reply_with("x")).await;
    let client = harness.client.with_header("x-adapter-config", "{}");
    let pushed = client.send("POST", "/v1/adapters/a", "application/octet-stream", "one").await;
    assert_eq!(pushed.status, 200, "{}", pushed.body);
    let body = json!({ "lora_name": "b", "lora_path": harness.adapter("b", "one") });
    let loaded = harness.client.post("/v1/load_lora_adapter", &body).await.json();
    assert_eq!(loaded["generation"], pushed.json()["generation"]);
    assert_eq!(on_disk(&harness).len(), 1, "the same files are kept once");
}

#[tokio::test]
async fn a_push_replaces_a_name_and_a_request_keeps_its_version() {
    let harness = Harness::start(say_slowly("abcdefgh", Duration::from_millis(30))).await;
    let [one, two] = ["one", "two"].map(file);
    push(&harness, "a?durable=false", &one).await;
    let client = harness.client.clone();
    let request = tokio::spawn(async move {
        client.post("/v1/completions", &json!({ "model": "a", "prompt": "a" })).await.json()
    });
    eventually("it began", || harness.executor().generates().len() == 1).await;
    let replaced = push(&harness, "a?durable=false", &two).await;
    assert_eq!(replaced.json()["generation"], json!(hex(&two)));
    assert_eq!(in_memory(&harness).len(), 2, "a request still uses the first");
    assert_eq!(request.await.unwrap()["adapter_generation"], json!(hex(&one)));
    eventually("the first is gone", || in_memory(&harness).len() == 1).await;
    assert_eq!(harness.executor().unloads().len(), 1);
    let refused = push(&harness, "a?load_inplace=false&durable=false", &one).await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "adapter_already_loaded"));
    let other = push(&harness, "a?expected_generation=0123456789ab&durable=false", &one).await;
    assert_eq!((other.status, other.code().as_str()), (409, "generation_mismatch"));
    assert_eq!(generation_of(&harness, "a").await, json!(hex(&two)));
}

#[tokio::test]
async fn pushes_of_one_name_come_one_after_the_other_and_leave_one() {
    let harness = Harness::start(reply_with("x")).await;
    let pushes = (0..6).map(|number| {
        let (client, body) = (harness.client.clone(), file(&number.to_string()));
        tokio::spawn(async move { client.send("POST", "/v1/adapters/a?durable=false", KIND, body).await })
    });
    let mut generations = Vec::new();
    for pushed in pushes.collect::<Vec<_>>() {
        let pushed = pushed.await.unwrap();
        assert_eq!(pushed.status, 200, "{}", pushed.body);
        generations.push(pushed.json()["generation"].take());
    }
    assert!(generations.contains(&generation_of(&harness, "a").await));
    eventually("the others are freed", || harness.executor().unloads().len() == 5).await;
    eventually("the others are removed", || in_memory(&harness).len() == 1).await;
}

#[tokio::test]
async fn an_ephemeral_adapter_outlives_its_executor_and_an_eviction_but_not_its_gateway() {
    let mut harness = Harness::start(reply_with("x")).await;
    let bodies: Vec<_> = (0..=MAX_RESIDENT).map(|number| file(&number.to_string())).collect();
    for (number, body) in bodies.iter().enumerate() {
        assert_eq!(push(&harness, &format!("a{number}?durable=false"), body).await.status, 200);
    }
    let tier = async || harness.client.get("/v1/adapters/a0").await.json()["tier"].take();
    assert_eq!(tier().await, "memory");
    assert_eq!(generation_of(&harness, "a0").await, json!(hex(&bodies[0])), "it was evicted");
    assert_eq!(tier().await, "host");
    harness.restart_executor(reply_with("y")).await;
    harness.wait_ready().await;
    for (number, body) in bodies.iter().enumerate() {
        assert_eq!(generation_of(&harness, &format!("a{number}")).await, json!(hex(body)));
    }
    assert_eq!(on_disk(&harness), Vec::<String>::new());
    harness.restart_gateway().await;
    let gone = ask(&harness, "a0").await;
    assert_eq!((gone.status, gone.code().as_str()), (404, "model_not_found"));
    assert_eq!(in_memory(&harness), Vec::<String>::new());
}

#[tokio::test]
async fn a_push_without_an_executor_is_a_503_and_changes_nothing() {
    let mut harness = Harness::start(reply_with("x")).await;
    push(&harness, "a?durable=false", &file("one")).await;
    harness.kill_executor().await;
    let refused = push(&harness, "a?durable=false", &file("two")).await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    harness.restart_executor(reply_with("x")).await;
    let is_served = async || ask(&harness, "a").await.status == 200;
    eventually_async("the first is served again", is_served).await;
    assert_eq!(generation_of(&harness, "a").await, json!(hex(&file("one"))));
    assert_eq!(push(&harness, "a?durable=false", &file("two")).await.status, 200);
}

#[tokio::test]
async fn a_durable_adapter_is_replaced_by_a_durable_one_alone() {
    let harness = Harness::start(reply_with("x")).await;
    push(&harness, "a", &file("one")).await;
    let refused = push(&harness, "a?durable=false", &file("two")).await;
    assert_eq!((refused.status, refused.code().as_str()), (409, "adapter_is_durable"), "{}", refused.body);
    push(&harness, "b?durable=false", &file("two")).await;
    assert_eq!(push(&harness, "b", &file("two")).await.json()["durable"], json!(true));
    eventually("memory is free", || in_memory(&harness).is_empty()).await;
    let mut harness = harness;
    harness.restart_gateway().await;
    for (name, body) in [("a", "one"), ("b", "two")] {
        assert_eq!(generation_of(&harness, name).await, json!(hex(&file(body))));
    }
}

#[tokio::test]
async fn ephemeral_adapters_are_bounded_for_a_tenant_and_for_all() {
    let mut change = |config: &mut gateway::config::GatewayConfig| config.ephemeral.bytes = 800;
    let harness = Harness::start_with(reply_with("x"), &mut change).await;
    let body = file(&"x".repeat(250));
    assert_eq!(push(&harness, "a?durable=false&tenant=alice", &body).await.status, 200);
    let full = push(&harness, "b?durable=false&tenant=alice", &body).await;
    assert_eq!((full.status, full.code().as_str()), (507, "ephemeral_limit_exceeded"), "{}", full.body);
    assert!(full.body.contains("of 400 bytes"), "{}", full.body);
    assert_eq!(push(&harness, "c?durable=false&tenant=bob", &body).await.status, 200);
    assert_eq!(push(&harness, "d?tenant=alice", &body).await.status, 200, "a durable one takes no memory");
    let all = push(&harness, "e?durable=false&tenant=carol", &body).await;
    assert!(all.body.contains("may have 800 bytes"), "{}", all.body);
    harness.client.send("DELETE", "/v1/adapters/a", KIND, "").await;
    assert_eq!(push(&harness, "b?durable=false&tenant=alice", &body).await.status, 200);
}

#[tokio::test]
async fn what_cannot_be_pushed_is_refused_by_name_and_leaves_nothing_behind() {
    let harness = Harness::start_with(reply_with("x"), |config| config.max_adapter_file_bytes = 200).await;
    let (one, without) = (file("one"), with_header("{}", "one"));
    let (long, cut, misfit) = (file(&"x".repeat(200)), one[..20].to_owned(), "misfit".to_owned());
    let cases: &[(&str, &str, &str, &str)] = &[
        ("a?durable=maybe", &one, "invalid_value", "'true' or 'false'"),
        ("a?durable=true&durable=true", &one, "invalid_value", "twice"),
        ("a?pinned=yes", &one, "invalid_value", "'true' or 'false'"),
        ("a?lora_path=/etc", &one, "unsupported_parameter", "lora_path"),
        ("a?lora_name=b", &one, "unsupported_parameter", "lora_name"),
        ("base", &one, "invalid_value", "base"),
        ("tinker-a", &one, "invalid_value", "reserved"),
        ("a?tenant=%7f", &one, "invalid_value", "tenant"),
        ("a", &without, "invalid_adapter", "x-adapter-config"),
        ("a", &cut, "invalid_adapter", "ends after 20 bytes"),
        ("a", "", "invalid_adapter", "ends after 0 bytes"),
        ("a", &long, "invalid_adapter", "200 bytes"),
    ];
    for durable in ["true", "false"] {
        for (path, body, code, said) in cases {
            let query = if path.contains('?') { '&' } else { '?' };
            let path = if path.contains("durable") {
                (*path).to_owned()
            } else {
                format!("{path}{query}durable={durable}")
            };
            let refused = push(&harness, &path, body).await;
            assert_eq!((refused.status, &*refused.code()), (400, *code), "{path}: {}", refused.body);
            assert!(refused.body.contains(said), "{path}: {}", refused.body);
        }
        let configured = harness.client.with_header("x-adapter-config", "{}");
        let path = format!("/v1/adapters/a?durable={durable}");
        let refused = configured.send("POST", &path, KIND, &misfit).await;
        assert_eq!(refused.code(), "invalid_adapter");
        assert!(refused.body.contains("a/adapter_config.json: `r` is too large"), "{}", refused.body);
        let refused = configured.send("POST", &path, "text/plain", &misfit).await;
        assert_eq!(refused.status, 415, "{}", refused.body);
    }
    assert_eq!((on_disk(&harness), in_memory(&harness)), (Vec::new(), Vec::new()));
    assert_eq!(harness.client.get("/v1/lora_adapters").await.json()["data"], json!([]));
}

#[tokio::test]
async fn a_push_that_breaks_off_leaves_nothing_behind() {
    let harness = Harness::start(reply_with("x")).await;
    for durable in ["true", "false"] {
        let mut stream = harness.client.connect().await.into_inner();
        let head = format!(
            "POST /v1/adapters/a?durable={durable} HTTP/1.1\r\nhost: {}\r\ncontent-type: {KIND}\r\n\
             content-length: 1000\r\n\r\n{}",
            harness.client.address(),
            file("begins")
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let arrived = || on_disk(&harness).len() + in_memory(&harness).len();
        eventually("it arrives", || arrived() == 1).await;
        drop(stream);
        eventually("it is removed", || arrived() == 0).await;
    }
    assert_eq!(push(&harness, "a?durable=false", &file("one")).await.status, 200, "and its name is free");
}
