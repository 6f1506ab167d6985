//! Chat templates against transformers, which renders them with Jinja2.

use std::time::{Duration, UNIX_EPOCH};

use crate::support::{golden, smollm2};
use serde_json::{Map, Value, json};
use text::{
    chat_template::{ChatTemplate, GenerationPrompt, Limits, TemplateError, TemplateTokens},
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
    let golden = golden("templates.json");
    let now = UNIX_EPOCH + Duration::from_secs(golden["now_s"].as_u64().unwrap());
    let tokens = TemplateTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), pad: None };
    for case in golden["cases"].as_array().unwrap() {
        let source = golden["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        let template = ChatTemplate::new(source, tokens.clone(), Limits::default()).unwrap();
        let messages = golden["conversations"][case["conversation"].as_str().unwrap()].as_array().unwrap();
        let extra = case["extra"].as_object().unwrap();
        let rendered = template.render_at(messages, prompt(&case["generation_prompt"]), extra, now);
        let what = format!("{} on {} with {:?}", case["template"], case["conversation"], extra.keys());
        match (&case["text"], &case["error"]) {
            (Value::String(text), _) => {
                assert_eq!(&rendered.unwrap_or_else(|e| panic!("{what}: {e}")), text, "{what}")
            }
            // transformers refuses in sentences of its own what is not continued.
            (_, error) if error.as_str().unwrap().starts_with("continue_final_message") => {
                assert!(matches!(rendered, Err(TemplateError::NotContinued)), "{what}: {rendered:?}");
            }
            (_, error) => {
                assert!(matches!(rendered, Err(TemplateError::Refused(text)) if text == *error), "{what}");
            }
        }
    }
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
