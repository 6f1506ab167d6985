//! A stream ends with every choice's finish reason and `[DONE]`, or with one error event, also after faults.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use shmproto::message::{ErrorCode, Output, WireError};

use crate::{
    client::Response,
    fake_executor::{Reply, ReplyScript, hang_after, reply_with, spoken},
    harness::{Harness, eventually},
};

const TEXT: &str = "/v1/completions";

fn ask(extra: &Value) -> Value {
    let mut body = json!({ "model": "base", "prompt": "ab", "stream": true, "max_tokens": 40 });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// Error code at the stream's end; `None` if it ended well. Panics if it has both ends or neither.
fn ending(response: &Response, choices: usize) -> Option<String> {
    let events = response.events();
    let errors: Vec<Value> = events
        .iter()
        .filter_map(|event| serde_json::from_str::<Value>(event).ok()?.get("error").cloned())
        .collect();
    let reasons = events.iter().filter(|event| event.contains("\"finish_reason\":\"")).count();
    let done = events.iter().filter(|event| *event == "[DONE]").count();
    match (&errors[..], done) {
        ([], 1) => {
            assert_eq!((reasons, events.last().unwrap().as_str()), (choices, "[DONE]"), "{}", response.body);
            None
        }
        ([error], 0) => {
            assert!(events.last().unwrap().contains("\"error\""), "{}", response.body);
            assert!(error["message"].as_str().unwrap().contains("(request "), "{error}");
            Some(error["code"].as_str().unwrap().to_owned())
        }
        _ => panic!("{done} [DONE] and {} errors in {}", errors.len(), response.body),
    }
}

async fn begin(harness: &Harness, body: Value, sequences: usize) -> tokio::task::JoinHandle<Response> {
    let client = harness.client.clone();
    let request = tokio::spawn(async move { client.post(TEXT, &body).await });
    eventually("it began", || harness.executor().generates().len() == sequences).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    request
}

#[tokio::test]
async fn a_stream_of_several_choices_ends_once_whatever_happens_to_the_executor() {
    let mut harness = Harness::start(hang_after("ab")).await;
    let request = begin(&harness, ask(&json!({ "n": 3 })), 3).await;
    harness.restart_executor(reply_with("cd")).await;
    assert_eq!(ending(&request.await.unwrap(), 3), None);
}

/// The first sequence is silent; the others get an executor's shutdown.
fn shut_down_behind_the_first() -> Reply {
    Arc::new(|generate| {
        let mut outputs = spoken("ab");
        if generate.sampling.seed != 7 {
            let error = WireError { code: ErrorCode::ShuttingDown, message: "restarting".to_owned() };
            outputs.push(Output { error: Some(error), ..Output::default() });
        }
        ReplyScript { outputs, pause: Duration::ZERO }
    })
}

#[tokio::test]
async fn a_choice_lost_on_the_old_connection_goes_on_with_the_new_one() {
    let mut harness = Harness::start(shut_down_behind_the_first()).await;
    let request = begin(&harness, ask(&json!({ "n": 3, "seed": 7 })), 3).await;
    harness.restart_executor(reply_with("cd")).await;
    assert_eq!(ending(&request.await.unwrap(), 3), None);
}

#[tokio::test]
async fn a_deadline_ends_a_stream_whose_executor_is_stuck() {
    let harness = Harness::start(hang_after("ab")).await;
    let response = harness.client.post(TEXT, &ask(&json!({ "deadline_ms": 100 }))).await;
    assert_eq!(ending(&response, 1).as_deref(), Some("deadline_exceeded"));
    eventually("the executor is told", || harness.executor().cancels().len() == 1).await;
}

#[tokio::test]
async fn a_deadline_ends_a_stream_whose_executor_is_gone() {
    let mut harness = Harness::start(hang_after("ab")).await;
    let request = begin(&harness, ask(&json!({ "deadline_ms": 600 })), 1).await;
    harness.executor.take().unwrap().kill().await;
    assert_eq!(ending(&request.await.unwrap(), 1).as_deref(), Some("deadline_exceeded"));
}

#[tokio::test]
async fn what_is_redone_has_what_is_left_of_its_deadline() {
    let mut harness = Harness::start(hang_after("ab")).await;
    let request = begin(&harness, ask(&json!({ "deadline_ms": 60_000 })), 1).await;
    harness.restart_executor(reply_with("cd")).await;
    assert_eq!(ending(&request.await.unwrap(), 1), None);
    let left = harness.executor().generates()[0].deadline_ms;
    assert!((1..60_000).contains(&left), "{left}");
}

#[tokio::test]
async fn a_stream_cut_by_the_drain_ends_in_one_error() {
    let mut harness = Harness::start(hang_after("ab")).await;
    let request = begin(&harness, ask(&json!({ "n": 2 })), 2).await;
    // The cut-off is the subject of this test.
    let _ = harness.gateway.take().unwrap().shut_down().await;
    assert!(ending(&request.await.unwrap(), 2).is_some());
}

#[tokio::test]
async fn text_that_is_held_back_makes_no_empty_chunk() {
    let harness = Harness::start(reply_with("one<EN")).await;
    let response = harness.client.post(TEXT, &ask(&json!({ "stop": "<END>" }))).await;
    assert_eq!(ending(&response, 1), None);
}
