//! Choice of the model by name, by base and name, or by adapter version; and equal tokens for an equal key.

use gateway::keys::Keys;
use serde_json::{Value, json};

use crate::{
    client::Response,
    fake_executor::reply_with,
    harness::{Harness, key_file},
};

const TEXT: &str = "/v1/completions";

async fn ask(harness: &Harness, model: &str, adapter: &Value) -> Response {
    harness.client.post(TEXT, &json!({ "model": model, "adapter": adapter, "prompt": "a" })).await
}

async fn with_adapters(names: &[&str]) -> (Harness, Vec<String>) {
    let harness = Harness::start(reply_with("x")).await;
    let mut generations = Vec::new();
    for name in names {
        let load = json!({ "lora_name": name, "lora_path": harness.adapter(name, name) });
        let loaded = harness.client.post("/v1/load_lora_adapter", &load).await;
        assert_eq!(loaded.status, 200, "{}", loaded.body);
        generations.push(loaded.json()["generation"].as_str().unwrap().to_owned());
    }
    (harness, generations)
}

#[tokio::test]
async fn an_adapter_is_found_under_every_way_to_name_it() {
    let (harness, generations) = with_adapters(&["a", "b"]).await;
    let a = &generations[0];
    for (model, adapter) in [
        ("a", Value::Null),
        ("base:a", Value::Null),
        ("base::a", Value::Null),
        ("base", json!("a")),
        ("a", json!("a")),
        ("base", json!({ "generation": a })),
        ("a", json!({ "generation": a.to_uppercase() })),
    ] {
        let answer = ask(&harness, model, &adapter).await;
        assert_eq!(answer.status, 200, "{model} {adapter}: {}", answer.body);
        assert_eq!(answer.json()["adapter_generation"], json!(a), "{model} {adapter}");
        assert_eq!(answer.json()["model"], model);
    }
    assert_eq!(ask(&harness, "base", &Value::Null).await.json()["adapter_generation"], Value::Null);
}

#[tokio::test]
async fn another_generation_than_expected_is_a_conflict_and_an_unknown_one_is_not_there() {
    let (harness, generations) = with_adapters(&["a", "b"]).await;
    let mismatch = ask(&harness, "a", &json!({ "generation": generations[1] })).await;
    assert_eq!((mismatch.status, mismatch.code().as_str()), (409, "generation_mismatch"));
    assert_eq!(mismatch.header("x-should-retry"), Some("false"));
    let unknown = ask(&harness, "base", &json!({ "generation": "0".repeat(64) })).await;
    assert_eq!((unknown.status, unknown.code().as_str()), (404, "model_not_found"));
    for (model, adapter) in [
        ("a", json!("b")),
        ("base", json!({ "generation": "short" })),
        ("base", json!(7)),
        ("base", json!({})),
    ] {
        assert_eq!(ask(&harness, model, &adapter).await.status, 400, "{model} {adapter}");
    }
}

#[tokio::test]
async fn an_idempotency_key_means_the_same_seed_to_the_same_tenant() {
    let file = key_file(&[("user", "alice", "hb-a"), ("user", "alice", "hb-a2"), ("user", "bob", "hb-b")]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let body = json!({ "model": "base", "prompt": "a" });
    for (key, header) in [("hb-a", "k"), ("hb-a2", "k"), ("hb-a", "k2"), ("hb-b", "k")] {
        let client = harness.client.with_key(key).with_header("idempotency-key", header);
        assert_eq!(client.post(TEXT, &body).await.status, 200);
    }
    assert_eq!(harness.client.with_key("hb-a").post(TEXT, &body).await.status, 200);
    let seeds: Vec<u64> = harness.executor().generates().iter().map(|sent| sent.sampling.seed).collect();
    assert_eq!(seeds[0], seeds[1], "two keys of one tenant");
    assert!(seeds[2..].iter().all(|seed| *seed != seeds[0]), "{seeds:?}");
    let long = harness.client.with_key("hb-a").with_header("idempotency-key", &"k".repeat(256));
    assert_eq!(long.post(TEXT, &body).await.status, 400);
    let own = json!({ "model": "base", "prompt": "a", "seed": 5 });
    harness.client.with_key("hb-a").with_header("idempotency-key", "k").post(TEXT, &own).await;
    let last = harness.executor().generates().pop().unwrap();
    assert_eq!(last.sampling.seed, 5, "the body's own seed counts");
}
