//! Warnings about unenforced parts of a schema, on every route.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::{
    fake_executor::reply_with,
    harness::Harness,
    responses::events,
    text::{ByteText, always},
};

fn schema() -> Value {
    json!({ "type": "object", "properties": { "list": { "type": "array", "items": { "type": "string" }, "uniqueItems": true } } })
}

fn chat(more: &Value) -> Value {
    let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "a" }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Checks that `told` has exactly one warning, for this field.
fn check(told: &Value, field: &str) {
    let warnings = told["warnings"].as_array().unwrap_or_else(|| panic!("no warnings: {told}"));
    assert_eq!(warnings.len(), 1, "{told}");
    assert_eq!((&warnings[0]["param"], &warnings[0]["keyword"]), (&json!(field), &json!("uniqueItems")));
    assert!(warnings[0]["message"].as_str().is_some_and(|message| !message.is_empty()));
}

#[tokio::test]
async fn what_an_answer_need_not_keep_to_is_told_whole_and_at_the_end_of_streams() {
    let harness = Harness::start(reply_with("{}")).await;
    let form = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema() } });
    let field = "response_format.json_schema.schema/properties/list";
    let text = json!({ "model": "base", "prompt": "a", "response_format": form });
    for (path, body) in
        [("/v1/chat/completions", chat(&json!({ "response_format": form }))), ("/v1/completions", text)]
    {
        check(&harness.client.post(path, &body).await.json(), field);
        for options in [json!({}), json!({ "include_usage": true })] {
            let mut body = body.clone();
            (body["stream"], body["stream_options"]) = (true.into(), options);
            let chunks = harness.client.post(path, &body).await.chunks();
            let (last, before) = chunks.split_last().unwrap();
            check(last, field);
            assert!(before.iter().all(|chunk| chunk.get("warnings").is_none()));
        }
    }
    let format = json!({ "type": "json_schema", "name": "n", "schema": schema() });
    let mut body = json!({ "model": "base", "input": "a", "text": { "format": format } });
    let field = "text.format.schema/properties/list";
    check(&harness.client.post("/v1/responses", &body).await.json(), field);
    body["stream"] = true.into();
    let events = events(&harness.client.post("/v1/responses", &body).await);
    check(&events.last().unwrap()["response"], field);
    assert!(events[0]["response"].get("warnings").is_none());
    let body = chat(&json!({ "format": schema() }));
    let lines = harness.client.post("/api/chat", &body).await.body;
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    check(&last, "format/properties/list");
}

#[tokio::test]
async fn tools_that_are_not_strict_are_held_as_far_as_can_be() {
    let text = Arc::new(ByteText::with_template("{% if tools %}<tool_call>{% endif %}"));
    let harness = Harness::start_with_text(reply_with("x"), always(text), |_| {}).await;
    let tool = |strict: bool| {
        let function = json!({ "name": "f", "parameters": schema(), "strict": strict });
        json!({ "tools": [{ "type": "function", "function": function }], "tool_choice": "required" })
    };
    let answer = harness.client.post("/v1/chat/completions", &chat(&tool(false))).await.json();
    check(&answer, "tools.f.parameters/properties/list");
    let answer = harness.client.post("/v1/chat/completions", &chat(&tool(true))).await;
    assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_grammar"));
}

#[tokio::test]
async fn a_strict_schema_is_refused_with_the_place_of_what_cannot_be_held() {
    let harness = Harness::start(reply_with("{}")).await;
    let strict =
        json!({ "type": "json_schema", "json_schema": { "name": "n", "strict": true, "schema": schema() } });
    for form in [json!({ "response_format": strict }), json!({ "structured_outputs": { "json": schema() } })]
    {
        let answer = harness.client.post("/v1/chat/completions", &chat(&form)).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_grammar"), "{form}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("'uniqueItems' at /properties/list"), "{message}");
    }
    assert!(harness.executor().generates().is_empty());
}
