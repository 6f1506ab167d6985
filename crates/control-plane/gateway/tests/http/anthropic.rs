//! Anthropic's Messages API, as its clients see it.

use std::sync::Arc;

use gateway::keys::Keys;
use serde_json::{Value, json};
use shmproto::message::ErrorCode;

use crate::{
    client::{Response, TestClient},
    fake_executor::{fail_after, hang_after, reply_with},
    harness::{Harness, eventually, key_file},
    text::{ByteText, always, tokens},
};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const CALL: &str =
    "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn asked(more: &Value) -> Value {
    let body =
        json!({ "model": "base", "max_tokens": 99, "messages": [{ "role": "user", "content": "hi" }] });
    with(body, more)
}

/// Gateway whose model uses Qwen 3's formats of reasoning content and tools, and answers `said`.
async fn qwen(said: &'static str) -> Harness {
    let template =
        "{% if tools %}<tool_call>{% endif %}{{ content.split('</think>') }}{% if enable_thinking %}";
    let text = Arc::new(ByteText::with_template(template));
    Harness::start_with_text(reply_with(said), always(text), |_| {}).await
}

fn weather(more: &Value) -> Value {
    let schema =
        json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    with(json!({ "name": "weather", "description": "tells", "input_schema": schema }), more)
}

/// Events of a stream; checks that their names equal their types.
fn events(response: &Response) -> Vec<Value> {
    assert_eq!(response.header("content-type"), Some("text/event-stream"), "{}", response.body);
    let events = response.body.split("\n\n").filter_map(|event| event.split_once("\ndata: "));
    let parse = |(name, data): (&str, &str)| {
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    events.map(parse).collect()
}

/// Builds the message from the events, as Anthropic's clients do.
fn accumulated(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut json = String::new();
    let append = |target: &mut Value, new: &Value| {
        *target = format!("{}{}", target.as_str().unwrap(), new.as_str().unwrap()).into();
    };
    for event in events {
        let at = event["index"].as_u64().unwrap_or_default() as usize;
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(content.len(), at, "blocks come one after the other");
                content.push(event["content_block"].clone());
                json.clear();
            }
            "content_block_delta" => match event["delta"]["type"].as_str().unwrap() {
                "text_delta" => append(&mut message["content"][at]["text"], &event["delta"]["text"]),
                "thinking_delta" => {
                    append(&mut message["content"][at]["thinking"], &event["delta"]["thinking"])
                }
                "signature_delta" => {
                    message["content"][at]["signature"] = event["delta"]["signature"].clone()
                }
                "input_json_delta" => json.push_str(event["delta"]["partial_json"].as_str().unwrap()),
                other => panic!("{other}"),
            },
            "content_block_stop" if message["content"][at]["type"] == "tool_use" => {
                message["content"][at]["input"] = serde_json::from_str(&json).unwrap();
            }
            "message_delta" => {
                for name in ["stop_reason", "stop_sequence", "stop_details"] {
                    message[name] = event["delta"][name].clone();
                }
                message["usage"] = with(message["usage"].clone(), &event["usage"]);
            }
            _ => {}
        }
    }
    message
}

/// The message without its random ids.
fn without_ids(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert!(block["id"].as_str().unwrap().starts_with("toolu_"), "{block}");
            block["id"] = Value::Null;
        }
    }
    message
}

/// The message of a request, whole; checks that a stream gives the same message.
async fn message(client: &TestClient, body: &Value) -> Value {
    let whole = client.post(MESSAGES, body).await;
    assert_eq!(whole.status, 200, "{}", whole.body);
    let stream = client.post(MESSAGES, &with(body.clone(), &json!({ "stream": true }))).await;
    let (whole, events) = (whole.json(), events(&stream));
    assert_eq!(without_ids(accumulated(&events)), without_ids(whole.clone()), "{events:#?}");
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        (types[0], &types[types.len() - 2..]),
        ("message_start", &["message_delta", "message_stop"][..])
    );
    whole
}

