//! `/v1/embeddings` and Ollama's two routes, as clients see them.

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use shmproto::message::{ErrorCode, Finish, Output, Pooling};

use crate::{
    fake_executor::{CONTEXT_TOKENS, Reply, ReplyScript, fail_after},
    harness::Harness,
    text::{BEGIN, tokens},
};

const EMBEDDINGS: &str = "/v1/embeddings";

/// The vector of a prompt consists of its first token and its length.
fn embed() -> Reply {
    Arc::new(|generate| {
        assert!(generate.pooling.is_some() && generate.max_tokens == 0);
        let embedding = vec![generate.prompt[1] as f32, generate.prompt.len() as f32];
        let output = Output { pooled: embedding, finish: Some(Finish::Length), ..Output::default() };
        ReplyScript { outputs: vec![output], pause: Duration::ZERO }
    })
}

fn body(input: &Value, more: &Value) -> Value {
    let mut body = json!({ "model": "base", "input": input });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn vectors(answer: &Value) -> Vec<Vec<f64>> {
    let data = answer["data"].as_array().unwrap_or_else(|| panic!("{answer}"));
    let vector = |(index, one): (usize, &Value)| {
        assert_eq!((&one["object"], &one["index"]), (&json!("embedding"), &json!(index)));
        one["embedding"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    };
    data.iter().enumerate().map(vector).collect()
}

#[tokio::test]
async fn each_text_is_a_vector_of_length_one_in_its_order() {
    let harness = Harness::start(embed()).await;
    let answer = harness.client.post(EMBEDDINGS, &body(&json!(["ab", "c"]), &json!({}))).await.json();
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("base")));
    assert_eq!(answer["adapter_generation"], Value::Null);
    assert_eq!(answer["usage"], json!({ "prompt_tokens": 5, "total_tokens": 5 }));
    let expected = [[97.0, 3.0f64], [99.0, 2.0]];
    for (vector, expected) in vectors(&answer).iter().zip(expected) {
        let length = expected[0].hypot(expected[1]);
        assert!(
            (vector[0] - expected[0] / length).abs() < 1e-6
                && (vector[1] - expected[1] / length).abs() < 1e-6
        );
    }
    let sent = harness.executor().generates();
    assert!(sent.iter().all(|one| one.pooling == Some(Pooling::Last) && one.stop_tokens.contains(&256)));
}

#[tokio::test]
async fn pooling_normalization_and_encoding_are_as_asked() {
    let harness = Harness::start(embed()).await;
    let more = json!({ "pooling": "mean", "normalize": false, "encoding_format": "base64", "user": "u" });
    let answer = harness.client.post(EMBEDDINGS, &body(&json!("ab"), &more)).await.json();
    let bytes = BASE64_STANDARD.decode(answer["data"][0]["embedding"].as_str().unwrap()).unwrap();
    assert_eq!(bytes, [97.0f32, 3.0].map(f32::to_le_bytes).concat());
    assert_eq!(harness.executor().generates()[0].pooling, Some(Pooling::Mean));
    for input in [json!([257, 97, 98]), json!([[257, 97, 98]])] {
        let plain = body(&input, &json!({ "normalize": false }));
        assert_eq!(vectors(&harness.client.post(EMBEDDINGS, &plain).await.json()), [[97.0, 3.0]]);
    }
}

#[tokio::test]
async fn a_long_list_is_sent_in_parts_and_comes_back_whole() {
    let harness = Harness::start(embed()).await;
    let input: Vec<String> = (1..=100).map(|length| "a".repeat(length)).collect();
    let answer =
        harness.client.post(EMBEDDINGS, &body(&json!(input), &json!({ "normalize": false }))).await.json();
    let lengths: Vec<f64> = vectors(&answer).iter().map(|vector| vector[1]).collect();
    assert_eq!(lengths, (2..=101).map(f64::from).collect::<Vec<_>>());
    assert_eq!(answer["usage"]["total_tokens"], (2..=101).sum::<u32>());
}

