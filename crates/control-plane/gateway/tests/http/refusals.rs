//! Rejected requests, with status, code and parameter.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::{
    fake_executor::reply_with,
    harness::{Harness, WATCHDOG},
    text::tokens,
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(key: &str, value: Value) -> Value {
    let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "hi" }] });
    body[key] = value;
    body
}

#[tokio::test]
async fn an_option_that_is_not_honoured_is_refused_by_name() {
    let harness = Harness::start(reply_with("x")).await;
    let options = [
        ("tools", json!([{ "type": "function", "function": { "name": "f" } }])),
        ("functions", json!([{ "name": "f" }])),
        ("prediction", json!({ "type": "content", "content": "a" })),
        ("audio", json!({ "voice": "v" })),
        ("reasoning_effort", json!("high")),
        ("temprature", json!(0.5)),
    ];
    for (option, value) in options {
        let error = harness.client.post(CHAT, &chat(option, value)).await;
        assert_eq!((error.status, error.code().as_str()), (400, "unsupported_parameter"), "{option}");
        assert_eq!(error.json()["error"]["param"], option);
        assert_eq!(error.json()["error"]["type"], "invalid_request_error");
    }
    for (option, value) in [("best_of", json!(2)), ("suffix", json!("s"))] {
        let mut body = json!({ "model": "base", "prompt": "a" });
        body[option] = value;
        let error = harness.client.post(TEXT, &body).await;
        assert_eq!(
            (error.code().as_str(), &error.json()["error"]["param"]),
            ("unsupported_parameter", &json!(option))
        );
    }
    assert!(harness.executor().generates().is_empty(), "nothing of this reaches the executor");
}

#[tokio::test]
async fn a_value_out_of_range_names_its_field() {
    let harness = Harness::start(reply_with("x")).await;
    let values = [
        ("temperature", json!(3)),
        ("top_p", json!("high")),
        ("n", json!(129)),
        ("stop", json!(["", "a"])),
        ("logit_bias", json!({ "99999": 1 })),
        ("stream_options", json!({ "include_usage": true })),
        ("top_logprobs", json!(21)),
    ];
    for (field, value) in values {
        let error = harness.client.post(CHAT, &chat(field, value)).await;
        assert_eq!((error.status, error.code().as_str()), (400, "invalid_value"), "{field}");
        assert_eq!(error.json()["error"]["param"], field);
    }
}

#[tokio::test]
async fn a_message_that_cannot_be_honoured_is_refused_with_its_place() {
    let harness = Harness::start(reply_with("x")).await;
    let messages = [
        (json!({ "role": "function", "content": "a" }), "messages[0].role"),
        (json!({ "role": "user", "content": [{ "type": "image_url" }] }), "messages[0].content"),
        (json!({ "role": "user", "content": "a", "name": 7 }), "messages[0].name"),
        (json!({ "role": "user" }), "messages[0].content"),
        (json!({ "role": "user", "content": "a", "pictures": 1 }), "messages[0].pictures"),
    ];
    for (message, param) in messages {
        let error = harness.client.post(CHAT, &chat("messages", json!([message]))).await;
        assert_eq!((error.status, &error.json()["error"]["param"]), (400, &json!(param)), "{message}");
    }
    let strange = json!([{ "role": "user", "content": "a", "pictures": 1 }]);
    let error = harness.client.post(CHAT, &chat("messages", strange)).await;
    assert!(
        error.body.contains("'messages[0].pictures'"),
        "the message names the whole path: {}",
        error.body
    );
}

#[tokio::test]
async fn keys_that_clients_keep_for_themselves_change_nothing_at_any_door() {
    let harness = Harness::start(reply_with("x")).await;
    let message = json!({ "role": "user", "content": "hi", "id": 7, "metadata": { "a": 1 }, "opts": {},
        "cache_control": { "type": "ephemeral" } });
    let item = json!({ "role": "user", "content": "hi", "metadata": { "a": 1 }, "opts": {},
        "cache_control": { "type": "ephemeral" } });
    for (path, body) in [
        (CHAT, json!({ "messages": [message] })),
        ("/api/chat", json!({ "messages": [message] })),
        ("/v1/responses", json!({ "input": [item], "client_metadata": { "a": "b" } })),
    ] {
        let mut body = body.clone();
        body["model"] = "base".into();
        let answer = harness.client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        let sent = harness.executor().generates().pop().unwrap();
        assert_eq!(sent.prompt, tokens("user:hi;assistant:"), "{path}");
    }
}

