//! Adapters with chat templates of their own, and adapter folders with another tokenizer than the base's.

use std::sync::Arc;

use serde_json::{Value, json};
use types::{AdapterId, AdapterVersion, TenantId};

use crate::{
    client::Response,
    fake_executor::{generation, reply_with},
    harness::Harness,
    text::{ByteText, always, tokens},
};

const BASE_TEMPLATE: &str = "{{ messages }}";
const OWN: &str = "{{ tools }}<tool_call>";

async fn start() -> Harness {
    let text = Arc::new(ByteText::with_template(BASE_TEMPLATE));
    Harness::start_with_text(reply_with("x"), always(text), |_| {}).await
}

fn weights(weights: &str) -> AdapterVersion {
    AdapterVersion(generation(weights.as_bytes()))
}

async fn load(harness: &Harness, name: &str, weights: &str, beside: &[(&str, &str)]) -> Response {
    let path = harness.adapter(name, weights);
    for (file, text) in beside {
        std::fs::write(path.join(file), text).unwrap();
    }
    let body = json!({ "lora_name": name, "lora_path": path, "load_inplace": true });
    harness.client.post("/v1/load_lora_adapter", &body).await
}

async fn chat(harness: &Harness, model: &str) -> Value {
    let body = json!({ "model": model, "messages": [{ "role": "user", "content": "a" }] });
    let answer = harness.client.post("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn prompt(harness: &Harness) -> Vec<u32> {
    harness.executor().generates().last().unwrap().prompt.clone()
}

#[tokio::test]
async fn an_adapter_is_asked_in_its_own_chat_template_at_every_door_and_after_a_restart() {
    let mut harness = start().await;
    let loaded = load(&harness, "own", "one", &[("chat_template.jinja", OWN)]).await.json();
    let served = weights("one").with_chat_template(OWN).to_string();
    assert_eq!((&loaded["own_chat_template"], &loaded["generation"]), (&json!(true), &json!(served)));
    let expected = tokens(&format!("[{OWN}]user:a;assistant:"));
    for restarted in [false, true] {
        if restarted {
            harness.restart_gateway().await;
        }
        assert_eq!(chat(&harness, "own").await["adapter_generation"], json!(served));
        assert_eq!(prompt(&harness), expected);
        let sent = harness.executor().generates().last().unwrap().adapter;
        assert_eq!(
            sent,
            Some(AdapterId::new(TenantId::EVERYBODY, weights("one")).0),
            "executors know weights"
        );
        chat(&harness, "base").await;
        assert_eq!(prompt(&harness), tokens("user:a;assistant:"));
    }
    let messages = json!([{ "role": "user", "content": "a" }]);
    for (route, body) in [
        ("/v1/responses", json!({ "model": "own", "input": "a" })),
        ("/api/chat", json!({ "model": "own", "messages": messages, "stream": false })),
        ("/v1/chat/completions", json!({ "model": "own:0.5", "messages": messages })),
    ] {
        let answer = harness.client.post(route, &body).await;
        assert_eq!((answer.status, prompt(&harness)), (200, expected.clone()), "{route}: {}", answer.body);
    }
    let counted = harness.client.post("/tokenize", &json!({ "model": "own", "messages": messages })).await;
    assert_eq!(counted.json()["tokens"], json!(expected));
    let shown = harness.client.post("/api/show", &json!({ "model": "own" })).await.json();
    assert_eq!(shown["template"], OWN);
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("tools")), "{shown}");
}

#[tokio::test]
async fn another_chat_template_is_another_generation_and_the_bases_own_is_none() {
    let harness = start().await;
    let plain = load(&harness, "a", "one", &[]).await.json();
    assert_eq!((&plain["generation"], &plain["warnings"]), (&json!(weights("one").to_string()), &json!([])));
    let config = json!({ "chat_template": BASE_TEMPLATE }).to_string();
    for beside in [("chat_template.jinja", format!("{BASE_TEMPLATE}\n")), ("tokenizer_config.json", config)] {
        let same = load(&harness, "b", "one", &[(beside.0, &beside.1)]).await.json();
        let told = (&same["generation"], &same["own_chat_template"]);
        assert_eq!(told, (&plain["generation"], &json!(false)), "{beside:?}");
    }
    let config = json!({ "chat_template": "in the configuration" }).to_string();
    let one = load(&harness, "c", "one", &[("tokenizer_config.json", &config)]).await.json();
    let two = load(&harness, "c", "one", &[("chat_template.jinja", "two")]).await.json();
    assert_eq!(two["generation"], json!(weights("one").with_chat_template("two").to_string()));
    assert_ne!(one["generation"], two["generation"]);
    chat(&harness, "c").await;
    assert_eq!(prompt(&harness), tokens("[two]user:a;assistant:"));
    let sum = harness.client.post("/v1/completions", &json!({ "model": "a+c", "prompt": "a" })).await;
    assert_eq!(sum.status, 400);
    assert!(sum.body.contains("different chat templates"), "{}", sum.body);
    let body = json!({ "lora_name": "c" });
    assert_eq!(harness.client.post("/v1/unload_lora_adapter", &body).await.status, 200);
    std::fs::remove_file(harness.directory.path().join("adapters/c/chat_template.jinja")).unwrap();
    std::fs::remove_file(harness.directory.path().join("adapters/c/tokenizer_config.json")).unwrap();
    assert_eq!(load(&harness, "c", "one", &[]).await.json()["generation"], plain["generation"]);
}

#[tokio::test]
async fn a_chat_template_that_cannot_be_used_is_refused_and_a_tokenizer_that_differs_is_told() {
    let harness = start().await;
    let long = "x".repeat((128 << 10) + 1);
    for (file, text, said) in [
        ("chat_template.jinja", "{% if %}", "syntax error"),
        ("chat_template.jinja", " ", "empty"),
        ("chat_template.jinja", &long, "131072 bytes"),
        ("tokenizer_config.json", r#"{"chat_template": "{{ messages"}"#, "syntax error"),
        ("tokenizer_config.json", "{", "save the tokenizer again"),
        ("added_tokens.json", "[]", "save the tokenizer again"),
    ] {
        let refused = load(&harness, "refused", "one", &[(file, text)]).await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_adapter"), "{}", refused.body);
        assert!(refused.body.contains(said) && refused.body.contains(file), "{}", refused.body);
        std::fs::remove_file(harness.directory.path().join("adapters/refused").join(file)).unwrap();
    }
    let models = harness.client.get("/v1/models").await;
    assert!(!models.body.contains("refused"), "{}", models.body);
    let differs =
        [("added_tokens.json", r#"{"<new>": 300}"#), ("tokenizer_config.json", r#"{"eos_token": "<eot>"}"#)];
    let loaded = load(&harness, "a", "one", &differs).await.json();
    let warnings = loaded["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 2, "{loaded}");
    assert!(warnings[0].as_str().unwrap().contains("<eot>"), "{loaded}");
    assert!(warnings[1].as_str().unwrap().contains("<new>"), "{loaded}");
    let same = [
        ("tokenizer_config.json", r#"{"eos_token": "<end>"}"#),
        ("added_tokens.json", r#"{"<begin>": 257}"#),
    ];
    assert_eq!(load(&harness, "b", "one", &same).await.json()["warnings"], json!([]));
}