#[tokio::test]
async fn an_adapter_embeds_by_its_own_generation() {
    let harness = Harness::start(embed()).await;
    let path = harness.adapter("law", "weights");
    let load = json!({ "lora_name": "law", "lora_path": path });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &load).await.status, 200);
    let mut asked = body(&json!("ab"), &json!({}));
    asked["model"] = "law".into();
    let answer = harness.client.post(EMBEDDINGS, &asked).await.json();
    assert!(answer["adapter_generation"].is_string(), "{answer}");
    assert!(harness.executor().generates()[0].adapter.is_some());
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name() {
    let harness = Harness::start(embed()).await;
    let many: Vec<&str> = vec!["a"; 2049];
    for (input, more, code, param) in [
        (json!(null), json!({}), "missing_required_parameter", "input"),
        (json!([]), json!({}), "missing_required_parameter", "input"),
        (json!(7), json!({}), "invalid_value", "input"),
        (json!([[999]]), json!({}), "invalid_value", "input"),
        (json!(many), json!({}), "invalid_value", "input"),
        (json!(vec![257; 600]), json!({}), "context_length_exceeded", "input"),
        (json!("a"), json!({ "dimensions": 8 }), "unsupported_parameter", "dimensions"),
        (json!("a"), json!({ "pooling": "max" }), "invalid_value", "pooling"),
        (json!("a"), json!({ "encoding_format": "int8" }), "invalid_value", "encoding_format"),
        (json!("a"), json!({ "model": "nobody" }), "model_not_found", "model"),
    ] {
        let response = harness.client.post(EMBEDDINGS, &body(&input, &more)).await;
        let error = response.json()["error"].take();
        let found = (error["code"].as_str().unwrap(), error["param"].as_str().unwrap_or_default());
        assert_eq!(found, (code, param), "{more}: {error}");
    }
    assert!(harness.executor().generates().is_empty());
}

#[tokio::test]
async fn a_failure_of_one_text_is_that_of_the_request() {
    let harness = Harness::start(fail_after("", ErrorCode::NotFinite)).await;
    let response = harness.client.post(EMBEDDINGS, &body(&json!(["a", "b"]), &json!({}))).await;
    assert!(response.status >= 400, "{}", response.body);
    assert!(response.json()["error"]["message"].is_string());
}

#[tokio::test]
async fn ollamas_routes_give_vectors_in_their_own_shapes() {
    let harness = Harness::start(embed()).await;
    let ask = json!({ "model": "base:latest", "input": ["ab", "c"], "keep_alive": "5m", "options": { "num_ctx": 64 } });
    let answer = harness.client.post("/api/embed", &ask).await.json();
    assert_eq!((&answer["model"], &answer["prompt_eval_count"]), (&json!("base"), &json!(5)));
    let rows = answer["embeddings"].as_array().unwrap();
    let length =
        |row: &Value| row.as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2)).sum::<f64>();
    assert!(rows.len() == 2 && rows.iter().all(|row| (length(row) - 1.0).abs() < 1e-6), "{answer}");
    assert!(answer["total_duration"].as_u64().unwrap() > 0);
    let old = json!({ "model": "base", "prompt": "ab" });
    let answer = harness.client.post("/api/embeddings", &old).await.json();
    assert_eq!(answer, json!({ "embedding": [97.0, 3.0] }));
    for (route, bad) in [
        ("/api/embed", json!({ "model": "base", "input": [[1]] })),
        ("/api/embed", json!({ "model": "base" })),
        ("/api/embeddings", json!({ "model": "base", "prompt": ["a"] })),
        ("/api/embed", json!({ "model": "base", "input": "a", "dimensions": 8 })),
    ] {
        let response = harness.client.post(route, &bad).await;
        assert_eq!(response.status, 400, "{}", response.body);
        assert!(response.json()["error"].is_string());
    }
}

#[tokio::test]
async fn ollamas_clients_may_have_overlong_texts_cut() {
    let harness = Harness::start(embed()).await;
    let long = "a".repeat(CONTEXT_TOKENS as usize + 9);
    let ask = |truncate: bool| json!({ "model": "base", "input": long, "truncate": truncate });
    let answer = harness.client.post("/api/embed", &ask(true)).await.json();
    assert_eq!(answer["prompt_eval_count"], CONTEXT_TOKENS);
    let mut sent = vec![BEGIN];
    sent.extend(&tokens(&long)[..CONTEXT_TOKENS as usize - 1]);
    assert_eq!(harness.executor().generates()[0].prompt, sent);
    assert_eq!(harness.client.post("/api/embed", &ask(false)).await.status, 400);
}