fn prompts(harness: &Harness) -> Vec<String> {
    let prompt =
        |prompt: Vec<u32>| String::from_utf8(prompt.iter().map(|&token| token as u8).collect()).unwrap();
    harness.executor().generates().into_iter().map(|generate| prompt(generate.prompt)).collect()
}

#[tokio::test]
async fn a_conversation_is_answered_in_the_shape_of_the_messages_api() {
    let harness = Harness::start(reply_with("hello")).await;
    let options = json!({
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["\n", "x"], "seed": 7,
        "metadata": { "user_id": "u" }, "service_tier": "standard_only", "cache_control": { "type": "ephemeral" },
    });
    let answer = message(&harness.client, &asked(&options)).await;
    assert_eq!(
        (&answer["type"], &answer["role"], &answer["model"]),
        (&json!("message"), &json!("assistant"), &json!("base"))
    );
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(answer["content"], json!([{ "type": "text", "text": "hello" }]));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    let prompt = tokens("user:hi;assistant:").len();
    let usage = &answer["usage"];
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(prompt - 4), &json!(4)));
    assert_eq!((&usage["cache_creation_input_tokens"], &usage["output_tokens"]), (&json!(0), &json!(6)));
    let chat = json!({
        "model": "base", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 9, "temperature": 0.5,
        "top_p": 0.9, "top_k": 5, "stop": ["\n", "x"], "seed": 7,
    });
    harness.client.post("/v1/chat/completions", &chat).await.json();
    let mut sent = harness.executor().generates();
    sent.iter_mut().for_each(|generate| generate.request = 0);
    assert!(
        sent.len() == 3 && sent.iter().all(|generate| *generate == sent[2]),
        "all ask the same: {sent:#?}"
    );
}

#[tokio::test]
async fn a_conversation_of_blocks_is_shown_as_the_template_takes_it() {
    let harness = qwen("x").await;
    let cached = json!({ "type": "ephemeral" });
    let history = json!([
        { "role": "user", "content": [{ "type": "text", "text": "a", "cache_control": cached }, { "type": "text", "text": "b" }] },
        { "role": "user", "content": "c" },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "hm", "signature": "of another server" },
            { "type": "redacted_thinking", "data": "AAAA" },
            { "type": "text", "text": "d" },
            { "type": "tool_use", "id": "toolu_1", "name": "weather", "input": { "city": "Rome" }, "caller": { "type": "direct" } },
            { "type": "tool_use", "id": "2", "name": "now", "input": {} },
        ] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "toolu_1", "content": [{ "type": "text", "text": "sun" }, { "type": "text", "text": "ny" }] },
            { "type": "tool_result", "tool_use_id": "2", "content": "no clock", "is_error": true },
            { "type": "text", "text": "and?" },
        ] },
        { "role": "assistant", "content": "e" },
        { "role": "assistant", "content": "f" },
        { "role": "user", "content": "g" },
    ]);
    let system = json!([{ "type": "text", "text": "be ", "cache_control": cached }, { "type": "text", "text": "brief" }]);
    message(&harness.client, &asked(&json!({ "system": system, "messages": history }))).await;
    let shown = "system:be brief;user:ab\n\nc;assistant:(hm)d;weather();now();tool:sunny=1/weather;\
                 tool:Error: no clock=2/now;user:and?;assistant:e\n\nf;user:g;assistant:";
    assert_eq!(prompts(&harness)[0], shown);
    let begun = json!([{ "role": "user", "content": "hi" }, { "role": "assistant", "content": [{ "type": "text", "text": "Once" }] }]);
    message(&harness.client, &asked(&json!({ "messages": begun, "system": "be brief" }))).await;
    assert_eq!(prompts(&harness)[2], "system:be brief;user:hi;assistant:Once");
}

