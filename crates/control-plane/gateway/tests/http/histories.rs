//! Conversations with earlier tool calls of this server, custom tools, and tool calls beside text.

use std::sync::Arc;

use gateway::config::GatewayConfig;
use serde_json::{Value, json};

use crate::{
    fake_executor::{ReplyScript, reply_with, spoken},
    harness::Harness,
    responses::events,
    text::{ByteText, always, tokens},
};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const PATCH: &str = "*** Begin Patch\n\"é\"\n*** End Patch";

/// Gateway whose model uses Hermes' tool format and answers `said`.
async fn hermes(said: &'static str) -> Harness {
    let text = Arc::new(ByteText::with_template("{% if tools %}<tool_call>{% endif %}"));
    Harness::start_with_text(reply_with(said), always(text), |_: &mut GatewayConfig| {}).await
}

fn function(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name, "parameters": { "type": "object" } } })
}

fn chat(messages: &Value, more: &Value) -> Value {
    let mut body = json!({ "model": "base", "messages": messages, "tools": [function("w"), function("f")] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn shown(harness: &Harness) -> String {
    let prompt = harness.executor().generates().pop().unwrap().prompt;
    String::from_utf8(prompt.iter().map(|&token| u8::try_from(token).unwrap()).collect()).unwrap()
}

#[tokio::test]
async fn arguments_that_are_no_json_are_taken_back_as_text_by_every_route() {
    let harness = hermes("x").await;
    for arguments in
        ["{\"city\": \"Par", "{\"a\": 1,, }", "{'a':1}", "{\"a\":1,\"a\":2}", "[1]", "null", "\"x\"", ""]
    {
        let call =
            json!({ "id": "c1", "type": "function", "function": { "name": "w", "arguments": arguments } });
        let messages = json!([
            { "role": "user", "content": "a" },
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "c1", "content": "error" },
        ]);
        let answer = harness.client.post(CHAT, &chat(&messages, &json!({}))).await;
        assert_eq!(answer.status, 200, "{arguments}: {}", answer.body);
        assert_eq!(shown(&harness), "user:a;assistant:;w();tool:error=c1/w;assistant:", "{arguments}");
        let items = json!([
            { "role": "user", "content": "a" },
            { "type": "function_call", "call_id": "c1", "name": "w", "arguments": arguments },
            { "type": "function_call_output", "call_id": "c1", "output": "error" },
        ]);
        let answer = harness.client.post(RESPONSES, &json!({ "model": "base", "input": items })).await;
        assert_eq!(answer.status, 200, "{arguments}: {}", answer.body);
        let call = json!({ "function": { "name": "w", "arguments": arguments } });
        let messages =
            json!([{ "role": "user", "content": "a" }, { "role": "assistant", "tool_calls": [call] }]);
        let answer =
            harness.client.post("/api/chat", &json!({ "model": "base", "messages": messages })).await;
        assert_eq!(answer.status, 200, "{arguments}: {}", answer.body);
    }
}

#[tokio::test]
async fn a_conversation_goes_on_behind_a_call_that_was_cut_off() {
    const SAID: &str = "<tool_call>\n{\"name\": \"w\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let harness = hermes(SAID).await;
    let tool = json!({ "type": "function", "name": "w", "parameters": { "type": "object" } });
    let body = json!({ "model": "base", "input": "hi", "tools": [tool], "max_output_tokens": 52 });
    let first = harness.client.post(RESPONSES, &body).await.json();
    assert_eq!(
        (&first["status"], &first["output"][0]["type"]),
        (&json!("incomplete"), &json!("function_call"))
    );
    let arguments = first["output"][0]["arguments"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(arguments).is_err(), "{arguments}");
    let again = json!({ "model": "base", "input": "go on", "previous_response_id": first["id"] });
    let answer = harness.client.post(RESPONSES, &again).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(shown(&harness), "user:hi;assistant:;w();user:go on;assistant:");
    let hi = json!([{ "role": "user", "content": "hi" }]);
    let whole = harness.client.post(CHAT, &chat(&hi, &json!({ "max_tokens": 52 }))).await.json();
    let message = &whole["choices"][0]["message"];
    let history =
        json!([{ "role": "user", "content": "hi" }, message, { "role": "user", "content": "go on" }]);
    assert_eq!(harness.client.post(CHAT, &chat(&history, &json!({}))).await.status, 200);
}

#[tokio::test]
async fn a_call_of_a_function_that_was_not_declared_is_text_whole_and_in_a_stream() {
    const UNKNOWN: &str = "\n<tool_call>{\"name\": \"nope\", \"arguments\": {}}</tool_call>";
    let said = concat!(
        "<tool_call>{\"name\": \"w\", \"arguments\": {}}</tool_call>",
        "\n<tool_call>{\"name\": \"nope\", \"arguments\": {}}</tool_call>",
        "\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>"
    );
    let harness = hermes(said).await;
    let messages = json!([{ "role": "user", "content": "a" }]);
    let whole = harness.client.post(CHAT, &chat(&messages, &json!({}))).await.json();
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"], UNKNOWN);
    let names = |calls: &[Value]| -> Vec<String> {
        calls.iter().filter_map(|call| call["function"]["name"].as_str()).map(str::to_owned).collect()
    };
    assert_eq!(names(message["tool_calls"].as_array().unwrap()), ["w", "f"]);
    let chunks = harness.client.post(CHAT, &chat(&messages, &json!({ "stream": true }))).await.chunks();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(deltas[0], &json!({ "role": "assistant", "content": null }), "nobody knows yet of any text");
    let content: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(content, UNKNOWN);
    let calls: Vec<Value> =
        deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().cloned().collect();
    assert_eq!(names(&calls), ["w", "f"]);
    let plain =
        harness.client.post(CHAT, &json!({ "model": "base", "messages": messages, "stream": true })).await;
    assert_eq!(plain.chunks()[0]["choices"][0]["delta"]["content"], "", "without tools there is text");
}

#[tokio::test]
async fn a_call_without_its_tags_is_one_unless_a_form_is_asked_for() {
    let harness = hermes("```json\n{\"name\": \"w\", \"arguments\": {\"city\": \"Rome\"}}\n```").await;
    let messages = json!([{ "role": "user", "content": "a" }]);
    let ask = async |more: Value| {
        harness.client.post(CHAT, &chat(&messages, &more)).await.json()["choices"][0].clone()
    };
    let choice = ask(json!({})).await;
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Value::Null)
    );
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Rome\"}");
    let form = json!({ "response_format": { "type": "json_object" } });
    assert_eq!(ask(form).await["finish_reason"], "stop", "the object is the answer that was asked for");
}

