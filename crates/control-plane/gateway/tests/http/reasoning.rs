//! Reasoning content before an answer, as clients see it.

use std::sync::Arc;

use serde_json::{Value, json};
use settings::ReasoningParser;

use crate::{
    fake_executor::reply_with,
    harness::Harness,
    responses::events,
    text::{ByteText, always},
};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const SAID: &str = "<think>\nhm, 2 < 3\n</think>\n\nYes.";
const THOUGHT: &str = "hm, 2 < 3";
/// Tokens up to the end of the reasoning content; each is a byte.
const THOUGHT_TOKENS: u64 = 26;

/// Gateway whose model uses Qwen 3's formats of reasoning content and tools, and answers `said`.
async fn qwen(said: &'static str) -> Harness {
    thinking(said, ReasoningParser::Auto).await
}

async fn thinking(said: &'static str, parser: ReasoningParser) -> Harness {
    let template =
        "{% if tools %}<tool_call>{% endif %}{{ content.split('</think>') }}{% if enable_thinking %}";
    let text = Arc::new(ByteText::with_template(template));
    Harness::start_with_text(reply_with(said), always(text), |config| config.parsers.reasoning = parser).await
}

fn asked(more: &Value) -> Value {
    let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "a" }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn thoughts_are_told_apart_in_a_chat() {
    let harness = qwen(SAID).await;
    let answer = harness.client.post(CHAT, &asked(&json!({}))).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!(THOUGHT), &json!("Yes.")));
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], THOUGHT_TOKENS);

    let body =
        asked(&json!({ "stream": true, "logprobs": true, "stream_options": { "include_usage": true } }));
    let chunks = harness.client.post(CHAT, &body).await.chunks();
    let choices: Vec<&Value> = chunks.iter().filter_map(|chunk| chunk["choices"].get(0)).collect();
    let joined = |name: &str| -> String {
        choices.iter().filter_map(|choice| choice["delta"][name].as_str()).collect()
    };
    assert_eq!((joined("reasoning_content").as_str(), joined("content").as_str()), (THOUGHT, "Yes."));
    let begun = choices.iter().position(|choice| choice["delta"]["content"] == "Y").unwrap();
    assert!(choices[begun..].iter().all(|choice| choice["delta"].get("reasoning_content").is_none()));
    let scored = choices.iter().filter_map(|choice| choice["logprobs"]["content"].as_array());
    assert_eq!(scored.map(Vec::len).sum::<usize>(), SAID.len() + 1, "all tokens have scores, and the end");
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], THOUGHT_TOKENS);
}

#[tokio::test]
async fn thoughts_are_items_of_a_response_and_are_known_to_the_next_one() {
    let harness = qwen(SAID).await;
    let ask = |more: Value| {
        let mut body = json!({ "model": "base", "input": "a", "include": ["message.output_text.logprobs"] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let response =
        harness.client.post(RESPONSES, &ask(json!({ "reasoning": { "effort": "low" } }))).await.json();
    let output = &response["output"];
    assert_eq!((&output[0]["type"], &output[1]["type"]), (&json!("reasoning"), &json!("message")));
    assert_eq!(output[0]["content"], json!([{ "type": "reasoning_text", "text": THOUGHT }]));
    assert_eq!(output[1]["content"][0]["text"], "Yes.");
    assert_eq!(output[1]["content"][0]["logprobs"].as_array().unwrap().len(), "Yes.".len() + 1);
    assert_eq!(response["usage"]["output_tokens_details"]["reasoning_tokens"], THOUGHT_TOKENS);
    assert_eq!(response["reasoning"], json!({ "effort": "low", "summary": null }));

    let next = ask(json!({ "input": "b", "previous_response_id": response["id"] }));
    assert_eq!(harness.client.post(RESPONSES, &next).await.status, 200);
    let prompt: Vec<u8> = harness.executor().generates()[1].prompt.iter().map(|&token| token as u8).collect();
    let expected = format!("user:a;assistant:({THOUGHT})Yes.;user:b;assistant:");
    assert_eq!(String::from_utf8(prompt).unwrap(), expected);

    let body = ask(json!({ "stream": true }));
    let events = events(&harness.client.post(RESPONSES, &body).await);
    let of = |name: &'static str| events.iter().filter(move |event| event["type"] == name);
    let deltas: String =
        of("response.reasoning_text.delta").map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(deltas, THOUGHT);
    let done = of("response.reasoning_text.done").next().unwrap();
    assert_eq!(done["text"], THOUGHT);
    let first = of("response.output_text.delta").next().unwrap();
    assert!(done["sequence_number"].as_u64() < first["sequence_number"].as_u64());
    let added: Vec<&Value> = of("response.output_item.added").map(|event| &event["item"]["type"]).collect();
    assert_eq!(added, ["reasoning", "message"]);
}

#[tokio::test]
async fn thoughts_are_told_apart_as_ollama_does() {
    let harness = qwen(SAID).await;
    let chat = asked(&json!({ "stream": false, "think": true }));
    let message = &harness.client.post("/api/chat", &chat).await.json()["message"];
    assert_eq!((&message["thinking"], &message["content"]), (&json!(THOUGHT), &json!("Yes.")));
    let generate = json!({ "model": "base", "prompt": "a", "stream": false });
    let answer = harness.client.post("/api/generate", &generate).await.json();
    assert_eq!((&answer["thinking"], &answer["response"]), (&json!(THOUGHT), &json!("Yes.")));
    let raw = json!({ "model": "base", "prompt": "a", "stream": false, "raw": true });
    assert_eq!(harness.client.post("/api/generate", &raw).await.json()["response"], SAID);
    let shown = harness.client.post("/api/show", &json!({ "model": "base" })).await.json();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("thinking")));
}

#[tokio::test]
async fn behind_a_thought_an_answer_may_call_tools() {
    let harness = qwen(
        "<think>I say <tool_call> now.</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
    )
    .await;
    let tool = json!({ "type": "function", "function": { "name": "now" } });
    let answer = harness.client.post(CHAT, &asked(&json!({ "tools": [tool] }))).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "I say <tool_call> now.");
    assert_eq!(
        (&message["content"], &message["tool_calls"][0]["function"]["name"]),
        (&Value::Null, &json!("now"))
    );
}