#[tokio::test]
async fn an_answer_says_why_it_ended() {
    let harness = Harness::start(reply_with("hello")).await;
    for (more, reason, sequence, text) in [
        (json!({}), "end_turn", Value::Null, "hello"),
        (json!({ "max_tokens": 2 }), "max_tokens", Value::Null, "he"),
        (json!({ "stop_sequences": ["zz", "lo"] }), "stop_sequence", json!("lo"), "hel"),
    ] {
        let answer = message(&harness.client, &asked(&more)).await;
        assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!(reason), &sequence));
        assert_eq!(answer["content"][0]["text"], text);
    }
    // The prompt leaves space for fewer tokens than the request permits.
    let long = "a".repeat(512 - "user:;assistant:".len() - 2);
    let more = json!({ "messages": [{ "role": "user", "content": long }] });
    let answer = message(&harness.client, &asked(&more)).await;
    assert_eq!(answer["stop_reason"], "model_context_window_exceeded");
    let empty = message(&harness.client, &asked(&json!({ "stop_sequences": ["h"] }))).await;
    assert_eq!((&empty["content"], &empty["stop_reason"]), (&json!([]), &json!("stop_sequence")));
}

#[tokio::test]
async fn calls_are_blocks_with_an_object_as_input() {
    let harness = qwen(CALL).await;
    let tools = json!({ "tools": [weather(&json!({ "cache_control": {}, "type": "custom" })), weather(&json!({ "name": "now" }))] });
    let answer = message(&harness.client, &asked(&tools)).await;
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(answer["content"][0], json!({ "type": "text", "text": "I look." }));
    let call = &answer["content"][1];
    assert_eq!(
        (&call["type"], &call["name"], &call["input"]),
        (&json!("tool_use"), &json!("weather"), &json!({ "city": "Rome" }))
    );
    // Nothing is required of the answer, so no grammar constrains it.
    assert_eq!(harness.executor().generates()[0].grammar, None);
    for more in [
        json!({ "tool_choice": { "type": "any", "disable_parallel_tool_use": true } }),
        json!({ "tool_choice": { "type": "tool", "name": "now" } }),
        json!({ "tools": [weather(&json!({ "strict": true }))] }),
    ] {
        let before = harness.executor().generates().len();
        harness.client.post(MESSAGES, &with(asked(&tools), &more)).await.json();
        assert!(harness.executor().generates()[before].grammar.is_some(), "{more}");
    }
    let none = with(asked(&tools), &json!({ "tool_choice": { "type": "none" } }));
    assert_eq!(message(&harness.client, &none).await["content"][0]["text"], CALL);
    let history = json!([
        { "role": "user", "content": "hi" },
        { "role": "assistant", "content": answer["content"] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": call["id"] }] },
    ]);
    let before = harness.executor().generates().len();
    message(&harness.client, &with(asked(&tools), &json!({ "messages": history }))).await;
    let id = call["id"].as_str().unwrap().strip_prefix("toolu_").unwrap();
    let shown = format!("user:hi;assistant:I look.;weather();tool:={id}/weather;assistant:");
    assert_eq!(prompts(&harness)[before], shown);
}

#[tokio::test]
async fn a_call_without_valid_input_is_text_unless_its_tool_is_streamed_eagerly() {
    const SAID: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": }}\n</tool_call>";
    let harness = qwen(SAID).await;
    let tools = |eager: bool| json!({ "tools": [weather(&json!({ "eager_input_streaming": eager }))] });
    let answer = message(&harness.client, &asked(&tools(false))).await;
    assert_eq!(
        (&answer["content"], &answer["stop_reason"]),
        (&json!([{ "type": "text", "text": SAID }]), &json!("end_turn"))
    );
    let stream = with(asked(&tools(true)), &json!({ "stream": true }));
    let told = events(&harness.client.post(MESSAGES, &stream).await);
    let parts: Vec<&str> = told.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert!(parts.len() > 2 && parts.concat() == "{\"city\": }", "{parts:?}");
    let harness = qwen(CALL).await;
    assert_eq!(
        message(&harness.client, &asked(&tools(true))).await["content"][1]["input"],
        json!({ "city": "Rome" })
    );
    let cut = message(&harness.client, &asked(&with(tools(false), &json!({ "max_tokens": 60 })))).await;
    assert_eq!(cut["stop_reason"], "max_tokens");
    let text = cut["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("I look.") && text.contains("<tool_call>\n{\"name\": \"weather\""), "{text}");
}

#[tokio::test]
async fn thoughts_are_blocks_that_come_back_even_if_they_are_not_shown() {
    let harness = qwen("<think>\nhm, 2 < 3\n</think>\n\nYes.").await;
    for (thinking, shown) in [
        (json!({ "type": "enabled", "budget_tokens": 1024 }), "hm, 2 < 3"),
        (json!({ "type": "adaptive", "display": "omitted" }), ""),
    ] {
        let answer = message(&harness.client, &asked(&json!({ "thinking": thinking }))).await;
        let content = &answer["content"];
        assert_eq!((&content[0]["type"], &content[0]["thinking"]), (&json!("thinking"), &json!(shown)));
        assert!(!content[0]["signature"].as_str().unwrap().is_empty());
        assert_eq!(content[1], json!({ "type": "text", "text": "Yes." }));
        assert_eq!(answer["usage"]["output_tokens_details"]["thinking_tokens"], 26);
        let history = json!([
            { "role": "user", "content": "a" }, { "role": "assistant", "content": content }, { "role": "user", "content": "b" },
        ]);
        message(&harness.client, &asked(&json!({ "messages": history }))).await;
        assert_eq!(prompts(&harness).pop().unwrap(), "user:a;assistant:(hm, 2 < 3)Yes.;user:b;assistant:");
    }
    let plain = Harness::start(reply_with("x")).await;
    for more in [
        json!({ "thinking": { "type": "adaptive" }, "output_config": { "effort": "max" } }),
        json!({ "thinking": { "type": "disabled" } }),
        json!({ "output_config": { "effort": "high" } }),
        json!({ "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] } }),
    ] {
        assert_eq!(plain.client.post(MESSAGES, &asked(&more)).await.status, 200, "{more}");
    }
}

#[tokio::test]
async fn an_answer_of_a_form_reaches_the_executor_as_a_grammar() {
    let harness = Harness::start(reply_with("7")).await;
    let format = json!({ "type": "json_schema", "schema": { "type": "integer" } });
    for more in [json!({ "output_config": { "format": format } }), json!({ "output_format": format })] {
        message(&harness.client, &asked(&more)).await;
    }
    assert!(harness.executor().generates().iter().all(|generate| generate.grammar.is_some()));
}

#[tokio::test]
async fn what_a_message_cannot_honour_is_refused_by_name() {
    let harness = qwen("x").await;
    let said = |role: &str, block: Value| json!({ "messages": [{ "role": role, "content": [block] }] });
    let picture =
        json!({ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "AA==" } });
    let result = json!({ "type": "tool_result", "tool_use_id": "1", "content": [picture] });
    let tool = |more: Value| json!({ "tools": [weather(&more)] });
    for (more, word) in [
        (json!({ "max_tokens": null }), "'max_tokens'"),
        (json!({ "messages": [] }), "'messages'"),
        (json!({ "messages": [{ "role": "robot", "content": "a" }] }), "'robot'"),
        (json!({ "messages": [{ "role": "user" }] }), "'messages[0].content'"),
        (json!({ "messages": [{ "role": "user", "content": "a", "name": "b" }] }), "'messages[0].name'"),
        (said("user", picture.clone()), "'image'"),
        (said("user", json!({ "type": "document", "source": {} })), "'document'"),
        (said("user", json!({ "type": "thinking", "thinking": "a", "signature": "" })), "'thinking'"),
        (said("user", result), "'image'"),
        (said("user", json!({ "type": "text" })), "'messages[0].content[0].text'"),
        (
            said(
                "assistant",
                json!({ "type": "server_tool_use", "id": "1", "name": "web_search", "input": {} }),
            ),
            "'server_tool_use'",
        ),
        (
            said("assistant", json!({ "type": "tool_use", "id": "1", "name": "f", "input": "a" })),
            "'messages[0].content[0].input'",
        ),
        (json!({ "system": [picture] }), "'image'"),
        (
            json!({ "tools": [{ "type": "web_search_20250305", "name": "web_search" }] }),
            "'web_search_20250305'",
        ),
        (json!({ "tools": [{ "name": "f" }] }), "'tools[0].input_schema'"),
        (tool(json!({ "defer_loading": true })), "'tools[0].defer_loading'"),
        (tool(json!({ "allowed_callers": ["code_execution_20250825"] })), "'tools[0].allowed_callers'"),
        (tool(json!({ "eager_input_streaming": "yes" })), "'tools[0].eager_input_streaming'"),
        (with(tool(json!({})), &json!({ "tool_choice": "auto" })), "'tool_choice'"),
        (with(tool(json!({})), &json!({ "tool_choice": { "type": "some" } })), "'some'"),
        (with(tool(json!({})), &json!({ "tool_choice": { "type": "tool", "name": "f" } })), "'tool_choice'"),
    ] {
        check_refusal(&harness, &more, word).await;
    }
    assert!(harness.executor().generates().is_empty());
}

/// Checks that a request is refused with a message that contains `word`.
async fn check_refusal(harness: &Harness, more: &Value, word: &str) {
    let answer = harness.client.post(MESSAGES, &asked(more)).await;
    assert_eq!(answer.status, 400, "{more}: {}", answer.body);
    let error = answer.json();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
    assert!(error["error"]["message"].as_str().unwrap().contains(word), "{more}: {error}");
}

#[tokio::test]
async fn an_option_that_a_message_cannot_honour_is_refused_by_name() {
    let harness = qwen("x").await;
    let edit = |edit: Value| json!({ "context_management": { "edits": [edit] } });
    for (more, word) in [
        (json!({ "thinking": { "type": "between_tools" } }), "'between_tools'"),
        (json!({ "thinking": { "type": "enabled", "budget_tokens": 0 } }), "'thinking.budget_tokens'"),
        (json!({ "thinking": { "type": "enabled", "display": "loud" } }), "'thinking.display'"),
        (json!({ "output_config": { "effort": "huge" } }), "'output_config.effort'"),
        (json!({ "output_config": { "format": { "type": "xml" } } }), "'xml'"),
        (
            json!({ "output_config": { "format": { "type": "json_schema" } } }),
            "'output_config.format.schema'",
        ),
        (json!({ "output_config": { "task_budget": { "type": "tokens" } } }), "'output_config.task_budget'"),
        (json!({ "stop_sequences": ["a".repeat(300)] }), "'stop_sequences'"),
        (json!({ "stop": ["a"] }), "'stop'"),
        (json!({ "container": "c" }), "'container'"),
        (json!({ "mcp_servers": [{ "url": "http://a" }] }), "'mcp_servers'"),
        (json!({ "speed": "fast" }), "'speed'"),
        (json!({ "n": 2 }), "'n'"),
        (json!({ "thread": { "type": "create" } }), "'thread'"),
        (edit(json!({ "type": "clear_tool_uses_20250919" })), "'clear_tool_uses_20250919'"),
        (edit(json!({ "type": "clear_thinking_20251015" })), "'context_management.edits[0].keep'"),
        (
            json!({ "messages": [{ "role": "user", "content": "a".repeat(1000) }] }),
            "prompt is too long: 1016 tokens > 512",
        ),
    ] {
        check_refusal(&harness, &more, word).await;
    }
    assert!(harness.executor().generates().is_empty());
    let plain = Harness::start(reply_with("x")).await;
    let thinks = asked(&json!({ "thinking": { "type": "enabled", "budget_tokens": 2000 } }));
    assert!(plain.client.post(MESSAGES, &thinks).await.body.contains("'thinking'"));
}

#[tokio::test]
async fn failures_look_as_anthropics_do_wherever_they_come_from() {
    let file = key_file(&[("user", "alice", "hb-a"), ("metrics", "prometheus", "hb-m")]);
    let mut harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), None).unwrap())
            .await;
    let versioned = harness.client.with_header("anthropic-version", "2023-06-01");
    let alice = versioned.with_header("x-api-key", "hb-a");
    for (answer, status, kind) in [
        (harness.client.post(MESSAGES, &asked(&json!({}))).await, 401, "authentication_error"),
        (versioned.with_header("x-api-key", "hb-m").get("/v1/models").await, 403, "permission_error"),
        (alice.post(MESSAGES, &asked(&json!({ "model": "none" }))).await, 404, "not_found_error"),
        (alice.post("/v1/messages/batches", &json!({})).await, 404, "not_found_error"),
        (alice.get("/v1/models/none").await, 404, "not_found_error"),
        (alice.get(MESSAGES).await, 405, "invalid_request_error"),
        (alice.send("POST", MESSAGES, "text/plain", "{}").await, 415, "invalid_request_error"),
        (
            alice.send("POST", MESSAGES, "application/json", " ".repeat((1 << 20) + 1)).await,
            413,
            "request_too_large",
        ),
    ] {
        assert_eq!(answer.status, status, "{}", answer.body);
        let error = answer.json();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!(kind)), "{error}");
        assert_eq!(error["request_id"].as_str(), answer.header("request-id"), "{error}");
        assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
    }
    let threaded = asked(&json!({ "thread": { "type": "create" } }));
    let error = alice.post(MESSAGES, &threaded).await.json();
    // Anthropic's clients send the whole conversation when they see this code.
    assert_eq!(error["error"]["details"]["error_code"], "thread_unsupported_request");
    let unknown = alice.post(MESSAGES, &asked(&json!({ "model": "claude" }))).await.json();
    assert!(unknown["error"]["message"].as_str().unwrap().ends_with("among them are: base"), "{unknown}");
    assert!(alice.post(MESSAGES, &asked(&json!({}))).await.header("request-id").is_some());
    harness.kill_executor().await;
    let gone = async || alice.post(MESSAGES, &asked(&json!({}))).await;
    let answer = gone().await;
    let error = answer.json();
    assert_eq!((answer.status, &error["error"]["type"]), (529, &json!("overloaded_error")), "{error}");
    assert!(answer.header("retry-after").is_some());
    let failing = Harness::start(fail_after("hel", ErrorCode::Internal)).await;
    let told = events(&failing.client.post(MESSAGES, &asked(&json!({ "stream": true }))).await);
    let last = told.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")), "{told:#?}");
    assert!(last["request_id"].is_string() && told[0]["type"] == "message_start");
}