fn say_at_once(text: &'static str) -> crate::fake_executor::Reply {
    Arc::new(move |generate| {
        let mut script: ReplyScript = reply_with("")(generate);
        let said = spoken(text).into_iter().flat_map(|output| output.tokens);
        script.outputs[0].tokens.splice(0..0, said);
        script
    })
}

#[tokio::test]
async fn text_behind_a_call_in_one_step_takes_nothing_from_the_call() {
    const SAID: &str =
        "Well. <tool_call>{\"name\": \"w\", \"arguments\": {\"city\": \"Rome\"}}</tool_call> Done.";
    let text = || Arc::new(ByteText::with_template("{% if tools %}<tool_call>{% endif %}"));
    let tool = json!({ "type": "function", "name": "w", "parameters": { "type": "object" } });
    let body = json!({ "model": "base", "input": "hi", "tools": [tool], "include": ["message.output_text.logprobs"] });
    for reply in [reply_with(SAID), say_at_once(SAID)] {
        let harness = Harness::start_with_text(reply, always(text()), |_| {}).await;
        let output = harness.client.post(RESPONSES, &body).await.json()["output"].clone();
        let calls: Vec<&Value> =
            output.as_array().unwrap().iter().filter(|item| item["type"] == "function_call").collect();
        assert_eq!(calls.len(), 1, "{output}");
        assert_eq!(calls[0]["arguments"], "{\"city\": \"Rome\"}");
        let last = output.as_array().unwrap().last().unwrap();
        assert_eq!(last["content"][0]["text"], " Done.", "{output}");
    }
}

