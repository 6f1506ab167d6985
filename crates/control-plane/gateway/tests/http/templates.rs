//! Adapters with chat templates of their own, and adapter folders with another tokenizer than the base's.

use std::{sync::Arc, time::SystemTime};

use gateway::text::Text;
use serde_json::{Map, Value, json};
use text::{
    chat_template::{
        ChatTemplate, GenerationPrompt, Limits, RenderTemplate as _, TemplateError, TemplateTokens,
    },
    sandbox::{SandboxedTemplate, TemplateSandbox},
};
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
async fn the_answer_of_a_load_has_the_executors_warnings_about_the_files() {
    let harness = start().await;
    let lossy = load(&harness, "a", "lossy", &[]).await.json();
    assert_eq!(lossy["warnings"], json!(["a part is missing"]), "{lossy}");
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

fn sandbox() -> Arc<TemplateSandbox> {
    Arc::new(TemplateSandbox::new(env!("CARGO_BIN_EXE_gateway").into()))
}

/// The text of a model whose tokens are the printable ASCII characters.
fn ascii(sandbox: &Arc<TemplateSandbox>) -> Arc<dyn Text> {
    let directory = tempfile::tempdir().unwrap();
    let vocab: Map<String, Value> =
        ('!'..='~').map(|token| (token.to_string(), json!(u32::from(token) - 33))).collect();
    let tokenizer = json!({
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    std::fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    std::fs::write(directory.path().join("chat_template.jinja"), "base").unwrap();
    gateway::text::load(directory.path(), sandbox).unwrap().text
}

const DOUBLING: &str =
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";

#[test]
fn a_template_is_rendered_alike_in_a_process_with_limits_and_in_this_one() {
    let source = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools | tojson }}\
                  {{ strftime_now('%Y') }}{% if add_generation_prompt %}<assistant>{% endif %}{{ raise }}";
    let tokens = TemplateTokens { bos: Some("<s>".to_owned()), ..TemplateTokens::default() };
    let own = ChatTemplate::new(source, tokens.clone(), Limits::default()).unwrap();
    let sandboxed = SandboxedTemplate::new(sandbox(), source.into(), tokens);
    let messages = [json!({ "role": "user", "content": "\u{1f600} \"quoted\"\n" })];
    let extra = json!({ "tools": [{ "b": 1, "a": [0.1, -3, null] }] });
    for prompt in [GenerationPrompt::Add, GenerationPrompt::Omit, GenerationPrompt::Continue] {
        let rendered =
            sandboxed.render_at(&messages, prompt, extra.as_object().unwrap(), SystemTime::UNIX_EPOCH);
        let expected = own.render_at(&messages, prompt, extra.as_object().unwrap(), SystemTime::UNIX_EPOCH);
        assert_eq!(rendered, expected, "{prompt:?}");
        rendered.unwrap();
    }
}

#[test]
fn a_template_that_takes_memory_or_time_without_end_ends_its_process_alone() {
    let sandbox = sandbox();
    let template =
        |source: &str| SandboxedTemplate::new(Arc::clone(&sandbox), source.into(), TemplateTokens::default());
    let rendered = |source: &str| template(source).render(&[], GenerationPrompt::Add, &Map::new());
    let is_beyond = |result: Result<_, TemplateError>| matches!(result, Err(TemplateError::Limit { limit }) if limit == "500 ms or 256 MiB of memory");
    let constants = "{{ 'x' * 100000000 }}".repeat(40);
    let slow = "{% set x = 'a' * 10000000 %}{% for i in range(1000) %}{% set y = x | replace('a', 'b') %}{% endfor %}";
    for _ in 0..2 {
        assert_eq!(rendered("fine"), Ok("fine".to_owned()));
        assert!(is_beyond(rendered(DOUBLING)));
        assert!(is_beyond(template(&constants).check().map(|()| String::new())));
        assert!(is_beyond(rendered(slow)));
    }
    let refused = rendered("{{ raise_exception('x' * 1000000) }}");
    assert!(matches!(refused, Err(TemplateError::Refused(message)) if message.len() == 1000));
    assert!(matches!(template("{% if %}").check(), Err(TemplateError::Syntax(_))));
    let nobody = TemplateSandbox::new("/bin/true".into());
    let nobody = SandboxedTemplate::new(Arc::new(nobody), "fine".into(), TemplateTokens::default());
    assert!(matches!(nobody.check(), Err(TemplateError::Unavailable(_))));
}

#[tokio::test]
async fn a_tenants_template_that_doubles_a_string_fails_its_own_requests_alone() {
    let harness = Harness::start_with_text(reply_with("x"), always(ascii(&sandbox())), |_| {}).await;
    let template = format!("{DOUBLING}{{{{ messages[0].content }}}}");
    let loaded = load(&harness, "hostile", "one", &[("chat_template.jinja", &template)]).await;
    assert_eq!(loaded.status, 200, "{}", loaded.body);
    let own = "<{{ messages[0].content }}>";
    assert_eq!(load(&harness, "own", "two", &[("chat_template.jinja", own)]).await.status, 200);
    let body = json!({ "model": "hostile", "messages": [{ "role": "user", "content": "a" }] });
    let answer = harness.client.post("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 400, "{}", answer.body);
    assert!(answer.body.contains("500 ms or 256 MiB of memory"), "{}", answer.body);
    chat(&harness, "own").await;
    assert_eq!(prompt(&harness), "<a>".bytes().map(|byte| u32::from(byte) - 33).collect::<Vec<_>>());
    let hostile = "{{ 'x' * 100000000 }}".repeat(40);
    let refused = load(&harness, "constant", "three", &[("chat_template.jinja", &hostile)]).await;
    assert!(refused.status == 400 && refused.body.contains("256 MiB"), "{}", refused.body);
}