#[tokio::test]
async fn a_stream_may_ask_for_no_obfuscation_at_every_door_and_for_none_of_it_at_any() {
    let harness = Harness::start(reply_with("x")).await;
    for (path, body) in [
        (CHAT, json!({ "messages": [{ "role": "user", "content": "hi" }] })),
        (TEXT, json!({ "prompt": "a" })),
        ("/v1/responses", json!({ "input": "a" })),
    ] {
        let ask = async |wanted: bool| {
            let mut body = body.clone();
            (body["model"], body["stream"]) = ("base".into(), true.into());
            body["stream_options"] = json!({ "include_obfuscation": wanted });
            harness.client.post(path, &body).await
        };
        assert_eq!(ask(false).await.status, 200, "{path}");
        let error = ask(true).await.json();
        assert_eq!(error["error"]["param"], "stream_options.include_obfuscation", "{path}");
    }
}

#[tokio::test]
async fn an_assistant_message_as_a_client_library_repeats_it_is_accepted() {
    let harness = Harness::start(reply_with("x")).await;
    let repeated = json!({ "role": "assistant", "content": "a", "refusal": null, "audio": null,
        "function_call": null, "tool_calls": null, "annotations": [] });
    let silent = json!({ "role": "assistant", "content": null });
    let messages = json!([{ "role": "user", "content": "a", "name": "ann" }, repeated, silent,
        { "role": "user", "content": "b" }]);
    assert_eq!(harness.client.post(CHAT, &chat("messages", messages)).await.status, 200);
}

#[tokio::test]
async fn a_field_that_asks_for_nothing_is_accepted_and_one_that_asks_by_being_there_is_not() {
    let harness = Harness::start(reply_with("x")).await;
    for (field, value) in [
        ("metadata", json!({ "order": "7" })),
        ("user", json!("ann")),
        ("safety_identifier", json!("ann")),
        ("prompt_cache_key", json!("k")),
        ("store", json!(false)),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(false)),
        ("reasoning_effort", json!("none")),
        ("verbosity", json!("medium")),
    ] {
        let answer = harness.client.post(CHAT, &chat(field, value)).await;
        assert_eq!(answer.status, 200, "{field}: {}", answer.body);
    }
    for (field, value) in [("web_search_options", json!({})), ("store", json!(true))] {
        let error = harness.client.post(CHAT, &chat(field, value)).await;
        assert_eq!(
            (error.code().as_str(), &error.json()["error"]["param"]),
            ("unsupported_parameter", &json!(field))
        );
    }
}

#[tokio::test]
async fn what_does_not_fit_the_context_is_refused_with_the_numbers() {
    let harness = Harness::start(reply_with("x")).await;
    let body = json!({ "model": "base", "prompt": "a".repeat(600), "max_tokens": 5 });
    let error = harness.client.post(TEXT, &body).await;
    assert_eq!((error.status, error.code().as_str()), (400, "context_length_exceeded"));
    let message = error.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("512") && message.contains("601"), "{message}");
    assert_eq!(error.json()["error"]["param"], "prompt");
    let body = json!({ "model": "base", "prompt": "a".repeat(510), "max_tokens": 5 });
    assert_eq!(harness.client.post(TEXT, &body).await.status, 200, "one token has room");
}

#[tokio::test]
async fn a_limit_above_the_context_is_the_context_by_every_route() {
    let harness = Harness::start(reply_with("x")).await;
    let messages = json!([{ "role": "user", "content": "hi" }]);
    for (path, prompt_tokens, body) in [
        (TEXT, 2, json!({ "prompt": "a", "max_tokens": 511 })),
        (TEXT, 2, json!({ "prompt": "a", "max_completion_tokens": 1_000_000_000 })),
        (CHAT, 18, json!({ "messages": messages, "max_tokens": 32_000.0 })),
        ("/v1/responses", 18, json!({ "input": "hi", "max_output_tokens": 32_000 })),
        (
            "/api/chat",
            18,
            json!({ "messages": messages, "options": { "num_predict": 32_000, "num_ctx": 131_072 } }),
        ),
        ("/api/generate", 18, json!({ "prompt": "hi", "options": { "num_predict": 32_000 } })),
    ] {
        let mut body = body.clone();
        body["model"] = "base".into();
        let answer = harness.client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path} {body}: {}", answer.body);
        let sent = harness.executor().generates().pop().unwrap();
        assert_eq!(
            (sent.prompt.len(), sent.max_tokens),
            (prompt_tokens, 512 - prompt_tokens as u32),
            "{path}"
        );
    }
}

