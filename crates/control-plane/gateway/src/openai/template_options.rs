//! Options of the chat template in vLLM's fields: variables of the template, and where the prompt ends.
//!
//! The template itself is the model's: a request sets values and never template text, which would be code.

use serde_json::{Map, Value};
use text::chat_template::GenerationPrompt;

use super::strict_fields::{StrictFields, wrong};
use crate::{errors::ApiError, text::TemplateOptions};

/// Maximum number of variables per request.
const MAX_VARIABLES: usize = 16;
/// Variables that other fields set, or that other servers take as a template or its environment.
const RESERVED: [&str; 12] = [
    "add_generation_prompt",
    "bos_token",
    "chat_template",
    "continue_final_message",
    "documents",
    "eos_token",
    "messages",
    "pad_token",
    "raise_exception",
    "strftime_now",
    "tokenize",
    "tools",
];

/// Reads `chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`.
pub(crate) fn read(fields: &mut StrictFields) -> Result<TemplateOptions, ApiError> {
    let variables = fields.take("chat_template_kwargs").map(variables).transpose()?.unwrap_or_default();
    let begins = fields.peek("add_generation_prompt").is_some();
    let begins = fields.flag("add_generation_prompt", true)?.then_some(begins);
    let continues = fields.flag("continue_final_message", false)?;
    let prompt = match (begins, continues) {
        (Some(true), true) => {
            let message = "'add_generation_prompt' begins a new message, and 'continue_final_message' \
                           continues one; send one of them";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        (_, true) => GenerationPrompt::Continue,
        (Some(_), false) => GenerationPrompt::Add,
        (None, false) => GenerationPrompt::Omit,
    };
    Ok(TemplateOptions { variables, prompt, ..TemplateOptions::default() })
}

/// True if the template contains `word`, not as a part of a longer word.
#[must_use]
pub(crate) fn has_word(template: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    template.match_indices(word).any(|(at, word)| {
        let (before, behind) = (&template[..at], &template[at + word.len()..]);
        !before.ends_with(is_word) && !behind.starts_with(is_word)
    })
}

fn variables(value: Value) -> Result<Map<String, Value>, ApiError> {
    const FIELD: &str = "chat_template_kwargs";
    let Value::Object(variables) = value else {
        return Err(wrong(FIELD, "an object", &value));
    };
    if variables.len() > MAX_VARIABLES {
        return Err(ApiError::invalid(
            FIELD,
            format!("'{FIELD}' may hold at most {MAX_VARIABLES} variables"),
        ));
    }
    for (name, value) in &variables {
        if RESERVED.contains(&name.as_str()) {
            let message = format!("'{FIELD}' may not set the variable '{name}'; remove it");
            return Err(ApiError::invalid(FIELD, message));
        }
        if value.is_array() || value.is_object() {
            return Err(wrong(&format!("{FIELD}.{name}"), "true, false, a number or a string", value));
        }
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<TemplateOptions, ApiError> {
        let mut fields = StrictFields::of(body, "the body").unwrap();
        let read = super::read(&mut fields);
        fields.finish().unwrap();
        read
    }

    #[test]
    fn a_prompt_ends_where_the_next_message_begins_unless_told_otherwise() {
        let end = |body| read(body).unwrap().prompt;
        assert_eq!(end(json!({})), GenerationPrompt::Add);
        assert_eq!(
            end(json!({ "add_generation_prompt": true, "continue_final_message": false })),
            GenerationPrompt::Add
        );
        assert_eq!(end(json!({ "add_generation_prompt": false })), GenerationPrompt::Omit);
        assert_eq!(end(json!({ "continue_final_message": true })), GenerationPrompt::Continue);
        assert_eq!(
            end(json!({ "add_generation_prompt": false, "continue_final_message": true })),
            GenerationPrompt::Continue
        );
        assert!(read(json!({ "add_generation_prompt": true, "continue_final_message": true })).is_err());
    }

    #[test]
    fn variables_are_plain_and_replace_nothing() {
        let read = |variables: Value| read(json!({ "chat_template_kwargs": variables }));
        let given = read(json!({ "enable_thinking": false, "effort": "low" })).unwrap();
        assert_eq!(given.variables["enable_thinking"], false);
        for wrong in [
            json!([]),
            json!({ "messages": "x" }),
            json!({ "chat_template": "{{ 1 }}" }),
            json!({ "a": [1] }),
        ] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
        let many: Map<String, Value> = (0..17).map(|n| (format!("v{n}"), json!(n))).collect();
        assert!(read(many.into()).is_err());
    }
}