#[tokio::test]
async fn where_an_answer_begins_follows_from_the_prompt() {
    let harness = qwen("so\n</think>\nYes.").await;
    let begun = |text: &str| {
        let messages = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": text }]);
        let form = json!({ "type": "json_object" });
        json!({ "model": "base", "messages": messages, "continue_final_message": true, "response_format": form })
    };
    let answer = harness.client.post(CHAT, &begun("<think>\n")).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("so"), &json!("Yes.")));
    let answer = harness.client.post(CHAT, &begun("<think>\n\n</think>\n\n")).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "so\n</think>\nYes.", "what was over does not begin again");
    assert!(message.get("reasoning_content").is_none());
    harness.client.post(CHAT, &begun("")).await.json();
    let grammars: Vec<String> =
        harness.executor().generates().into_iter().map(|generate| generate.grammar.unwrap()).collect();
    let has = |word: &str| grammars.iter().map(|grammar| grammar.contains(word)).collect::<Vec<_>>();
    assert_eq!(has("</think>"), [true, false, true], "a form is one of the answer alone");
    assert_eq!(has("<think>"), [false, false, true]);
}

#[tokio::test]
async fn an_operator_may_leave_thoughts_in_the_text() {
    let harness = thinking(SAID, ReasoningParser::None).await;
    let answer = harness.client.post(CHAT, &asked(&json!({}))).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], SAID);
    assert!(message.get("reasoning_content").is_none());
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
}

#[tokio::test]
async fn a_thought_that_is_cut_off_is_all_there_is() {
    let harness = qwen("<think>hm").await;
    let answer = harness.client.post(CHAT, &asked(&json!({}))).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm"), &json!("")));
    let response = harness.client.post(RESPONSES, &json!({ "model": "base", "input": "a" })).await.json();
    assert_eq!(response["output"].as_array().unwrap().len(), 1, "{response}");
    assert_eq!(response["output"][0]["type"], "reasoning");
}

/// Chat template in the harmony format: the reasoning content of a message, then a call if there are tools.
const HARMONY: &str = "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>\
                       {% if tools %}<|channel|>commentary to=functions.{% endif %}";

/// Gateway whose model answers `said` in the harmony format.
async fn harmony(said: &'static str) -> Harness {
    let text = Arc::new(ByteText::with_template(HARMONY));
    Harness::start_with_text(reply_with(said), always(text), |_| {}).await
}

#[tokio::test]
async fn channels_of_the_harmony_format_are_told_apart() {
    let harness = harmony(
        "<|channel|>analysis<|message|>hm, 2 < 3<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    )
    .await;
    let answer = harness.client.post(CHAT, &asked(&json!({}))).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!(THOUGHT), &json!("Yes.")));
    let body = asked(&json!({ "stream": true }));
    let chunks = harness.client.post(CHAT, &body).await.chunks();
    let joined = |name: &str| -> String {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][name].as_str()).collect()
    };
    assert_eq!((joined("reasoning_content").as_str(), joined("content").as_str()), (THOUGHT, "Yes."));
    let form = json!({ "response_format": { "type": "json_object" } });
    let answer = harness.client.post(CHAT, &asked(&form)).await;
    assert_eq!(answer.status, 200);
    let grammar = harness.executor().generates().pop().unwrap().grammar.unwrap();
    assert!(grammar.contains("final") && grammar.contains("analysis"), "{grammar}");
}

#[tokio::test]
async fn calls_of_the_harmony_format_are_told_behind_their_reasoning() {
    let harness = harmony(
        "<|channel|>analysis<|message|>hm, 2 < 3<|end|><|start|>assistant<|channel|>commentary \
         to=functions.now <|constrain|>json<|message|>{\"a\": 1}",
    )
    .await;
    let now = json!({ "type": "function", "function": { "name": "now" } });
    for more in [json!({}), json!({ "tool_choice": "required" })] {
        let mut body = asked(&more);
        body["tools"] = json!([now]);
        let answer = harness.client.post(CHAT, &body).await.json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!(choice["message"]["reasoning_content"], THOUGHT);
        let function = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(function, &json!({ "name": "now", "arguments": "{\"a\": 1}" }));
    }
    let grammar = harness.executor().generates().pop().unwrap().grammar.unwrap();
    assert!(grammar.contains("commentary to=functions."), "{grammar}");
}
