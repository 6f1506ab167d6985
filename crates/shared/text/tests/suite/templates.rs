//! Chat templates against transformers, which renders them with Jinja2.

use std::{
    collections::BTreeMap,
    time::{Duration, UNIX_EPOCH},
};

use crate::support::{golden, smollm2};
use serde_json::{Map, Value, json};
use text::{
    chat_template::{
        ChatTemplate, GenerationPrompt, Limits, RenderTemplate as _, TemplateError, TemplateTokens,
    },
    tokenizer::Tokenizer,
};

fn prompt(value: &Value) -> GenerationPrompt {
    match value {
        Value::Bool(true) => GenerationPrompt::Add,
        Value::Bool(false) => GenerationPrompt::Omit,
        _ => GenerationPrompt::Continue,
    }
}

#[test]
fn templates_render_as_in_transformers() {
    assert_eq!(differences(&golden("templates.json")), [""; 0]);
}

/// Templates of published models, which `scripts/compare-templates` renders with transformers.
#[test]
#[ignore = "its templates are not ours to hold; scripts/compare-templates brings them"]
fn published_templates_render_as_in_transformers() {
    let path = std::env::var("HOLOBIONT_PUBLISHED_TEMPLATES").expect("HOLOBIONT_PUBLISHED_TEMPLATES is set");
    let published = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let differences = differences(&published);
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

fn differences(golden: &Value) -> Vec<String> {
    let now = UNIX_EPOCH + Duration::from_secs(golden["now_s"].as_u64().unwrap());
    let tokens = TemplateTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), pad: None };
    let sources = golden["templates"].as_object().unwrap();
    let compiled =
        |source: &Value| ChatTemplate::new(source.as_str().unwrap(), tokens.clone(), Limits::default());
    let templates: BTreeMap<_, _> =
        sources.iter().map(|(name, source)| (name.as_str(), compiled(source))).collect();
    let cases = golden["cases"].as_array().unwrap().iter();
    cases
        .filter_map(|case| {
            let messages =
                golden["conversations"][case["conversation"].as_str().unwrap()].as_array().unwrap();
            let extra = case["extra"].as_object().unwrap();
            let rendered = match &templates[case["template"].as_str().unwrap()] {
                Ok(template) => template.render_at(messages, prompt(&case["generation_prompt"]), extra, now),
                Err(error) => return Some(format!("{}: {error}", case["template"])),
            };
            let is_same = match (&case["text"], &case["error"]) {
                (Value::String(text), _) => rendered.as_ref().is_ok_and(|rendered| rendered == text),
                // transformers has its own messages for conversations that cannot be continued.
                (_, error) if error.as_str().unwrap().starts_with("continue_final_message") => {
                    matches!(rendered, Err(TemplateError::NotContinued))
                }
                (_, error) => matches!(&rendered, Err(TemplateError::Refused(text)) if *text == *error),
            };
            (!is_same).then(|| format!("{case}\n      here: {rendered:?}"))
        })
        .collect()
}

#[test]
fn smollm2s_own_template_renders_a_conversation() {
    let tokenizer = Tokenizer::from_gguf(&smollm2()).unwrap();
    let source = tokenizer.chat_template().unwrap();
    let template = ChatTemplate::new(source, tokenizer.template_tokens(), Limits::default()).unwrap();
    let text =
        template.render(&[json!({"role": "user", "content": "Hi"})], GenerationPrompt::Add, &Map::new());
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text.unwrap(), expected);
}
