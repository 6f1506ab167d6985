//! Ollama's routes, as its clients see them.

use std::sync::Arc;

use gateway::keys::Keys;
use serde_json::{Value, json};
use shmproto::message::ErrorCode;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use crate::{
    client::Response,
    fake_executor::{fail_after, reply_with},
    harness::{Harness, WATCHDOG, key_file},
    text::{BEGIN, ByteText, PARAMETERS, always, tokens},
};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn chat(more: &Value) -> Value {
    let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "hi" }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn lines(response: &Response) -> Vec<Value> {
    response.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn check_last(last: &Value) {
    assert_eq!((&last["done"], &last["eval_count"]), (&json!(true), &json!(6)), "{last}");
    assert!(last["prompt_eval_count"].as_u64().unwrap() > 0);
    let time = |name: &str| last[name].as_u64().unwrap_or_else(|| panic!("{name} in {last}"));
    let parts = time("load_duration") + time("prompt_eval_duration") + time("eval_duration");
    assert_eq!(time("total_duration"), parts);
}

#[tokio::test]
async fn a_chat_is_answered_line_by_line_and_the_last_says_what_it_came_to() {
    let harness = Harness::start(reply_with("hello")).await;
    let options = json!({ "num_predict": 9, "temperature": 0, "top_k": 5, "seed": 7, "stop": ["\n"], "repeat_penalty": 1.5 });
    let response = harness.client.post(CHAT, &chat(&json!({ "options": options, "keep_alive": "5m" }))).await;
    assert_eq!(response.header("content-type"), Some("application/x-ndjson"));
    let lines = lines(&response);
    let text: String = lines.iter().filter_map(|line| line["message"]["content"].as_str()).collect();
    assert_eq!(text, "hello");
    assert!(lines.iter().all(|line| line["model"] == "base" && line["created_at"].is_string()));
    let (last, before) = lines.split_last().unwrap();
    assert!(!before.is_empty() && before.iter().all(|line| line["done"] == false));
    assert_eq!(last["done_reason"], "stop");
    check_last(last);
    let sent = &harness.executor().generates()[0];
    assert_eq!((sent.max_tokens, sent.sampling.top_k, sent.sampling.seed), (9, 5, 7));
    assert_eq!((sent.sampling.temperature, sent.sampling.repetition_penalty), (0.0, 1.5));
    let whole =
        harness.client.post(CHAT, &chat(&json!({ "model": "base:latest", "stream": false }))).await.json();
    assert_eq!(whole["message"], json!({ "role": "assistant", "content": "hello" }));
    check_last(&whole);
}

#[tokio::test]
async fn a_prompt_is_shown_in_a_turn_or_raw_as_it_is() {
    let harness = Harness::start(reply_with("hello")).await;
    let ask = async |more: Value| {
        let mut body = json!({ "model": "base", "prompt": "hi", "stream": false });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        harness.client.post(GENERATE, &body).await.json()
    };
    let answer = ask(json!({ "system": "be brief" })).await;
    assert_eq!(answer["response"], "hello");
    check_last(&answer);
    ask(json!({ "raw": true })).await;
    ask(json!({ "format": "json" })).await;
    ask(json!({ "format": { "type": "integer" } })).await;
    let sent = harness.executor().generates();
    assert_eq!(sent[0].prompt, tokens("system:be brief;user:hi;assistant:"));
    assert_eq!(sent[1].prompt, [vec![BEGIN], tokens("hi")].concat());
    assert!(sent[1].grammar.is_none() && sent[2].grammar.is_some() && sent[3].grammar.is_some());
    let stream = harness.client.post(GENERATE, &json!({ "model": "base", "prompt": "hi" })).await;
    let text: String = lines(&stream).iter().filter_map(|line| line["response"].as_str()).collect();
    assert_eq!(text, "hello");
    // An empty prompt only requests that the model is loaded.
    let loaded = ask(json!({ "prompt": "" })).await;
    assert_eq!((&loaded["done_reason"], &loaded["response"]), (&json!("load"), &json!("")));
    let told = ask(json!({ "logprobs": true, "top_logprobs": 1 })).await;
    assert_eq!(told["logprobs"][0]["token"], "h");
}

#[tokio::test]
async fn calls_are_told_whole_with_values_for_arguments() {
    const SAID: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n\
                        <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": }}\n</tool_call>";
    let text = Arc::new(ByteText::with_template("{% if tools %}<tool_call>{% endif %}"));
    let harness = Harness::start_with_text(reply_with(SAID), always(text), |_| {}).await;
    let tool =
        json!({ "type": "function", "function": { "name": "weather", "parameters": { "type": "object" } } });
    let call = json!({ "function": { "name": "weather", "arguments": { "city": "Oslo" } } });
    let history = json!([
        { "role": "user", "content": "hi" },
        { "role": "assistant", "content": "", "tool_calls": [call] },
        { "role": "tool", "content": "rain", "tool_name": "weather" },
    ]);
    let body = chat(&json!({ "tools": [tool], "messages": history }));
    let lines = lines(&harness.client.post(CHAT, &body).await);
    let calls: Vec<&Value> = lines
        .iter()
        .flat_map(|line| line["message"]["tool_calls"].as_array().into_iter().flatten())
        .collect();
    assert_eq!(calls.len(), 1);
    assert_eq!(
        (&calls[0]["function"]["name"], &calls[0]["function"]["arguments"]),
        (&json!("weather"), &json!({ "city": "Rome" }))
    );
    let text: String = lines.iter().filter_map(|line| line["message"]["content"].as_str()).collect();
    let written = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": }}\n</tool_call>";
    assert_eq!(text.trim(), written, "what is no JSON is text with its tags");
    let prompt = harness.executor().generates()[0].prompt.clone();
    assert_eq!(prompt, tokens("user:hi;assistant:;weather();tool:rain=call00001/weather;assistant:"));
    let shown = harness.client.post("/api/show", &json!({ "model": "base" })).await.json();
    assert_eq!(shown["capabilities"], json!(["completion", "embedding", "tools"]));
}

#[tokio::test]
async fn failures_look_as_ollamas_do_wherever_they_come_from() {
    let file = key_file(&[("user", "alice", "hb-a"), ("metrics", "prometheus", "hb-m")]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let alice = harness.client.with_key("hb-a");
    for (answer, status) in [
        (harness.client.post(CHAT, &chat(&json!({}))).await, 401),
        (harness.client.with_key("hb-m").get("/api/tags").await, 403),
        (alice.post(CHAT, &chat(&json!({ "model": "none" }))).await, 404),
        (alice.get("/api/blobs").await, 404),
        (alice.get(CHAT).await, 405),
        (alice.post("/api/pull", &json!({ "model": "x" })).await, 501),
        (alice.post("/api/create", &json!({ "model": "x" })).await, 501),
        (alice.send("DELETE", "/api/delete", "application/json", "{}").await, 501),
        (
            alice.with_header("origin", "http://evil.example").send("POST", CHAT, "text/plain", "{}").await,
            415,
        ),
        (alice.with_header("sec-fetch-site", "cross-site").send("POST", CHAT, "text/plain", "{}").await, 415),
    ] {
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.json()["error"].is_string(), "{}", answer.body);
    }
    for (more, word) in [
        (json!({ "options": { "mirostat": 2 } }), "mirostat"),
        (json!({ "options": { "num_ctx": 0.5 } }), "num_ctx"),
        (json!({ "options": { "repeat_last_n": 64, "repeat_penalty": 1.1 } }), "repeat_last_n"),
        (json!({ "think": true }), "think"),
        (json!({ "keep_alive": 0 }), "keep_alive"),
        (json!({ "format": "yaml" }), "format"),
        (json!({ "messages": [{ "role": "user", "content": "a", "images": ["AA=="] }] }), "images"),
        (json!({ "max_tokens": 3 }), "max_tokens"),
    ] {
        let answer = alice.post(CHAT, &chat(&more)).await;
        assert_eq!(answer.status, 400, "{more}");
        assert!(answer.json()["error"].as_str().unwrap().contains(word), "{}", answer.body);
    }
    let begun = json!({ "messages": [{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "Once" }] });
    assert_eq!(alice.post(CHAT, &chat(&begun)).await.status, 200);
    assert!(harness.executor().generates().pop().unwrap().prompt.ends_with(&tokens("assistant:Once")));
    // Options that desktop clients send by default, without effect here.
    let unasked = json!({ "num_gpu": 99, "num_thread": 4, "use_mmap": true, "mirostat": 0, "tfs_z": 1.0, "repeat_last_n": 64 });
    assert_eq!(alice.post(CHAT, &chat(&json!({ "options": unasked }))).await.status, 200);
    let raw = json!({ "model": "base", "prompt": "a", "raw": true, "system": "b" });
    assert_eq!(alice.post(GENERATE, &raw).await.status, 400);
    let failing = Harness::start(fail_after("hel", ErrorCode::Internal)).await;
    let lines = lines(&failing.client.post(CHAT, &chat(&json!({}))).await);
    assert!(lines.last().unwrap()["error"].is_string(), "a stream that fails says so: {lines:?}");
}

#[tokio::test]
async fn a_body_is_json_whatever_its_type_says_unless_a_page_sends_it() {
    let harness = Harness::start(reply_with("hello")).await;
    let body = chat(&json!({ "stream": false })).to_string();
    for kind in ["text/plain", "application/octet-stream", "application/x-www-form-urlencoded"] {
        let answer = harness.client.send("POST", CHAT, kind, &body).await;
        assert_eq!((answer.status, &answer.json()["message"]["content"]), (200, &json!("hello")), "{kind}");
        let elsewhere = harness.client.send("POST", "/v1/chat/completions", kind, &body).await;
        assert_eq!(elsewhere.status, 415, "{kind}");
    }
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {}",
        body.len()
    );
    let mut connection = harness.client.connect().await;
    connection.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(WATCHDOG, connection.read_to_string(&mut answer)).await.expect("it is answered").unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "a body without a type: {answer}");
    let origin = format!("http://{}", harness.gateway.as_ref().unwrap().address);
    let page = harness.client.with_header("origin", &origin).send("POST", CHAT, "text/plain", &body).await;
    assert_eq!(page.status, 415, "{}", page.body);
}

