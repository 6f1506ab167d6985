//! Several adapters at once: `"model": "a:0.7+b:0.3"`.

use std::time::Duration;

use gateway::keys::Keys;
use serde_json::{Value, json};
use types::{AdapterId, AdapterVersion, TenantId};

use crate::{
    client::Response,
    fake_executor::{MAX_RESIDENT, generation, hang_after, reply_with, say_slowly},
    harness::{Harness, eventually, key_file},
};

const TEXT: &str = "/v1/completions";

async fn load(harness: &Harness, name: &str, weights: &str) {
    let body =
        json!({ "lora_name": name, "lora_path": harness.adapter(name, weights), "load_inplace": true });
    let loaded = harness.client.post("/v1/load_lora_adapter", &body).await;
    assert_eq!(loaded.status, 200, "{}", loaded.body);
}

async fn ask(harness: &Harness, model: &str) -> Response {
    harness.client.post(TEXT, &json!({ "model": model, "prompt": "a" })).await
}

fn sum(parts: &[(&str, f32)]) -> AdapterVersion {
    let part =
        |(weights, weight): &(&str, f32)| (AdapterVersion(generation(weights.as_bytes())), weight.to_bits());
    AdapterVersion::of_sum(parts.iter().map(part).collect())
}

fn id(parts: &[(&str, f32)]) -> [u8; 32] {
    AdapterId::new(TenantId::EVERYBODY, sum(parts)).0
}

#[tokio::test]
async fn a_sum_is_a_model_at_every_door_and_is_loaded_once() {
    let harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one").await;
    load(&harness, "b", "two").await;
    let messages = json!([{ "role": "user", "content": "a" }]);
    let asked = [
        (TEXT, json!({ "model": "a:0.7+b:0.3", "prompt": "a" })),
        (TEXT, json!({ "model": "base:b:0.3+a:.7", "prompt": "a" })),
        (TEXT, json!({ "model": "base", "adapter": "b:3e-1+a:0.70", "prompt": "a" })),
        ("/v1/chat/completions", json!({ "model": "a:0.7+b:0.3", "messages": messages })),
        ("/v1/responses", json!({ "model": "a:0.7+b:0.3", "input": "a" })),
        ("/api/chat", json!({ "model": "a:0.7+b:0.3:latest", "messages": messages, "stream": false })),
        ("/api/generate", json!({ "model": "a:0.7+b:0.3", "prompt": "a", "stream": false })),
    ];
    for (route, body) in &asked {
        let answer = harness.client.post(route, body).await;
        assert_eq!(answer.status, 200, "{route} {body}: {}", answer.body);
    }
    let sent = harness.executor().generates();
    assert_eq!(sent.len(), asked.len());
    assert!(sent.iter().all(|sent| sent.adapter == Some(id(&[("one", 0.7), ("two", 0.3)]))));
    assert_eq!(harness.executor().loads().len(), 3, "a, b, and their sum once");
    let answer = ask(&harness, "a:0.7+b:0.3").await.json();
    let expected = sum(&[("one", 0.7), ("two", 0.3)]).to_string();
    assert_eq!((&answer["adapter_generation"], &answer["model"]), (&json!(expected), &json!("a:0.7+b:0.3")));
    let listed = harness.client.get("/v1/lora_adapters").await.json();
    assert_eq!(listed["data"].as_array().unwrap().len(), 2, "nobody has registered it");
}

#[tokio::test]
async fn one_adapter_may_have_a_weight_and_of_1_it_is_itself() {
    let harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one").await;
    for model in ["a", "a:1", "a:1.0", "a:0.5"] {
        assert_eq!(ask(&harness, model).await.status, 200);
    }
    let itself = Some(AdapterId::new(TenantId::EVERYBODY, AdapterVersion(generation(b"one"))).0);
    let sent: Vec<_> = harness.executor().generates().iter().map(|sent| sent.adapter).collect();
    assert_eq!(sent, [itself, itself, itself, Some(id(&[("one", 0.5)]))]);
}

#[tokio::test]
async fn what_does_not_add_up_is_refused_by_name() {
    let harness = Harness::start(reply_with("x")).await;
    for (name, weights) in [("a", "one"), ("scaled", "ia3"), ("s", "stubborn"), ("guesses", "draft")] {
        load(&harness, name, weights).await;
    }
    for (model, status, says) in [
        ("a+", 400, "no name"),
        ("a:x+s", 400, "'x'"),
        ("a:0+s", 400, "'0'"),
        ("a+a:0.5", 400, "'a' twice"),
        ("a+scaled", 400, "'scaled' is not a LoRA"),
        ("a+guesses", 400, "'guesses' is a draft"),
        ("a+s", 400, "cannot merge"),
        ("a+s", 400, "cannot merge"),
        ("a+nobody", 404, "'nobody'"),
        ("a+base", 400, "'base' is the base"),
        ("nobody:0.5", 404, "'nobody:0.5'"),
        ("llama3:latest", 404, "'llama3:latest'"),
    ] {
        let answer = ask(&harness, model).await;
        assert_eq!(answer.status, status, "{model}: {}", answer.body);
        assert!(answer.body.contains(says), "{model}: {}", answer.body);
        assert_eq!(answer.json()["error"]["param"], "model", "{model}: {}", answer.body);
    }
    assert_eq!(harness.executor().loads().len(), 5, "what was refused once is not loaded again");
    assert!(harness.executor().generates().is_empty());
}

