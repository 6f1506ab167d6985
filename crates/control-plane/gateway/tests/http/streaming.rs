//! Format of streams, and their ends.

use std::time::Duration;

use serde_json::{Value, json};
use shmproto::message::ErrorCode;

use crate::{
    client::Response,
    fake_executor::{fail_after, hang_after, reply_with, say_slowly},
    harness::{Harness, eventually},
    text::tokens,
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(extra: &Value) -> Value {
    merge(
        json!({ "model": "base", "messages": [{ "role": "user", "content": "hi" }], "stream": true }),
        extra,
    )
}

fn text(extra: &Value) -> Value {
    merge(json!({ "model": "base", "prompt": "ab", "stream": true }), extra)
}

fn merge(mut body: Value, extra: &Value) -> Value {
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn spoken(response: &Response) -> String {
    let chunks = response.chunks();
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect()
}

#[tokio::test]
async fn a_chat_stream_opens_with_the_role_and_ends_with_a_reason_and_done() {
    let harness = Harness::start(reply_with("Hé!")).await;
    let response = harness.client.post(CHAT, &chat(&json!({}))).await;
    assert_eq!((response.status, response.header("content-type")), (200, Some("text/event-stream")));
    let chunks = response.chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    assert_eq!(chunks[0]["model"], "base");
    assert_eq!(chunks[0]["adapter_generation"], Value::Null);
    let (last, before) = chunks.split_last().unwrap();
    assert!(before.iter().all(|chunk| chunk["choices"][0].get("finish_reason") == Some(&Value::Null)));
    assert_eq!(
        last["choices"][0],
        json!({ "index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop" })
    );
    let said: String =
        before.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, "Hé!");
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk.get("usage").is_none()));
}

#[tokio::test]
async fn usage_comes_last_in_a_chunk_without_choices() {
    let harness = Harness::start(reply_with("abc")).await;
    let options = json!({ "stream_options": { "include_usage": true } });
    let chunks = harness.client.post(TEXT, &text(&options)).await.chunks();
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    // The prompt has two bytes after the begin token; the answer three bytes and the end token.
    let usage = json!({
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
        "prompt_tokens_details": { "cached_tokens": 4 },
        "completion_tokens_details": { "reasoning_tokens": 0 },
    });
    assert_eq!(last["usage"], usage);
    assert!(before.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
}

#[tokio::test]
async fn continuous_usage_grows_with_every_chunk() {
    let harness = Harness::start(say_slowly("abc", Duration::from_millis(20))).await;
    let options = json!({ "stream_options": { "include_usage": true, "continuous_usage_stats": true } });
    let chunks = harness.client.post(TEXT, &text(&options)).await.chunks();
    let counts: Vec<u64> =
        chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts[0] < counts[counts.len() - 1], "{counts:?}");
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_text_before_it_and_cancels() {
    let harness = Harness::start(hang_after("one<END>two")).await;
    let response = harness.client.post(TEXT, &text(&json!({ "stop": ["<END>"], "max_tokens": 50 }))).await;
    assert_eq!(spoken(&response), "one");
    let chunks = response.chunks();
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
    eventually("the rest is cancelled", || harness.executor().cancels().len() == 1).await;
}

#[tokio::test]
async fn text_held_back_for_a_stop_string_comes_when_it_was_none() {
    let harness = Harness::start(reply_with("one<EN")).await;
    let response = harness.client.post(TEXT, &text(&json!({ "stop": "<END>", "max_tokens": 50 }))).await;
    assert_eq!(spoken(&response), "one<EN");
}

#[tokio::test]
async fn a_character_of_several_tokens_is_never_split() {
    let harness = Harness::start(say_slowly("né😀", Duration::from_millis(10))).await;
    let response = harness.client.post(TEXT, &text(&json!({}))).await;
    assert_eq!(spoken(&response), "né😀");
    assert!(!response.body.contains('\u{fffd}'));
}

#[tokio::test]
async fn an_error_in_the_middle_is_one_event_and_no_done() {
    let harness = Harness::start(fail_after("ab", ErrorCode::DeadlineExceeded)).await;
    let response = harness.client.post(TEXT, &text(&json!({}))).await;
    let events = response.events();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "deadline_exceeded");
    assert_eq!(events.iter().filter(|event| event.contains("\"error\"")).count(), 1);
    assert!(!response.body.contains("[DONE]") && !response.body.contains("\"finish_reason\":\"stop\""));
}

#[tokio::test]
async fn an_error_before_the_first_token_is_a_status() {
    let harness = Harness::start(fail_after("", ErrorCode::QueueFull)).await;
    let response = harness.client.post(TEXT, &text(&json!({}))).await;
    assert_eq!((response.status, response.code().as_str()), (429, "queue_full"));
    assert_eq!(response.header("retry-after"), Some("1"));
}

