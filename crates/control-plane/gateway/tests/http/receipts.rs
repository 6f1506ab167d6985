//! Receipts: where an answer carries one, what the record says, and what a verification finds.

use serde_json::{Value, json};
use shmproto::message::DeviceKind;

use crate::{
    fake_executor::{FakeModelIdentity, Reply, reply_with},
    harness::Harness,
    text::{BEGIN, END},
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const VERIFY: &str = "/v1/receipts/verify";

fn on_a_cpu() -> FakeModelIdentity {
    FakeModelIdentity { device: DeviceKind::Cpu, ..FakeModelIdentity::default() }
}

async fn start(reply: Reply) -> Harness {
    let mut harness = Harness::start(reply_with("")).await;
    harness.replace_executor(reply, on_a_cpu()).await;
    harness
}

/// Returns a completion's body with the fields `more`.
fn ask(more: &Value) -> Value {
    let mut body = json!({ "model": "base", "prompt": "ab", "max_tokens": 9, "seed": 7, "receipt": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn receipt(harness: &Harness, more: &Value) -> Value {
    let answer = harness.client.post(TEXT, &ask(more)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["receipt"].clone()
}

async fn verdict(harness: &Harness, receipt: &Value) -> Value {
    let answer = harness.client.post(VERIFY, &json!({ "receipt": receipt })).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

#[tokio::test]
async fn a_receipt_says_what_determined_the_answer_and_is_signed_with_the_deployments_key() {
    let harness = start(reply_with("hi")).await;
    let receipt = receipt(&harness, &json!({ "temperature": 0.5, "logit_bias": { "7": -2 } })).await;
    let record = &receipt["record"];
    assert_eq!(record["prompt"], json!([BEGIN, 97, 98]));
    assert_eq!((&record["answer"], &record["ended"]), (&json!([104, 105, END]), &json!("stop_token")));
    assert_eq!((&record["base"], &record["adapter"]), (&json!("01".repeat(32)), &Value::Null));
    assert_eq!((&record["sampler"]["seed"], &record["sampler"]["temperature"]), (&json!("7"), &json!(0.5)));
    assert_eq!(record["sampler"]["logit_bias"], json!([[7, -2.0]]));
    let settings = json!({ "device": "cpu", "numbers": "activations mixed", "precision": "serving" });
    assert_eq!(record["settings"], settings);
    let key = harness.client.get("/v1/receipts/key").await.json();
    assert_eq!((&receipt["public_key"], &key["algorithm"]), (&key["public_key"], &json!("ed25519")));
    let verdict = verdict(&harness, &receipt).await;
    assert_eq!((&verdict["valid"], &verdict["tokens"]), (&json!(true), &json!(3)));
    let sent = harness.executor().generates();
    let [asked, replayed] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((asked.expected.len(), &replayed.expected), (0, &vec![104, 105, END]));
    assert_eq!((&replayed.prompt, &replayed.sampling), (&asked.prompt, &asked.sampling));
}

#[tokio::test]
async fn a_stream_ends_with_the_receipt() {
    let harness = start(reply_with("hi")).await;
    for options in [Value::Null, json!({ "include_usage": true })] {
        for (route, field, prompt) in
            [(TEXT, "prompt", json!("ab")), (CHAT, "messages", json!([{ "role": "user", "content": "a" }]))]
        {
            let mut body =
                json!({ "model": "base", "receipt": true, "stream": true, "stream_options": options });
            body[field] = prompt;
            let chunks = harness.client.post(route, &body).await.chunks();
            let carries = |chunk: &&Value| !chunk["receipt"].is_null();
            assert_eq!(chunks.iter().filter(carries).count(), 1, "{chunks:?}");
            let receipt = &chunks.last().unwrap()["receipt"];
            assert_eq!(receipt["record"]["answer"], json!([104, 105, END]));
            assert_eq!(verdict(&harness, receipt).await["valid"], true);
        }
    }
}

#[tokio::test]
async fn an_answer_that_a_stop_string_or_its_length_ends_has_a_receipt_too() {
    let harness = start(reply_with("hi there")).await;
    for (more, answer, ended) in
        [(json!({ "stop": "i t" }), "hi t", "stop_string"), (json!({ "max_tokens": 2 }), "hi", "length")]
    {
        let receipt = receipt(&harness, &more).await;
        assert_eq!(receipt["record"]["answer"], json!(answer.bytes().collect::<Vec<_>>()));
        assert_eq!(receipt["record"]["ended"], ended);
        assert_eq!(verdict(&harness, &receipt).await["valid"], true, "{more}");
    }
}

#[tokio::test]
async fn what_was_changed_or_is_not_served_any_more_is_named() {
    let mut harness = start(reply_with("hi")).await;
    let honest = receipt(&harness, &json!({})).await;
    let asked = harness.executor().generates().len();
    for (path, value, part) in [
        ("/record/answer/1", json!(106), "chain"),
        ("/record/sampler/seed", json!("8"), "chain"),
        ("/record/base", json!("02".repeat(32)), "chain"),
        ("/signature", json!("00".repeat(64)), "signature"),
        ("/public_key", json!("00".repeat(32)), "signature"),
        ("/record/format", json!(2), "format"),
    ] {
        let mut forged = honest.clone();
        *forged.pointer_mut(path).unwrap() = value;
        let verdict = verdict(&harness, &forged).await;
        assert_eq!((&verdict["valid"], &verdict["part"]), (&json!(false), &json!(part)), "{path}");
    }
    assert_eq!(harness.executor().generates().len(), asked, "none of these needs a replay");
    harness.replace_executor(reply_with("ha"), on_a_cpu()).await;
    let other = verdict(&harness, &honest).await;
    assert_eq!((&other["part"], &other["position"]), (&json!("token"), &json!(1)));
    assert_eq!((&other["recorded"], &other["drawn"]), (&json!(105), &json!(97)));
    let another = FakeModelIdentity { base_hash: [9; 32], ..on_a_cpu() };
    harness.replace_executor(reply_with("hi"), another).await;
    assert_eq!(verdict(&harness, &honest).await["part"], "base");
    harness.replace_executor(reply_with("hi"), FakeModelIdentity::default()).await;
    assert_eq!(verdict(&harness, &honest).await["part"], "precision", "a GPU has other bits");
}

#[tokio::test]
async fn an_adapter_that_was_replaced_is_found_and_one_under_another_name_serves() {
    let harness = start(reply_with("hi")).await;
    let load = async |name: &str, weights: &str, more: Value| {
        let mut body = json!({ "lora_name": name, "lora_path": harness.adapter(weights, weights) });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let loaded = harness.client.post("/v1/load_lora_adapter", &body).await;
        assert_eq!(loaded.status, 200, "{}", loaded.body);
        loaded.json()["generation"].clone()
    };
    let version = load("a", "first", json!({})).await;
    let receipt = receipt(&harness, &json!({ "model": "a" })).await;
    assert_eq!(receipt["record"]["adapter"], version);
    assert_eq!(verdict(&harness, &receipt).await["valid"], true);
    load("a", "second", json!({ "load_inplace": true })).await;
    let replaced = verdict(&harness, &receipt).await;
    assert_eq!(replaced["part"], "adapter");
    assert!(replaced["message"].as_str().unwrap().contains("now has the generation"), "{replaced}");
    load("b", "first", json!({})).await;
    assert_eq!(verdict(&harness, &receipt).await["valid"], true);
}

#[tokio::test]
async fn a_receipt_that_cannot_be_given_is_refused_by_name() {
    let harness = start(reply_with("hi")).await;
    for more in [
        json!({ "n": 2 }),
        json!({ "prompt": ["a", "b"] }),
        json!({ "max_tokens": 0, "echo": true }),
        json!({ "adapter_switches": [{ "model": "base", "after_tokens": 2 }] }),
        json!({ "receipt": "yes" }),
    ] {
        let refused = harness.client.post(TEXT, &ask(&more)).await;
        assert_eq!(
            (refused.status, refused.json()["error"]["param"].clone()),
            (400, json!("receipt")),
            "{more}"
        );
    }
    let hello = json!([{ "role": "user", "content": "a" }]);
    for (route, body) in [
        ("/v1/responses", json!({ "model": "base", "input": "a", "receipt": true })),
        ("/v1/messages", json!({ "model": "base", "messages": hello, "max_tokens": 9, "receipt": true })),
        ("/api/chat", json!({ "model": "base", "messages": hello, "receipt": true })),
    ] {
        let refused = harness.client.post(route, &body).await;
        assert_eq!(refused.status, 400, "{route}");
        assert!(refused.body.contains("'receipt' is not supported"), "{route}: {}", refused.body);
    }
    for body in [json!({}), json!({ "receipt": {} }), json!({ "receipt": 7 })] {
        let refused = harness.client.post(VERIFY, &body).await;
        assert_eq!(
            (refused.status, refused.json()["error"]["param"].clone()),
            (400, json!("receipt")),
            "{body}"
        );
    }
    let gpu = Harness::start(reply_with("hi")).await;
    let refused = gpu.client.post(TEXT, &ask(&json!({}))).await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("only for a base on a CPU"), "{}", refused.body);
}
