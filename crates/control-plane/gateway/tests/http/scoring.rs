//! `/v1/score` and `/v1/rerank`, as clients see them.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use shmproto::message::{ErrorCode, Finish, Output, Pooling};

use crate::{
    fake_executor::{CONTEXT_TOKENS, Reply, ReplyScript, fail_after},
    harness::Harness,
};

const SCORE: &str = "/v1/score";
const RERANK: &str = "/v1/rerank";

/// The vector of a prompt counts its letters `a` and `b`.
fn count_letters() -> Reply {
    Arc::new(|generate| {
        assert!(generate.pooling.is_some() && generate.max_tokens == 0);
        let count =
            |letter: u8| generate.prompt.iter().filter(|token| **token == u32::from(letter)).count() as f32;
        let pooled = vec![count(b'a'), count(b'b')];
        let output = Output { pooled, finish: Some(Finish::Length), ..Output::default() };
        ReplyScript { outputs: vec![output], pause: Duration::ZERO }
    })
}

fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn scores(answer: &Value) -> Vec<f64> {
    let data = answer["data"].as_array().unwrap_or_else(|| panic!("{answer}"));
    let score = |(index, one): (usize, &Value)| {
        assert_eq!((&one["object"], &one["index"]), (&json!("score"), &json!(index)));
        one["score"].as_f64().unwrap()
    };
    data.iter().enumerate().map(score).collect()
}

#[tokio::test]
async fn one_text_is_compared_with_each_of_several_by_any_names() {
    let harness = Harness::start(count_letters()).await;
    for (first, second) in
        [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
    {
        let body = json!({ "model": "base", first: "aa", second: ["a", "b", { "text": "ab" }] });
        for route in [SCORE, "/score"] {
            let answer = harness.client.post(route, &body).await.json();
            let half = f64::from(std::f32::consts::FRAC_1_SQRT_2);
            assert!(
                (scores(&answer)[2] - half).abs() < 1e-7 && scores(&answer)[..2] == [1.0, 0.0],
                "{answer}"
            );
            assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("base")));
            assert!(answer["id"].as_str().unwrap().starts_with("score-") && answer["created"].is_u64());
            assert_eq!(answer["usage"], json!({ "prompt_tokens": 10, "total_tokens": 10 }));
        }
    }
    let pairs = json!({ "model": "base", "text_1": ["a", "b"], "text_2": ["a", "a"] });
    assert_eq!(scores(&harness.client.post(SCORE, &pairs).await.json()), [1.0, 0.0]);
}