#[tokio::test]
async fn an_unknown_model_is_an_error_that_names_it_and_never_the_base() {
    let harness = Harness::start(reply_with("x")).await;
    for model in ["nobody", "base:nobody", "base:", "bas", "basement"] {
        let error = harness.client.post(CHAT, &chat("model", json!(model))).await;
        assert_eq!((error.status, error.code().as_str()), (404, "model_not_found"), "{model}");
        assert!(error.json()["error"]["message"].as_str().unwrap().contains(model));
    }
    let error = harness.client.post(CHAT, &chat("model", Value::Null)).await;
    assert_eq!((error.status, error.code().as_str()), (400, "missing_required_parameter"));
}

#[tokio::test]
async fn a_body_that_is_no_json_or_too_long_is_refused() {
    let harness = Harness::start(reply_with("x")).await;
    let client = &harness.client;
    assert_eq!(client.send("POST", CHAT, "application/json", "{").await.code(), "invalid_json");
    assert_eq!(client.send("POST", CHAT, "application/json", "[]").await.code(), "invalid_value");
    let plain = client.send("POST", CHAT, "text/plain", "{}").await;
    assert_eq!((plain.status, plain.code().as_str()), (415, "unsupported_media_type"));
    let long = client.send("POST", CHAT, "application/json", &" ".repeat((1 << 20) + 1)).await;
    assert_eq!((long.status, long.code().as_str()), (413, "body_too_large"));
}

#[tokio::test]
async fn a_body_that_is_compressed_or_not_chunked_as_it_says_is_told_so() {
    let harness = Harness::start(reply_with("x")).await;
    let zipped = harness.client.with_header("content-encoding", "gzip").post(CHAT, &json!({})).await;
    assert_eq!((zipped.status, zipped.code().as_str()), (415, "unsupported_media_type"));
    assert!(zipped.body.contains("gzip"), "{}", zipped.body);
    let mut connection = harness.client.connect().await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n");
    let chunks = "transfer-encoding: chunked\r\nconnection: close\r\n\r\nzz\r\n{}\r\n0\r\n\r\n";
    connection.write_all(format!("{head}{chunks}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(WATCHDOG, connection.read_to_string(&mut answer)).await.expect("it is answered").unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("\"invalid_body\""), "{answer}");
}

#[tokio::test]
async fn after_a_refusal_the_connection_is_good_for_another_request_or_said_to_close() {
    let harness = Harness::start(reply_with("x")).await;
    let head = "POST /api/create HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n";
    let mut connection = harness.client.connect().await;
    for (length, body) in
        [("content-length: 2", "{}"), ("transfer-encoding: chunked", "2\r\n{}\r\n0\r\n\r\n")]
    {
        connection.write_all(format!("{head}{length}\r\n\r\n").as_bytes()).await.unwrap();
        // By now the handler has rejected without reading.
        sleep(Duration::from_millis(20)).await;
        connection.write_all(body.as_bytes()).await.unwrap();
        let answer = timeout(WATCHDOG, one_answer(&mut connection)).await.expect("it is answered");
        assert!(answer.starts_with("HTTP/1.1 501 ") && !answer.contains("connection: close"), "{answer}");
    }
    for (rest, body) in [
        ("content-length: 65537\r\n", ""),
        ("content-length: 2\r\nexpect: 100-continue\r\n", ""),
        ("content-length: 2\r\n", "{"),
        ("transfer-encoding: chunked\r\n", &*format!("10001\r\n{}", "a".repeat(65_537))),
    ] {
        let mut connection = harness.client.connect().await;
        connection.write_all(format!("{head}{rest}\r\n{body}").as_bytes()).await.unwrap();
        let answer = timeout(WATCHDOG, one_answer(&mut connection)).await.expect("it is answered");
        assert!(
            answer.starts_with("HTTP/1.1 501 ") && answer.contains("connection: close"),
            "{rest}: {answer}"
        );
    }
}

/// Head of an answer; the body is read and dropped.
async fn one_answer(connection: &mut BufReader<TcpStream>) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(connection.read_line(&mut head).await.unwrap(), 0, "it ends after {head:?}");
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
    connection.read_exact(&mut vec![0; length.parse().unwrap()]).await.unwrap();
    head
}