#[tokio::test]
async fn models_are_listed_for_those_who_may_use_them() {
    let file = key_file(&[("user", "alice", "hb-a"), ("user", "bob", "hb-b"), ("admin", "ops", "hb-o")]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let load = json!({ "lora_name": "mine", "lora_path": harness.adapter("mine", "w"), "tenant": "alice" });
    assert_eq!(harness.client.with_key("hb-o").post("/v1/load_lora_adapter", &load).await.status, 200);
    let names = async |key: &str| -> Vec<String> {
        let tags = harness.client.with_key(key).get("/api/tags").await.json();
        tags["models"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| model["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names("hb-a").await, ["base", "mine"]);
    assert_eq!(names("hb-b").await, ["base"]);
    let show = async |key: &str, name: &str| {
        harness.client.with_key(key).post("/api/show", &json!({ "model": name })).await
    };
    let shown = show("hb-a", "mine").await.json();
    assert_eq!(shown["details"]["parent_model"], "base");
    assert_eq!(shown["model_info"]["base.context_length"], 512);
    assert_eq!(shown["model_info"]["general.parameter_count"], PARAMETERS);
    assert_eq!(shown["details"]["parameter_size"], "134.52M");
    assert_eq!(show("hb-b", "mine").await.status, 404);
    let alice = harness.client.with_key("hb-a");
    assert_eq!(alice.get("/api/ps").await.json()["models"][0]["name"], "base");
    assert!(alice.get("/api/version").await.json()["version"].is_string());
    let mine = chat(&json!({ "model": "mine", "stream": false }));
    assert_eq!(alice.post(CHAT, &mine).await.json()["model"], "mine");
    assert!(harness.executor().generates()[0].adapter.is_some());
}
