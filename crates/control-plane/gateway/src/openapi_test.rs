//! Tests that `openapi.json` documents exactly the fields that the parsers read.

use std::collections::BTreeSet;

use model_files::generation_defaults::GenerationDefaults;
use serde_json::Value;

use crate::{
    anthropic::request::MessagesBody,
    errors::ApiError,
    openai::{
        chat, classify, completions, embeddings, params::ParamLimits, responses::request,
        scoring::body::ScoringInput, strict_fields::TAKEN, tokens,
    },
    pages::OPENAPI,
};

/// Names that parsers read inside a field, not at the top of a body.
const INSIDE: &[&str] = &[
    "role",
    "name",
    "content",
    "type",
    "text",
    "generation",
    "include_usage",
    "continuous_usage_stats",
    "provisional",
];

fn documented(schema: &str) -> BTreeSet<String> {
    let document: Value = serde_json::from_str(OPENAPI).unwrap();
    let properties = document["components"]["schemas"][schema]["properties"].as_object().unwrap();
    properties.keys().cloned().collect()
}

/// Returns every name that `parse` looks up in a body with these fields.
fn taken(body: &Value, parse: fn(&[u8]) -> Result<(), ApiError>) -> BTreeSet<String> {
    TAKEN.with_borrow_mut(BTreeSet::clear);
    parse(body.to_string().as_bytes()).unwrap();
    let taken = TAKEN.with_borrow(BTreeSet::clone);
    taken.into_iter().filter(|name| !INSIDE.contains(&name.as_str())).collect()
}

fn limits<T>(use_them: impl FnOnce(&ParamLimits<'_>) -> T) -> T {
    use_them(&ParamLimits { vocab_size: 300, default_seed: 7, defaults: &GenerationDefaults::default() })
}

#[test]
fn every_field_that_is_documented_is_taken_and_the_other_way_round() {
    let chat = serde_json::json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }] });
    let read = |body: &[u8]| limits(|limits| chat::ChatCompletionBody::read(body, limits)).map(drop);
    assert_eq!(taken(&chat, read), documented("ChatRequest"));
    let text = serde_json::json!({ "model": "m", "prompt": "a" });
    let read = |body: &[u8]| limits(|limits| completions::CompletionBody::read(body, limits)).map(drop);
    assert_eq!(taken(&text, read), documented("CompletionRequest"));
    let response = serde_json::json!({ "model": "m", "input": [{ "role": "user", "content": "a", "id": "msg_1", "status": "completed" }] });
    let read = |body: &[u8]| limits(|limits| request::ResponsesBody::read(body, limits)).map(drop);
    let mut fields = taken(&response, read);
    // `id` and `status` belong to items; `INSIDE` filters out `text`, which is also a name inside of parts.
    fields.retain(|name| !["id", "status"].contains(&name.as_str()));
    fields.insert("text".to_owned());
    assert_eq!(fields, documented("ResponseRequest"));
    let message = serde_json::json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }] });
    let read = |body: &[u8]| limits(|limits| MessagesBody::read_to_count(body, limits)).map(drop);
    assert_eq!(taken(&message, read), documented("MessagesRequest"));
    let text = serde_json::json!({ "model": "m", "input": "a" });
    assert_eq!(
        taken(&text, |body| embeddings::EmbeddingsBody::read(body).map(drop)),
        documented("EmbeddingRequest")
    );
    let text = serde_json::json!({ "model": "m", "text_1": "a", "text_2": "a" });
    let read = |body: &[u8]| ScoringInput::read_score(body).map(drop);
    assert_eq!(taken(&text, read), documented("ScoreRequest"));
    let text = serde_json::json!({ "model": "m", "query": "a", "documents": "a" });
    let read = |body: &[u8]| ScoringInput::read_rerank(body).map(drop);
    assert_eq!(taken(&text, read), documented("RerankRequest"));
    let text = serde_json::json!({ "model": "m", "input": "a" });
    let read = |body: &[u8]| classify::ClassifyBody::read(body).map(drop);
    assert_eq!(taken(&text, read), documented("ClassifyRequest"));
    let read = |body: &[u8]| tokens::TokenizeBody::read(body).map(drop);
    assert_eq!(taken(&serde_json::json!({ "prompt": "a" }), read), documented("TokenizeRequest"));
    let read = |body: &[u8]| tokens::DetokenizeBody::read(body, 300).map(drop);
    assert_eq!(taken(&serde_json::json!({ "tokens": [1] }), read), documented("DetokenizeRequest"));
}

#[test]
fn the_ranges_that_are_documented_are_the_ranges_that_are_taken() {
    let document: Value = serde_json::from_str(OPENAPI).unwrap();
    let fields = document["components"]["schemas"]["CompletionRequest"]["properties"].as_object().unwrap();
    let mut tried = 0;
    for (name, field) in fields {
        let (Some(least), Some(most)) = (field["minimum"].as_f64(), field["maximum"].as_f64()) else {
            continue;
        };
        let try_one = |value: f64| {
            let number = if field["type"][0] == "integer" {
                #[expect(clippy::cast_possible_truncation, reason = "integers of the document")]
                Value::from(value as i64)
            } else {
                Value::from(value)
            };
            let mut body = serde_json::json!({ "model": "m", "prompt": "a", "echo": true });
            // `min_tokens` must not exceed `max_tokens`.
            if name == "min_tokens" {
                body["max_tokens"] = u32::MAX.into();
            }
            body[name] = number;
            limits(|limits| completions::CompletionBody::read(body.to_string().as_bytes(), limits)).map(drop)
        };
        let lowest = if field["exclusiveMinimum"] == 0 { 0.5 } else { least };
        for good in [lowest, most] {
            try_one(good).unwrap_or_else(|error| panic!("{name} {good}: {error}"));
        }
        for bad in [least - 1.0, most + 1.0] {
            assert_eq!(try_one(bad).unwrap_err().status().as_u16(), 400, "{name} {bad}");
        }
        tried += 1;
    }
    assert!(tried > 10, "{tried} ranges");
}
