//! Structured output and tool calls, as clients see them.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::{
    fake_executor::reply_with,
    harness::Harness,
    text::{ByteText, always},
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const SAID: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n\
                    <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

/// Gateway whose model uses Hermes' tool format and answers `said`.
async fn hermes(said: &'static str) -> Harness {
    let text = Arc::new(ByteText::with_template("{% if tools %}<tool_call>{% endif %}"));
    Harness::start_with_text(reply_with(said), always(text), |_| {}).await
}

fn weather() -> Value {
    let parameters =
        json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    json!({ "type": "function", "function": { "name": "weather", "parameters": parameters } })
}

fn asked(more: &Value) -> Value {
    let now = json!({ "type": "function", "function": { "name": "now" } });
    let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "a" }], "tools": [weather(), now] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn calls_are_told_in_openais_shape() {
    let harness = hermes(SAID).await;
    let answer = harness.client.post(CHAT, &asked(&json!({}))).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("I look."))
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let told: Vec<_> = calls.iter().map(|call| (&call["type"], &call["function"])).collect();
    let function = |name: &str, arguments: &str| json!({ "name": name, "arguments": arguments });
    let expected = [function("weather", "{\"city\": \"Rome\"}"), function("now", "{}")];
    assert_eq!(told, [(&json!("function"), &expected[0]), (&json!("function"), &expected[1])]);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(calls.iter().all(|call| call.get("index").is_none()));
    assert_eq!(harness.executor().generates()[0].grammar, None, "nothing has to be as it is");
}

#[tokio::test]
async fn a_stream_tells_calls_part_by_part() {
    let harness = hermes(SAID).await;
    let events = harness.client.post(CHAT, &asked(&json!({ "stream": true }))).await.chunks();
    let deltas: Vec<&Value> = events.iter().filter_map(|event| event["choices"].get(0)).collect();
    let content: String = deltas.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    assert_eq!(content, "I look.");
    let parts: Vec<&Value> = deltas
        .iter()
        .flat_map(|choice| choice["delta"]["tool_calls"].as_array().into_iter().flatten())
        .collect();
    let of = |index: u64| parts.iter().filter(move |part| part["index"] == index);
    for (index, name, arguments) in [(0, "weather", "{\"city\": \"Rome\"}"), (1, "now", "{}")] {
        let first = of(index).next().unwrap();
        assert_eq!((&first["function"]["name"], &first["type"]), (&json!(name), &json!("function")));
        assert!(
            of(index).skip(1).all(|part| part.get("id").is_none() && part["function"].get("name").is_none())
        );
        let text: String = of(index).filter_map(|part| part["function"]["arguments"].as_str()).collect();
        assert_eq!(text, arguments);
    }
    assert_eq!(deltas.last().unwrap()["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn what_has_to_be_of_a_form_reaches_the_executor_and_what_cannot_does_not() {
    let harness = hermes("x").await;
    let sent = |harness: &Harness| harness.executor().generates().len();
    let schema =
        json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": { "type": "integer" } } });
    for body in [
        asked(&json!({ "tool_choice": "required" })),
        asked(&json!({ "tools": [], "response_format": schema })),
    ] {
        let before = sent(&harness);
        harness.client.post(CHAT, &body).await.json();
        assert!(harness.executor().generates()[before].grammar.is_some(), "{body}");
    }
    let before = sent(&harness);
    let strict = json!({ "type": "function", "function": { "name": "f", "parameters": { "not": { "type": "integer" } }, "strict": true } });
    for (body, param, word) in [
        (json!({ "tools": [], "structured_outputs": { "regex": "(" } }), "structured_outputs.regex", "regex"),
        (
            json!({ "tools": [], "structured_outputs": { "json": { "not": { "type": "integer" } } } }),
            "structured_outputs.json",
            "'not' at the root",
        ),
        (
            json!({ "tools": [], "structured_outputs": { "regex": "a" }, "ignore_eos": true }),
            "ignore_eos",
            "ignore_eos",
        ),
        (json!({ "tools": [strict] }), "tools", "'not' at the root"),
        (json!({ "structured_outputs": { "regex": "a" } }), "structured_outputs.regex", "tools"),
        (json!({ "tool_choice": "required", "ignore_eos": true }), "ignore_eos", "ignore_eos"),
    ] {
        let answer = harness.client.post(CHAT, &asked(&body)).await;
        assert_eq!(answer.status, 400, "{body}");
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    assert_eq!(sent(&harness), before, "nobody waits for what cannot be");
    let plain = json!({ "model": "base", "prompt": "a", "structured_outputs": { "choice": ["x"] } });
    harness.client.post(TEXT, &plain).await.json();
    assert!(harness.executor().generates()[before].grammar.is_some());
}

#[tokio::test]
async fn tools_are_refused_where_the_template_shows_none() {
    let harness = Harness::start(reply_with("x")).await;
    let answer = harness.client.post(CHAT, &asked(&json!({}))).await;
    let error = &answer.json()["error"];
    assert_eq!(
        (answer.status, &error["param"], &error["code"]),
        (400, &json!("tools"), &json!("unsupported_parameter"))
    );
    let call = json!({ "id": "1", "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let history = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": null, "tool_calls": [call] }]);
    let body = json!({ "model": "base", "messages": history });
    let error = &harness.client.post(CHAT, &body).await.json()["error"];
    assert_eq!(error["param"], "messages");
    // With `tool_choice` none, missing tools are no error.
    let answer = harness.client.post(CHAT, &asked(&json!({ "tool_choice": "none" }))).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn results_of_tools_are_part_of_a_conversation() {
    let harness = hermes("x").await;
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "weather", "arguments": "{\"city\": \"Rome\"}" } });
    let history = json!([
        { "role": "user", "content": "a" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "c1", "content": "sunny" }
    ]);
    let body = asked(&json!({ "messages": history }));
    assert_eq!(harness.client.post(CHAT, &body).await.status, 200);
    let prompt: Vec<u8> = harness.executor().generates()[0].prompt.iter().map(|&token| token as u8).collect();
    assert_eq!(
        String::from_utf8(prompt).unwrap(),
        "user:a;assistant:;weather();tool:sunny=c1/weather;assistant:"
    );
    for (message, param) in [
        (json!({ "role": "tool", "content": "sunny" }), "messages[0].tool_call_id"),
        (json!({ "role": "assistant", "tool_calls": [{ "id": "1" }] }), "messages[0].tool_calls[0].function"),
        (json!({ "role": "user", "content": "a", "tool_calls": [call] }), "messages[0].tool_calls"),
        (
            json!({ "role": "assistant", "tool_calls": [{ "id": "1", "function": { "name": "f", "arguments": {} } }] }),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            json!({ "role": "assistant", "tool_calls": [{ "id": "1", "type": "mcp" }] }),
            "messages[0].tool_calls[0].type",
        ),
    ] {
        let answer = harness.client.post(CHAT, &asked(&json!({ "messages": [message] }))).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)), "{message}");
    }
}