#[tokio::test]
async fn what_was_sent_is_never_said_back_in_full() {
    let harness = Harness::start(reply_with("x")).await;
    let long = "é".repeat(200_000);
    for (field, value) in [("model", json!(long)), (&*long, json!(1))] {
        let error = harness.client.post(CHAT, &chat(field, value)).await;
        assert!((400..=404).contains(&error.status) && error.body.len() < 8192, "{}", error.body.len());
    }
    let error = harness.client.post(CHAT, &chat("model", json!(long))).await;
    assert!(error.body.contains("does not exist"), "{}", error.body);
}

#[tokio::test]
async fn a_deeply_nested_body_is_an_error_and_not_a_crash() {
    let harness = Harness::start(reply_with("x")).await;
    let body = format!("{{\"prompt\":{}", "[".repeat(100_000));
    assert_eq!(harness.client.send("POST", TEXT, "application/json", &body).await.code(), "invalid_json");
}

#[tokio::test]
async fn more_prompts_or_sequences_than_allowed_are_refused() {
    let harness = Harness::start(reply_with("x")).await;
    let prompts = vec!["a"; 65];
    let error = harness.client.post(TEXT, &json!({ "model": "base", "prompt": prompts })).await;
    assert_eq!((error.status, error.code().as_str()), (400, "invalid_value"));
    let error = harness.client.post(TEXT, &json!({ "model": "base", "prompt": vec!["a"; 10], "n": 7 })).await;
    assert_eq!(
        (error.status, error.code().as_str()),
        (400, "too_many_sequences"),
        "64 sequences are the limit of this gateway: to try again cannot help"
    );
    let long = json!({ "model": "base", "prompt": vec!["a".repeat(500); 64], "n": 128 });
    assert_eq!(harness.client.post(TEXT, &long).await.code(), "too_many_sequences");
}

#[tokio::test]
async fn what_is_said_twice_is_refused_by_name() {
    let harness = Harness::start(reply_with("x")).await;
    let body = r#"{"model":"base","prompt":"a","model":"other"}"#;
    let error = harness.client.send("POST", TEXT, "application/json", body).await;
    assert_eq!((error.status, error.code().as_str()), (400, "invalid_json"));
    assert_eq!(error.json()["error"]["param"], "model");
}

#[tokio::test]
async fn a_body_made_to_hurt_is_refused_before_the_executor_hears_of_it() {
    let harness = Harness::start(reply_with("x")).await;
    let names: Vec<String> = (0..100_000).map(|i| format!("\"{i}\":0")).collect();
    let biases: serde_json::Map<String, Value> = (0..1025).map(|i| (i.to_string(), json!(1))).collect();
    for (field, value) in [
        ("n", json!(16_384)),
        ("max_tokens", json!(4_294_967_296_u64)),
        ("max_tokens", json!(6000.5)),
        ("logit_bias", json!({ "5": 100, "05": 100 })),
        ("max_tokens", json!(-1)),
        ("logit_bias", json!({ "258": 1 })),
        ("logit_bias", Value::Object(biases)),
        ("stop", json!(vec!["a"; 10_000])),
        ("stop_token_ids", json!([258])),
        ("prompt", json!([258])),
        ("prompt", json!([0.5])),
        ("min_tokens", json!(1000)),
        ("chat_template", json!("{{ 7 }}")),
        ("chat_template_kwargs", json!({ "enable_thinking": true })),
    ] {
        let mut body = json!({ "model": "base", "prompt": "a" });
        body[field] = value;
        let error = harness.client.post(TEXT, &body).await;
        assert_eq!(error.status, 400, "{field}: {}", error.body);
    }
    for body in [format!("{{{}}}", names.join(",")), r#"{"prompt":"\ud800"}"#.to_owned()] {
        assert_eq!(harness.client.send("POST", TEXT, "application/json", &body).await.code(), "invalid_json");
    }
    assert!(harness.executor().generates().is_empty());
}

#[tokio::test]
async fn a_route_or_method_that_does_not_exist_is_a_typed_error() {
    let harness = Harness::start(reply_with("x")).await;
    let error = harness.client.get("/v1/chat/completion").await;
    assert_eq!((error.status, error.code().as_str()), (404, "not_found"));
    let message = error.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(CHAT) && message.contains("/docs"), "{message}");
    assert_eq!(message.matches(", ").count(), 4, "five routes: {message}");
    let long = format!("/{}", "x".repeat(4000));
    assert_eq!(harness.client.get(&long).await.status, 404);
    let error = harness.client.post("/v1/responses/compact", &json!({})).await;
    assert_eq!((error.status, error.code().as_str()), (501, "not_supported"));
    let error = harness.client.get(CHAT).await;
    assert_eq!((error.status, error.code().as_str()), (405, "method_not_allowed"));
}