#[tokio::test]
async fn limits_of_a_key_are_told_in_anthropics_headers() {
    let file = key_file(&[("user", "alice", "hb-a")]);
    let limit = std::num::NonZeroU32::new(1);
    let harness =
        Harness::start_with(reply_with("x"), |config| config.keys = Keys::read(file.path(), limit).unwrap())
            .await;
    let alice = harness.client.with_header("x-api-key", "hb-a");
    let first = alice.post(MESSAGES, &asked(&json!({}))).await;
    let header =
        |name: &str| first.header(&format!("anthropic-ratelimit-requests-{name}")).map(str::to_owned);
    assert_eq!((header("limit").as_deref(), header("remaining").as_deref()), (Some("1"), Some("0")));
    assert!(header("reset").unwrap().ends_with('Z') && first.header("x-ratelimit-limit-requests").is_none());
    let refused = alice.post(MESSAGES, &asked(&json!({}))).await;
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (429, &json!("rate_limit_error")));
    assert!(refused.header("retry-after").is_some());
}

#[tokio::test]
async fn counted_tokens_are_those_that_an_answer_reports() {
    let harness = qwen("x").await;
    let history = json!([
        { "role": "user", "content": "a" },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "1", "name": "weather", "input": {} }] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "1", "content": "sunny" }] },
    ]);
    for more in [
        json!({}),
        json!({ "system": "be brief", "thinking": { "type": "adaptive" } }),
        json!({ "messages": history, "tools": [weather(&json!({}))] }),
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "Once" }] }),
    ] {
        let usage = &message(&harness.client, &asked(&more)).await["usage"];
        let total = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
            .map(|name| usage[name].as_u64().unwrap());
        let mut body = asked(&more);
        body.as_object_mut().unwrap().remove("max_tokens");
        let counted = harness.client.post(COUNT, &body).await.json();
        assert_eq!(counted, json!({ "input_tokens": total.iter().sum::<u64>() }), "{more}");
    }
    let asks = harness.executor().generates().len();
    let long = json!({ "model": "base", "messages": [{ "role": "user", "content": "a".repeat(1000) }] });
    let counted = harness.client.post(COUNT, &long).await.json();
    assert_eq!(counted["input_tokens"], 1000 + "user:;assistant:".len(), "also beyond the context");
    let input = json!({ "model": "base", "input": "hi", "instructions": "be brief", "stream": false });
    let counted = harness.client.post("/v1/responses/input_tokens", &input).await.json();
    let expected = "system:be brief;user:hi;assistant:".len();
    assert_eq!(counted, json!({ "object": "response.input_tokens", "input_tokens": expected }));
    assert_eq!(harness.executor().generates().len(), asks, "counting generates nothing");
    let answer = harness.client.post("/v1/responses", &input).await.json();
    assert_eq!(answer["usage"]["input_tokens"], expected);
    let next = json!({ "model": "base", "input": "b", "previous_response_id": answer["id"] });
    let counted = harness.client.post("/v1/responses/input_tokens", &next).await.json();
    let answer = harness.client.post("/v1/responses", &next).await.json();
    assert_eq!(answer["usage"]["input_tokens"], counted["input_tokens"]);
}