#[tokio::test]
async fn what_an_assistant_thought_is_part_of_a_conversation() {
    let harness = hermes("x").await;
    let part = json!({ "type": "text", "text": "a", "cache_control": { "type": "ephemeral" } });
    let history = json!([
        { "role": "user", "content": [part] },
        { "role": "assistant", "content": "b", "reasoning_content": "hm" },
        { "role": "user", "content": "c" },
        { "role": "assistant", "content": "d", "reasoning": "ha" },
        { "role": "user", "content": "e" }
    ]);
    let chat = json!({ "model": "base", "messages": history });
    assert_eq!(harness.client.post(CHAT, &chat).await.status, 200);
    let ollama = json!({ "model": "base", "messages": [
        { "role": "user", "content": "a" }, { "role": "assistant", "content": "b", "thinking": "hm" }, { "role": "user", "content": "c" }
    ] });
    assert_eq!(harness.client.post("/api/chat", &ollama).await.status, 200);
    let generates = harness.executor().generates();
    let prompts = generates.iter().map(|generate| generate.prompt.iter().map(|&token| token as u8).collect());
    let prompts: Vec<_> = prompts.map(|prompt| String::from_utf8(prompt).unwrap()).collect();
    assert_eq!(
        prompts,
        [
            "user:a;assistant:(hm)b;user:c;assistant:(ha)d;user:e;assistant:",
            "user:a;assistant:(hm)b;user:c;assistant:"
        ]
    );
    let strange =
        json!({ "model": "base", "messages": [{ "role": "user", "content": "a", "reasoning": "hm" }] });
    let answer = harness.client.post(CHAT, &strange).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("messages[0].reasoning")));
}