#[tokio::test]
async fn a_custom_tool_is_called_with_a_text_that_keeps_to_its_grammar() {
    let said =
        concat!("I look.\n<tool_call>\n{\"name\": \"patch\"}\n", "*** Begin Patch\n\"é\"\n*** End Patch");
    let harness = hermes(said).await;
    let lark = "start: \"*** Begin Patch\\n\" /.+/ \"\\n*** End Patch\"";
    let format = json!({ "type": "grammar", "syntax": "lark", "definition": lark });
    let flat = json!({ "type": "custom", "name": "patch", "description": "x", "format": format });
    let grammar = json!({ "type": "grammar", "grammar": { "syntax": "lark", "definition": lark } });
    let nested = json!({ "type": "custom", "custom": { "name": "patch", "format": grammar } });
    let messages = json!([{ "role": "user", "content": "a" }]);
    let body = chat(&messages, &json!({ "tools": [nested, function("w")] }));
    let choice = harness.client.post(CHAT, &body).await.json()["choices"][0].clone();
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("I look."))
    );
    let call = choice["message"]["tool_calls"][0].clone();
    assert_eq!(
        (&call["type"], &call["custom"]),
        (&json!("custom"), &json!({ "name": "patch", "input": PATCH }))
    );
    assert!(harness.executor().generates()[0].grammar.as_ref().unwrap().contains("Begin Patch"));
    let history = json!([
        { "role": "user", "content": "a" },
        { "role": "assistant", "content": "I look.", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": call["id"], "content": "done" },
    ]);
    assert_eq!(harness.client.post(CHAT, &chat(&history, &json!({ "tools": [nested] }))).await.status, 200);
    assert!(shown(&harness).contains("I look.;patch();tool:done="), "{}", shown(&harness));
    let chunks = harness
        .client
        .post(CHAT, &chat(&messages, &json!({ "tools": [nested], "stream": true })))
        .await
        .chunks();
    let parts: Vec<&Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    assert_eq!((&parts[0]["type"], &parts[0]["custom"]["name"]), (&json!("custom"), &json!("patch")));
    let input: String = parts.iter().filter_map(|part| part["custom"]["input"].as_str()).collect();
    assert_eq!(input, PATCH);
    let body = json!({ "model": "base", "input": "hi", "tools": [flat], "stream": true,
        "tool_choice": { "type": "custom", "name": "patch" } });
    let told = events(&harness.client.post(RESPONSES, &body).await);
    let of = |kind: &str| told.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<Value>>();
    let deltas = of("response.custom_tool_call_input.delta");
    assert_eq!(deltas.iter().filter_map(|event| event["delta"].as_str()).collect::<String>(), PATCH);
    assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], PATCH);
    let item = &of("response.completed")[0]["response"]["output"][1];
    assert_eq!(
        (&item["type"], &item["name"], &item["input"]),
        (&json!("custom_tool_call"), &json!("patch"), &json!(PATCH))
    );
    let output =
        json!([item, { "type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done" }]);
    let again = json!({ "model": "base", "input": output });
    assert_eq!(harness.client.post(RESPONSES, &again).await.status, 200);
    assert!(shown(&harness).starts_with("assistant:;patch();tool:done="), "{}", shown(&harness));
}

