//! Token ids beside texts, and log-probabilities of prompts, as in vLLM's API.

use serde_json::{Value, json};

use crate::{
    fake_executor::reply_with,
    harness::Harness,
    text::{BEGIN, END},
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn text(more: &Value) -> Value {
    let mut body = json!({ "model": "base", "prompt": "ab", "max_tokens": 9 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(more: &Value) -> Value {
    let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "a" }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn the_ids_of_prompt_and_answer_are_told_to_who_asks() {
    let harness = Harness::start(reply_with("hi")).await;
    let ids = json!({ "return_token_ids": true });
    let answer = harness.client.post(TEXT, &text(&ids)).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["prompt_token_ids"], json!([BEGIN, 97, 98]));
    assert_eq!(choice["token_ids"], json!([104, 105, END]));
    assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("hi"), &Value::Null));
    let answer = harness.client.post(CHAT, &chat(&ids)).await.json();
    let sent = harness.executor().generates();
    assert_eq!(answer["prompt_token_ids"], json!(sent[1].prompt));
    assert_eq!(answer["choices"][0]["token_ids"], json!([104, 105, END]));
    for (route, plain) in [(TEXT, text(&json!({}))), (CHAT, chat(&json!({ "return_token_ids": false })))] {
        let body = harness.client.post(route, &plain).await.body;
        assert!(!body.contains("token_ids"), "{body}");
    }
}

#[tokio::test]
async fn a_stream_tells_the_prompts_ids_first_and_then_those_of_each_piece() {
    let harness = Harness::start(reply_with("hi")).await;
    let more = json!({ "return_token_ids": true, "stream": true });
    for (route, body) in [(TEXT, text(&more)), (CHAT, chat(&more))] {
        let chunks = harness.client.post(route, &body).await.chunks();
        let first = if route == CHAT { &chunks[0] } else { &chunks[0]["choices"][0] };
        let prompt = harness.executor().generates().last().unwrap().prompt.clone();
        assert_eq!(first["prompt_token_ids"], json!(prompt), "{chunks:?}");
        let of = |chunk: &Value| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
        let ids: Vec<Value> = chunks.iter().flat_map(of).collect();
        assert_eq!(ids, [104, 105, END], "{chunks:?}");
        let again = chunks[1..].iter().filter(|chunk| chunk.to_string().contains("prompt_token_ids"));
        assert_eq!(again.count(), 0);
    }
}

#[tokio::test]
async fn the_tokens_of_a_stop_string_are_among_the_ids() {
    let harness = Harness::start(reply_with("hi there")).await;
    let answer =
        harness.client.post(TEXT, &text(&json!({ "return_token_ids": true, "stop": " t" }))).await.json();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["token_ids"]), (&json!("hi"), &json!([104, 105, 32, 116])));
}

#[tokio::test]
async fn a_prompt_is_scored_token_by_token_by_id() {
    let harness = Harness::start(reply_with("hi")).await;
    let more = json!({ "prompt_logprobs": 2 });
    let scores = harness.client.post(TEXT, &text(&more)).await.json()["choices"][0]["prompt_logprobs"].take();
    let token = |text: &str, logprob: f32, rank: usize| json!({ "logprob": logprob, "rank": rank, "decoded_token": text });
    let expected = json!([
        null,
        { "97": token("a", -0.25, 1), "63": token("?", -1.5, 2) },
        { "98": token("b", -0.25, 1), "63": token("?", -1.5, 2) },
    ]);
    assert_eq!(scores, expected);
    let answer = harness.client.post(CHAT, &chat(&more)).await.json();
    let sent = harness.executor().generates();
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), sent[1].prompt.len());
    assert_eq!((sent[0].prompt_logprobs, sent[0].logprobs), (Some(2), None));
    let scored =
        harness.client.post(TEXT, &text(&json!({ "prompt_logprobs": 0, "max_tokens": 0 }))).await.json();
    assert_eq!(
        scored["choices"][0]["prompt_logprobs"][1],
        json!({ "97": { "logprob": -0.25, "rank": null, "decoded_token": "a" } })
    );
}

#[tokio::test]
async fn an_echo_with_scores_and_prompt_scores_have_each_their_own_depth() {
    let harness = Harness::start(reply_with("hi")).await;
    let more = json!({ "prompt_logprobs": 2, "logprobs": 1, "echo": true });
    let choice = harness.client.post(TEXT, &text(&more)).await.json()["choices"][0].take();
    assert_eq!(harness.executor().generates()[0].prompt_logprobs, Some(2));
    assert_eq!(choice["logprobs"]["top_logprobs"][1], json!({ "a": -0.25 }));
    assert_eq!(choice["prompt_logprobs"][1].as_object().unwrap().len(), 2);
}

#[tokio::test]
async fn what_cannot_be_told_is_refused_by_name() {
    let harness = Harness::start(reply_with("hi")).await;
    for (more, param) in [
        (json!({ "prompt_logprobs": 2, "stream": true }), "prompt_logprobs"),
        (json!({ "prompt_logprobs": 21 }), "prompt_logprobs"),
        (json!({ "return_token_ids": 1 }), "return_token_ids"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
    ] {
        let response = harness.client.post(TEXT, &text(&more)).await;
        assert_eq!(response.status, 400);
        assert_eq!(response.json()["error"]["param"], param);
    }
}