#[tokio::test]
async fn documents_come_back_by_relevance_and_equal_ones_in_their_order() {
    let harness = Harness::start(count_letters()).await;
    let body = json!({ "model": "base", "query": "ab", "documents": ["b", "ab", "a", "abab"] });
    for route in [RERANK, "/rerank", "/v2/rerank"] {
        let answer = harness.client.post(route, &body).await.json();
        let results = answer["results"].as_array().unwrap();
        let order: Vec<_> = results.iter().map(|one| one["index"].as_u64().unwrap()).collect();
        assert_eq!(order, [1, 3, 0, 2], "{answer}");
        assert_eq!(results[0]["document"], json!({ "text": "ab" }));
        assert!((results[0]["relevance_score"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{answer}");
        assert_eq!(answer["usage"], json!({ "prompt_tokens": 15, "total_tokens": 15 }));
    }
    let fewer = with(body, &json!({ "top_n": 1, "return_documents": false }));
    let answer = harness.client.post(RERANK, &fewer).await.json();
    let results = answer["results"].as_array().unwrap();
    assert_eq!((results.len(), &results[0]["index"]), (1, &json!(1)));
    assert!(results[0].get("document").is_none(), "{answer}");
}

#[tokio::test]
async fn an_adapter_scores_with_its_own_embeddings_pooled_as_asked() {
    let harness = Harness::start(count_letters()).await;
    let path = harness.adapter("law", "weights");
    let load = json!({ "lora_name": "law", "lora_path": path });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &load).await.status, 200);
    let body = json!({ "model": "law", "text_1": "a", "text_2": "a", "pooling": "mean" });
    let answer = harness.client.post(SCORE, &body).await.json();
    assert!(answer["adapter_generation"].is_string(), "{answer}");
    let sent = harness.executor().generates();
    assert!(sent.iter().all(|one| one.adapter.is_some() && one.pooling == Some(Pooling::Mean)));
}

#[tokio::test]
async fn long_texts_are_cut_if_asked_and_refused_by_their_length_otherwise() {
    let harness = Harness::start(count_letters()).await;
    let long = "a".repeat(CONTEXT_TOKENS as usize + 9);
    let body = json!({ "model": "base", "text_1": "a", "text_2": long });
    let refused = harness.client.post(SCORE, &body).await.json();
    assert_eq!(refused["error"]["code"], "context_length_exceeded");
    assert_eq!(refused["error"]["param"], "text_2");
    let length = (CONTEXT_TOKENS + 10).to_string();
    assert!(refused["error"]["message"].as_str().unwrap().contains(&length), "{refused}");
    for (asked, tokens) in [(json!(-1), CONTEXT_TOKENS), (json!(7), 7)] {
        let cut = with(body.clone(), &json!({ "truncate_prompt_tokens": asked }));
        let answer = harness.client.post(SCORE, &cut).await.json();
        assert_eq!(answer["usage"]["prompt_tokens"], tokens + 2, "{answer}");
    }
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name() {
    let harness = Harness::start(count_letters()).await;
    let pair = json!({ "model": "base", "text_1": "a", "text_2": "b" });
    let ranked = json!({ "model": "base", "query": "a", "documents": ["a"] });
    let many: Vec<&str> = vec!["a"; 2049];
    for (route, body, code, param) in [
        (SCORE, json!({ "model": "base", "text_1": "a" }), "missing_required_parameter", "text_1"),
        (SCORE, with(pair.clone(), &json!({ "queries": "a" })), "missing_required_parameter", "text_1"),
        (SCORE, with(pair.clone(), &json!({ "text_1": ["a", "b"] })), "invalid_value", "text_1"),
        (SCORE, with(pair.clone(), &json!({ "text_2": [] })), "missing_required_parameter", "text_2"),
        (SCORE, with(pair.clone(), &json!({ "text_2": many })), "invalid_value", "text_2"),
        (SCORE, with(pair.clone(), &json!({ "text_2": [7] })), "invalid_value", "text_2"),
        (SCORE, with(pair.clone(), &json!({ "text_2": {} })), "missing_required_parameter", "text_2"),
        (SCORE, with(pair.clone(), &json!({ "pooling": "max" })), "invalid_value", "pooling"),
        (SCORE, with(pair.clone(), &json!({ "priority": 1 })), "unsupported_parameter", "priority"),
        (SCORE, with(pair.clone(), &json!({ "model": "nobody" })), "model_not_found", "model"),
        (
            SCORE,
            with(pair.clone(), &json!({ "truncate_prompt_tokens": 0 })),
            "invalid_value",
            "truncate_prompt_tokens",
        ),
        (
            SCORE,
            with(pair, &json!({ "truncate_prompt_tokens": CONTEXT_TOKENS + 1 })),
            "invalid_value",
            "truncate_prompt_tokens",
        ),
        (RERANK, json!({ "model": "base", "query": "a" }), "missing_required_parameter", "documents"),
        (RERANK, json!({ "model": "base", "documents": ["a"] }), "missing_required_parameter", "query"),
        (RERANK, with(ranked.clone(), &json!({ "query": ["a", "b"] })), "invalid_value", "query"),
        (RERANK, with(ranked, &json!({ "top_n": -1 })), "invalid_value", "top_n"),
    ] {
        let error = harness.client.post(route, &body).await.json()["error"].take();
        let found = (error["code"].as_str().unwrap_or_default(), error["param"].as_str().unwrap_or_default());
        assert_eq!(found, (code, param), "{body}: {error}");
    }
    assert!(harness.executor().generates().is_empty());
}

#[tokio::test]
async fn a_failure_of_one_text_is_that_of_the_request() {
    let harness = Harness::start(fail_after("", ErrorCode::NotFinite)).await;
    let body = json!({ "model": "base", "query": "a", "documents": ["a", "b"] });
    let response = harness.client.post(RERANK, &body).await;
    assert!(response.status >= 400 && response.json()["error"]["message"].is_string(), "{}", response.body);
}