#[tokio::test]
async fn a_name_that_is_registered_comes_before_a_sum() {
    let harness = Harness::start(reply_with("x")).await;
    for (name, weights) in [("a", "one"), ("b", "two"), ("a+b", "three")] {
        load(&harness, name, weights).await;
    }
    let generation_of = |answer: Value| answer["adapter_generation"].clone();
    let named = generation_of(ask(&harness, "a+b").await.json());
    assert_eq!(named, json!(AdapterVersion(generation(b"three")).to_string()));
    let summed = generation_of(ask(&harness, "b+a").await.json());
    assert_eq!(summed, json!(sum(&[("one", 1.0), ("two", 1.0)]).to_string()));
}

#[tokio::test]
async fn a_sum_goes_with_each_of_its_parts_and_comes_again_with_the_next() {
    let harness = Harness::start(reply_with("x")).await;
    load(&harness, "a", "one").await;
    load(&harness, "b", "two").await;
    ask(&harness, "a+b").await;
    load(&harness, "a", "three").await;
    let old = [
        id(&[("one", 1.0), ("two", 1.0)]),
        AdapterId::new(TenantId::EVERYBODY, AdapterVersion(generation(b"one"))).0,
    ];
    eventually("the old sum and its part are freed", || harness.executor().unloads() == old).await;
    let answer = ask(&harness, "a+b").await.json();
    assert_eq!(answer["adapter_generation"], json!(sum(&[("three", 1.0), ("two", 1.0)]).to_string()));
    let unloaded = harness.client.post("/v1/unload_lora_adapter", &json!({ "lora_name": "b" })).await;
    assert_eq!(
        unloaded.json()["freed_bytes"],
        2000,
        "b, and the sum it is in: as much as the fake says of each"
    );
    assert_eq!(ask(&harness, "a+b").await.status, 404);
}

#[tokio::test]
async fn a_request_keeps_the_parts_of_its_sum() {
    let harness = Harness::start(hang_after("x")).await;
    load(&harness, "a", "one").await;
    load(&harness, "b", "two").await;
    let body = json!({ "model": "a+b", "prompt": "a", "stream": true });
    let exchange = harness.client.open_post(TEXT, &body).await;
    eventually("it began", || harness.executor().generates().len() == 1).await;
    let client = harness.client.clone();
    let unload = json!({ "lora_name": "a" });
    let unloading = tokio::spawn(async move { client.post("/v1/unload_lora_adapter", &unload).await });
    while harness.client.get("/v1/models/a").await.status != 404 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!unloading.is_finished() && harness.executor().unloads().is_empty());
    drop(exchange);
    assert_eq!(unloading.await.unwrap().status, 200);
    assert_eq!(harness.executor().unloads().len(), 2);
}

#[tokio::test]
async fn a_sum_survives_its_executor() {
    let mut harness = Harness::start(say_slowly("abcdefgh", Duration::from_millis(30))).await;
    load(&harness, "a", "one").await;
    load(&harness, "b", "two").await;
    let client = harness.client.clone();
    let body = json!({ "model": "a+b", "prompt": "a" });
    let request = tokio::spawn(async move { client.post(TEXT, &body).await });
    eventually("it began", || harness.executor().generates().len() == 1).await;
    harness.restart_executor(reply_with("efgh")).await;
    let answer = request.await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let sent = harness.executor().generates();
    assert_eq!(sent[0].adapter, Some(id(&[("one", 1.0), ("two", 1.0)])), "the same sum goes on");
}

#[tokio::test]
async fn nobody_adds_up_what_they_may_not_use() {
    let file = key_file(&[("admin", "ops", "hb-ops"), ("user", "alice", "hb-a"), ("user", "bob", "hb-b")]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let ops = harness.client.with_key("hb-ops");
    for (name, weights, tenant) in
        [("alices", "one", json!("alice")), ("bobs", "two", json!("bob")), ("e", "three", Value::Null)]
    {
        let path = harness.adapter(name, weights);
        let body = json!({ "lora_name": name, "lora_path": path, "tenant": tenant });
        assert_eq!(ops.post("/v1/load_lora_adapter", &body).await.status, 200);
    }
    let ask = async |key: &str, model: &str| {
        harness.client.with_key(key).post(TEXT, &json!({ "model": model, "prompt": "a" })).await
    };
    assert_eq!(ask("hb-a", "alices+e").await.status, 200);
    let alices = AdapterId::new(TenantId::of(Some("alice")), sum(&[("one", 1.0), ("three", 1.0)])).0;
    assert_eq!(harness.executor().generates()[0].adapter, Some(alices), "it is hers alone");
    assert_eq!(ask("hb-b", "alices+e").await.code(), "model_not_found");
    assert_eq!(ask("hb-a", "alices+bobs").await.code(), "model_not_found");
    let both = ask("hb-ops", "alices+bobs").await;
    assert_eq!(both.status, 400);
    assert!(both.body.contains("different tenants"), "{}", both.body);
}

#[tokio::test]
async fn sums_make_room_before_anything_that_is_registered() {
    let harness = Harness::start(reply_with("x")).await;
    for index in 0..MAX_RESIDENT - 2 {
        load(&harness, &format!("a{index}"), &format!("weights {index}")).await;
    }
    for weight in ["0.5", "0.25", "0.75"] {
        assert_eq!(ask(&harness, &format!("a0:{weight}+a1")).await.status, 200);
    }
    // Each adapter was last used before the first sum.
    let first = id(&[("weights 0", 0.5), ("weights 1", 1.0)]);
    assert_eq!(harness.executor().unloads(), [first]);
}