#[tokio::test]
async fn models_are_listed_in_pages_as_anthropic_does() {
    let harness = Harness::start(reply_with("x")).await;
    for name in ["a", "b"] {
        let load = json!({ "lora_name": name, "lora_path": harness.adapter(name, name) });
        assert_eq!(harness.client.post("/v1/load_lora_adapter", &load).await.status, 200);
    }
    let client = harness.client.with_header("anthropic-version", "2023-06-01");
    let page = async |query: &str| client.get(&format!("/v1/models{query}")).await.json();
    let all = page("").await;
    let ids = |page: &Value| -> Vec<String> {
        page["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| model["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(
        (ids(&all), &all["has_more"]),
        (vec!["base".to_owned(), "a".into(), "b".into()], &json!(false))
    );
    assert_eq!((&all["first_id"], &all["last_id"]), (&json!("base"), &json!("b")));
    let model = &all["data"][1];
    assert_eq!(
        (&model["type"], &model["display_name"], &model["max_input_tokens"]),
        (&json!("model"), &json!("a"), &json!(512))
    );
    assert!(model["created_at"].as_str().unwrap().ends_with('Z'));
    for (query, expected, has_more) in [
        ("?limit=2", vec!["base", "a"], true),
        ("?limit=2&after_id=a", vec!["b"], false),
        ("?limit=1&before_id=b", vec!["a"], true),
        ("?before_id=base", vec![], false),
    ] {
        let page = page(query).await;
        assert_eq!(
            (ids(&page), &page["has_more"]),
            (expected.iter().map(ToString::to_string).collect(), &json!(has_more)),
            "{query}"
        );
    }
    for query in ["?limit=0", "?limit=x", "?after_id=none"] {
        assert_eq!(page(query).await["error"]["type"], "invalid_request_error", "{query}");
    }
    assert_eq!(client.get("/v1/models/b").await.json()["id"], "b");
    assert_eq!(harness.client.get("/v1/models/b").await.json()["object"], "model");
    let sum = message(&client, &asked(&json!({ "model": "a:0.7+b:0.3" }))).await;
    assert_eq!(sum["model"], "a:0.7+b:0.3");
    assert!(harness.executor().generates()[0].adapter.is_some());
}

#[tokio::test]
async fn a_caller_who_leaves_a_message_cancels_it() {
    let harness = Harness::start(hang_after("hel")).await;
    let mut exchange = harness.client.open_post(MESSAGES, &asked(&json!({ "stream": true }))).await;
    exchange.read_until("text_delta").await;
    drop(exchange);
    eventually("a cancel", || harness.executor().cancels().len() == 1).await;
}