#[tokio::test]
async fn what_codex_sends_is_taken_and_its_other_tools_are_refused_by_name() {
    let harness = hermes("x").await;
    let shell = json!({ "type": "function", "name": "shell", "strict": false,
        "parameters": { "type": "object", "properties": { "cmd": { "type": "string" } } } });
    let format = json!({ "type": "grammar", "syntax": "lark", "definition": "start: /.+/s" });
    let patch = json!({ "type": "custom", "name": "apply_patch", "description": "x", "format": format });
    let input = json!([
        { "type": "message", "role": "developer", "content": [{ "type": "input_text", "text": "b" }], "phase": null },
        { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "c" }] },
        { "type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "d", "status": "completed" },
        { "type": "custom_tool_call_output", "call_id": "1", "output": "e" },
        { "type": "function_call", "call_id": "2", "name": "shell", "arguments": "{}", "namespace": null },
        { "type": "function_call_output", "call_id": "2", "output": [{ "type": "input_text", "text": "f" }] },
    ]);
    let body = |more: &Value| {
        json!({ "model": "base", "instructions": "a", "input": input, "tools": [shell, patch, more], "tool_choice": "auto",
            "parallel_tool_calls": false, "store": false, "stream": true, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k", "service_tier": "auto", "text": { "verbosity": "medium" }, "reasoning": null,
            "client_metadata": { "originator": "codex" } })
    };
    let other = json!({ "type": "function", "name": "plan" });
    let answer = harness.client.post(RESPONSES, &body(&other)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let prompt = "system:a;system:b;user:c;assistant:;apply_patch();tool:e=1/apply_patch;assistant:;shell();\
                  tool:f=2/shell;assistant:";
    assert_eq!(shown(&harness), prompt);
    for (tool, name) in [
        (json!({ "type": "web_search" }), "'web_search'"),
        (json!({ "type": "namespace", "name": "mine", "tools": [] }), "'mine'"),
        (json!({ "type": "local_shell" }), "'local_shell'"),
    ] {
        let error = harness.client.post(RESPONSES, &body(&tool)).await.json()["error"].clone();
        assert_eq!(error["param"], "tools[2].type");
        assert!(error["message"].as_str().unwrap().contains(name), "{error}");
    }
}

#[tokio::test]
async fn a_grammar_of_a_custom_tool_that_cannot_be_kept_to_is_refused_by_its_path() {
    let harness = hermes("x").await;
    let messages = json!([{ "role": "user", "content": "a" }]);
    for (syntax, definition) in
        [("lark", "start: missing"), ("lark", "start: \"a\" }\nx: \"b\""), ("regex", "(")]
    {
        let grammar = json!({ "type": "grammar", "grammar": { "syntax": syntax, "definition": definition } });
        let tool = json!({ "type": "custom", "custom": { "name": "p", "format": grammar } });
        let answer = harness.client.post(CHAT, &chat(&messages, &json!({ "tools": [tool] }))).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_grammar"), "{definition}");
        assert_eq!(
            answer.json()["error"]["param"],
            "tools[0].custom.format.grammar.definition",
            "{definition}"
        );
    }
}

#[tokio::test]
async fn tokens_of_a_conversation_are_counted_with_its_tools() {
    let text = Arc::new(ByteText::with_template("{{ tools }}<tool_call>"));
    let harness = Harness::start_with_text(reply_with("x"), always(text), |_| {}).await;
    let messages = json!([{ "role": "user", "content": "a" }]);
    let body = json!({ "messages": messages, "tools": [function("w")] });
    let answer = harness.client.post("/tokenize", &body).await;
    assert_eq!(answer.json()["tokens"], json!(tokens("tool w;user:a;assistant:")), "{}", answer.body);
    let prompt = json!({ "model": "base", "messages": messages, "tools": [function("w")] });
    assert_eq!(harness.client.post(CHAT, &prompt).await.status, 200);
    assert_eq!(shown(&harness), "tool w;user:a;assistant:", "a chat is shown the same");
    let answer = harness.client.post("/tokenize", &json!({ "prompt": "a", "tools": [function("w")] })).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("tools")));
    let none = Harness::start(reply_with("x")).await;
    let answer = none.client.post("/tokenize", &body).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("tools")),
        "its template shows none"
    );
}
