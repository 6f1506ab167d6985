//! The Responses API, as clients see it.

use std::sync::Arc;

use gateway::keys::Keys;
use serde_json::{Value, json};
use shmproto::message::ErrorCode;

use crate::{
    client::Response,
    fake_executor::{fail_after, hang_after, reply_with},
    harness::{Harness, key_file},
    text::{ByteText, always, tokens},
};

const RESPONSES: &str = "/v1/responses";
const SAID: &str =
    "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

fn asked(input: &Value, more: &Value) -> Value {
    let mut body = json!({ "model": "base", "input": input });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Data of a stream's events; checks that names equal types, and that numbers have no gap.
pub(crate) fn events(response: &Response) -> Vec<Value> {
    let events: Vec<Value> = response
        .body
        .split("\n\n")
        .filter_map(|event| event.split_once("\ndata: "))
        .map(|(name, data)| {
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
            data
        })
        .collect();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    events
}

/// Event types, with repetitions merged.
fn types(events: &[Value]) -> Vec<&str> {
    let mut types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    types.dedup();
    types
}

#[tokio::test]
async fn a_text_is_answered_in_the_shape_of_the_responses_api() {
    let harness = Harness::start(reply_with("hello")).await;
    let more = json!({ "instructions": "be brief", "max_output_tokens": 9, "temperature": 0.5, "metadata": { "a": "b" } });
    let answer = harness.client.post(RESPONSES, &asked(&json!("hi"), &more)).await.json();
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    let part = json!({ "type": "output_text", "text": "hello", "annotations": [], "logprobs": [] });
    let item = &answer["output"][0];
    assert_eq!((&item["role"], &item["content"]), (&json!("assistant"), &json!([part])));
    for (name, value) in more.as_object().unwrap() {
        assert_eq!(answer[name], *value, "{name}");
    }
    let usage = &answer["usage"];
    assert_eq!(usage["output_tokens"], 6);
    assert_eq!(usage["total_tokens"], usage["input_tokens"].as_u64().unwrap() + 6);
    let sent = &harness.executor().generates()[0];
    assert_eq!(sent.prompt, tokens("system:be brief;user:hi;assistant:"));
    assert_eq!((sent.max_tokens, sent.sampling.temperature), (9, 0.5));
}

#[tokio::test]
async fn a_stream_tells_items_in_their_order_and_ends_in_the_whole_response() {
    let text = Arc::new(ByteText::with_template("{% if tools %}<tool_call>{% endif %}"));
    let harness = Harness::start_with_text(reply_with(SAID), always(text), |_| {}).await;
    let tool = json!({ "type": "function", "name": "weather", "parameters": { "type": "object" } });
    let body = asked(&json!("hi"), &json!({ "stream": true, "tools": [tool] }));
    let response = harness.client.post(RESPONSES, &body).await;
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let events = events(&response);
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(types(&events), expected);
    let said = |kind: &str| -> String {
        events
            .iter()
            .filter(|event| event["type"] == kind)
            .filter_map(|event| event["delta"].as_str())
            .collect()
    };
    assert_eq!(said("response.output_text.delta"), "I look.");
    assert_eq!(said("response.function_call_arguments.delta"), "{\"city\": \"Rome\"}");
    let last = &events.last().unwrap()["response"];
    let (text, call) = (&last["output"][0], &last["output"][1]);
    assert_eq!(text["content"][0]["text"], "I look.");
    assert_eq!((&call["name"], &call["arguments"]), (&json!("weather"), &json!("{\"city\": \"Rome\"}")));
    let done: Vec<&Value> =
        events.iter().filter(|event| event["type"] == "response.output_item.done").collect();
    assert_eq!(vec![&done[0]["item"], &done[1]["item"]], [text, call]);
    let id = last["id"].as_str().unwrap();
    assert_eq!(harness.client.get(&format!("{RESPONSES}/{id}")).await.json()["output"], last["output"]);
    // The client sends the call back with its output.
    let output = json!([{ "type": "function_call_output", "call_id": call["call_id"], "output": "sunny" }]);
    harness.client.post(RESPONSES, &asked(&output, &json!({ "previous_response_id": id }))).await.json();
    let shown =
        String::from_utf8(harness.executor().generates()[1].prompt.iter().map(|t| *t as u8).collect());
    let shown = shown.unwrap();
    assert!(shown.starts_with("user:hi;assistant:I look.;weather();tool:sunny="), "{shown}");
    assert!(shown.ends_with("/weather;assistant:"), "{shown}");
}

#[tokio::test]
async fn an_answer_that_is_cut_off_is_incomplete_and_one_that_fails_ends_in_failed() {
    let harness = Harness::start(fail_after("hel", ErrorCode::Internal)).await;
    let response = harness.client.post(RESPONSES, &asked(&json!("hi"), &json!({ "stream": true }))).await;
    let told = events(&response);
    let last = told.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["code"].is_string(), "{last}");
    let id = last["response"]["id"].as_str().unwrap();
    assert_eq!(harness.client.get(&format!("{RESPONSES}/{id}")).await.status, 404, "nothing to go on from");
    let mut harness = Harness::start(hang_after("hel")).await;
    let body = asked(&json!("hi"), &json!({ "stream": true }));
    let mut exchange = harness.client.open_post(RESPONSES, &body).await;
    exchange.read_until("output_text.delta").await;
    let _ = harness.gateway.take().unwrap().shut_down().await;
    assert_eq!(types(&events(&exchange.rest().await)).last(), Some(&"response.failed"));
}