#[tokio::test]
async fn a_caller_who_goes_away_cancels_what_streams_for_them() {
    let harness = Harness::start(hang_after("ab")).await;
    let mut exchange = harness.client.open_post(TEXT, &text(&json!({}))).await;
    exchange.read_until("\"text\":\"b\"").await;
    assert_eq!(harness.executor().cancels(), Vec::<u64>::new());
    drop(exchange);
    eventually("a cancel", || harness.executor().cancels() == [harness.executor().generates()[0].request])
        .await;
}

#[tokio::test]
async fn a_caller_who_goes_away_cancels_what_they_wait_for() {
    let harness = Harness::start(hang_after("")).await;
    let exchange = harness.client.open_post(TEXT, &text(&json!({ "stream": false, "n": 3 }))).await;
    eventually("three sequences", || harness.executor().generates().len() == 3).await;
    drop(exchange);
    eventually("three cancels", || harness.executor().cancels().len() == 3).await;
}

/// A request of which the client has read "ab", read further on a task.
async fn under_way(harness: &Harness, body: &Value) -> tokio::task::JoinHandle<Response> {
    let mut exchange = harness.client.open_post(TEXT, body).await;
    exchange.read_until_any(&["\"text\":\"b\"", "\"text\":\"ab\""]).await;
    tokio::spawn(exchange.rest())
}

#[tokio::test]
async fn a_lost_executor_is_gone_on_with_from_prompt_and_emitted_tokens() {
    let mut harness = Harness::start(hang_after("ab")).await;
    let body = text(&json!({ "max_tokens": 10, "min_tokens": 3, "seed": 5 }));
    let request = under_way(&harness, &body).await;
    harness.restart_executor(reply_with("cd")).await;
    let response = request.await.unwrap();
    assert_eq!(spoken(&response), "abcd");
    let again = &harness.executor().generates()[0];
    assert_eq!(again.prompt, [&[257][..], &tokens("abab")].concat());
    assert_eq!((again.max_tokens, again.min_tokens, again.sampling.seed), (8, 1, 5));
}

#[tokio::test]
async fn an_executor_that_shuts_down_is_waited_for() {
    let mut harness = Harness::start(fail_after("ab", ErrorCode::ShuttingDown)).await;
    let request = under_way(&harness, &text(&json!({}))).await;
    harness.restart_executor(reply_with("cd")).await;
    assert_eq!(spoken(&request.await.unwrap()), "abcd");
}

#[tokio::test]
async fn what_was_generated_before_a_loss_still_counts_as_completion() {
    let mut harness = Harness::start(hang_after("ab")).await;
    let body = text(&json!({ "presence_penalty": 1.0 }));
    let request = under_way(&harness, &body).await;
    harness.restart_executor(reply_with("cd")).await;
    assert_eq!(spoken(&request.await.unwrap()), "abcd");
    let again = &harness.executor().generates()[0];
    assert_eq!(again.generated, 2, "penalties count the completion alone");
}

#[tokio::test]
async fn choices_stream_side_by_side_and_each_has_its_reason() {
    let harness = Harness::start(reply_with("xyz")).await;
    let response = harness.client.post(CHAT, &chat(&json!({ "n": 3, "seed": 1 }))).await;
    let chunks = response.chunks();
    for index in 0..3 {
        let mine: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(mine[0]["delta"]["role"], "assistant");
        assert_eq!(mine.iter().filter(|choice| choice["finish_reason"] == "stop").count(), 1);
    }
    let seeds: std::collections::HashSet<u64> =
        harness.executor().generates().iter().map(|generate| generate.sampling.seed).collect();
    assert_eq!(seeds.len(), 3);
    assert!(seeds.contains(&1), "the first choice has the seed that was asked for");
}

#[tokio::test]
async fn after_the_grace_a_running_stream_ends_in_an_error() {
    let mut harness = Harness::start(hang_after("ab")).await;
    let request = under_way(&harness, &text(&json!({}))).await;
    // Running requests are cut off, as expected.
    harness.gateway.take().unwrap().shut_down().await.unwrap_err();
    let last: Value = serde_json::from_str(request.await.unwrap().events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "executor_unavailable");
}

#[tokio::test]
async fn within_the_grace_a_running_stream_ends_well() {
    let mut harness = Harness::start_with(say_slowly("abcdef", Duration::from_millis(30)), |config| {
        config.grace = Duration::from_secs(20);
    })
    .await;
    let client = harness.client.clone();
    let request = tokio::spawn(async move { client.post(TEXT, &text(&json!({}))).await });
    eventually("it began", || harness.executor().generates().len() == 1).await;
    harness.gateway.take().unwrap().shut_down().await.unwrap();
    assert_eq!(spoken(&request.await.unwrap()), "abcdef");
}