#[tokio::test]
async fn a_conversation_goes_on_by_the_number_of_its_last_answer() {
    let harness = Harness::start(reply_with("hello")).await;
    let first = harness.client.post(RESPONSES, &asked(&json!("hi"), &json!({}))).await.json();
    let id = first["id"].as_str().unwrap();
    let more = json!({ "previous_response_id": id, "instructions": "be kind" });
    let second = harness.client.post(RESPONSES, &asked(&json!("and?"), &more)).await.json();
    assert_eq!(second["previous_response_id"], id);
    let prompt = tokens("system:be kind;user:hi;assistant:hello;user:and?;assistant:");
    assert_eq!(harness.executor().generates()[1].prompt, prompt);
    let items = format!("{RESPONSES}/{}/input_items", second["id"].as_str().unwrap());
    let texts = async |query: &str| -> Vec<String> {
        let list = harness.client.get(&format!("{items}{query}")).await.json();
        let data = list["data"].as_array().unwrap();
        data.iter().map(|item| item["content"][0]["text"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(texts("").await, ["and?", "hello", "hi"]);
    assert_eq!(texts("?order=asc&limit=2").await, ["hi", "hello"]);
    let after = first["output"][0]["id"].as_str().unwrap();
    assert_eq!(texts(&format!("?order=asc&after={after}")).await, ["and?"]);
    let path = format!("{RESPONSES}/{id}");
    assert_eq!(harness.client.get(&path).await.json(), first);
    let deleted = harness.client.send("DELETE", &path, "application/json", "").await;
    assert_eq!(deleted.json()["deleted"], true);
    for gone in
        [harness.client.get(&path).await, harness.client.post(RESPONSES, &asked(&json!("x"), &more)).await]
    {
        assert_eq!((gone.status, gone.code().as_str()), (404, "not_found"));
    }
}

#[tokio::test]
async fn what_one_tenant_keeps_does_not_exist_for_another() {
    let file = key_file(&[("user", "alice", "hb-a"), ("user", "alice", "hb-a2"), ("user", "bob", "hb-b")]);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let [alice, also_alice, bob] = ["hb-a", "hb-a2", "hb-b"].map(|key| harness.client.with_key(key));
    let first = alice.post(RESPONSES, &asked(&json!("secret"), &json!({}))).await.json();
    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    let go_on = asked(&json!("x"), &json!({ "previous_response_id": first["id"] }));
    assert_eq!(bob.get(&path).await.status, 404);
    assert_eq!(bob.get(&format!("{path}/input_items")).await.status, 404);
    assert_eq!(bob.send("DELETE", &path, "application/json", "").await.status, 404);
    assert_eq!(bob.post(RESPONSES, &go_on).await.status, 404);
    assert_eq!(also_alice.get(&path).await.status, 200);
    let unkept = alice.post(RESPONSES, &asked(&json!("x"), &json!({ "store": false }))).await.json();
    assert_eq!(unkept["store"], false);
    assert_eq!(alice.get(&format!("{RESPONSES}/{}", unkept["id"].as_str().unwrap())).await.status, 404);
}

#[tokio::test]
async fn what_a_response_cannot_honour_is_refused_by_name() {
    let harness = Harness::start(reply_with("x")).await;
    for (more, param) in [
        (json!({ "background": true }), "background"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "include": ["file_search_call.results"] }), "include"),
        (json!({ "reasoning": { "effort": "high" } }), "reasoning.effort"),
        (json!({ "reasoning": { "summary": "concise" } }), "reasoning.summary"),
        (json!({ "conversation": "conv_1" }), "conversation"),
        (json!({ "n": 2 }), "n"),
        (json!({ "max_tokens": 2 }), "max_tokens"),
        (json!({ "text": { "verbosity": "low" } }), "text.verbosity"),
        (json!({ "text": { "format": { "type": "grammar" } } }), "text.format.type"),
        (
            json!({ "text": { "format": { "type": "json_schema", "name": "n", "schema": { "not": {} } } } }),
            "text.format.schema",
        ),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (json!({ "previous_response_id": "resp_none" }), "previous_response_id"),
        (json!({ "input": "a".repeat(1000) }), "input"),
    ] {
        let answer = harness.client.post(RESPONSES, &asked(&json!("a"), &more)).await;
        assert!([400, 404].contains(&answer.status), "{more}: {}", answer.body);
        assert_eq!(answer.json()["error"]["param"], param, "{}", answer.body);
    }
    assert!(harness.executor().generates().is_empty());
    let low = json!({ "text": { "verbosity": "low" } });
    let error = harness.client.post(RESPONSES, &asked(&json!("a"), &low)).await;
    assert!(error.body.contains("'text.verbosity'"), "the message names the whole path: {}", error.body);
    let neutral = json!({ "text": { "verbosity": "medium" }, "background": false, "truncation": "disabled", "reasoning": {}, "service_tier": "auto" });
    assert_eq!(harness.client.post(RESPONSES, &asked(&json!("a"), &neutral)).await.status, 200);
    let form = json!({ "type": "json_schema", "name": "n", "schema": { "type": "integer" }, "strict": true });
    harness.client.post(RESPONSES, &asked(&json!("a"), &json!({ "text": { "format": form } }))).await.json();
    assert!(harness.executor().generates()[1].grammar.is_some());
}
