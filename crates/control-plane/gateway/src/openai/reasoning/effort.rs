//! The reasoning effort that a request asks for, passed to chat templates that support one.

use serde_json::{Map, Value};

use super::ReasoningFormat;
use crate::{
    errors::ApiError,
    openai::{strict_fields::StrictFields, template_options::has_word},
};

/// Levels of OpenAI's API.
const LEVELS: [&str; 6] = [NONE, "minimal", "low", "medium", "high", "xhigh"];
/// Level of a request for no reasoning.
const NONE: &str = "none";
/// Template variables that switch reasoning: of Qwen 3, SmolLM 3 and GLM; of Granite and DeepSeek V3.1.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// Template variable that takes a level.
const LEVEL: &str = "reasoning_effort";

/// The requested effort with its field name, for errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningEffort {
    field: &'static str,
    /// Whether the model shall reason; `None` leaves the choice to the template.
    reasons: Option<bool>,
    /// The level, for templates that take one.
    level: Option<String>,
    without: WithoutReasoning,
}

/// Treatment of a request for reasoning if the model does not reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WithoutReasoning {
    Refuse,
    /// The request leaves it to the model how much it reasons.
    Answer,
}

/// Reads the level in `field`.
///
/// # Errors
/// The field names no known level.
pub(crate) fn read(
    fields: &mut StrictFields,
    field: &'static str,
) -> Result<Option<ReasoningEffort>, ApiError> {
    fields.take(field).map(|value| level(&value, field, "")).transpose()
}

/// Reads the level in `field`, which on Ollama's routes may also be a boolean.
///
/// # Errors
/// The field is neither a boolean nor a known level.
pub(crate) fn read_switch(
    fields: &mut StrictFields,
    field: &'static str,
) -> Result<Option<ReasoningEffort>, ApiError> {
    let read = |value| match value {
        Value::Bool(true) => Ok(ReasoningEffort::on(field)),
        Value::Bool(false) => Ok(ReasoningEffort::off(field)),
        other => level(&other, field, "true, false, "),
    };
    fields.take(field).map(read).transpose()
}

/// Parses a level; `others` lists further permitted values for the error message.
fn level(value: &Value, field: &'static str, others: &str) -> Result<ReasoningEffort, ApiError> {
    let name = value.as_str().filter(|name| LEVELS.contains(name));
    let unknown =
        || format!("'{field}' must be one of {others}{}; send one, or remove it", LEVELS.join(", "));
    let name = name.ok_or_else(|| ApiError::invalid(field, unknown()))?;
    let is_off = name == NONE;
    Ok(if is_off { ReasoningEffort::off(field) } else { ReasoningEffort::on(field).with_level(name) })
}

impl ReasoningEffort {
    /// Returns the effort of a request for no reasoning.
    #[must_use]
    pub(crate) fn off(field: &'static str) -> Self {
        let (reasons, level) = (Some(false), Some(NONE.to_owned()));
        Self { field, reasons, level, without: WithoutReasoning::Answer }
    }

    /// Returns the model's default effort.
    #[must_use]
    pub(crate) fn on(field: &'static str) -> Self {
        Self { field, reasons: Some(true), level: None, without: WithoutReasoning::Refuse }
    }

    /// Returns a level that does not decide whether the model reasons.
    #[must_use]
    pub(crate) fn hint(field: &'static str, level: &str) -> Self {
        Self { field, reasons: None, level: Some(level.to_owned()), without: WithoutReasoning::Answer }
    }

    /// Returns the effort at another level.
    #[must_use]
    pub(crate) fn with_level(self, level: &str) -> Self {
        Self { level: Some(level.to_owned()), ..self }
    }

    /// Returns the effort with another treatment of models that do not reason.
    #[must_use]
    pub(crate) fn without_reasoning(self, without: WithoutReasoning) -> Self {
        Self { without, ..self }
    }

    /// Returns the effort under another field name, for errors.
    #[must_use]
    pub fn at(self, field: &'static str) -> Self {
        Self { field, ..self }
    }

    /// Sets the template's variables for the effort, except variables that are already set. If the template
    /// takes only a switch, or the model always reasons, a level has no further effect. Switching reasoning
    /// off is no error for a model without reasoning.
    ///
    /// # Errors
    /// The request asks for reasoning, but the model does not reason.
    pub(crate) fn apply_to_template(
        &self,
        template: Option<&str>,
        format: Option<ReasoningFormat>,
        variables: &mut Map<String, Value>,
    ) -> Result<(), ApiError> {
        let template = template.unwrap_or_default();
        let mut said: Vec<(&str, Value)> = Vec::new();
        if let Some(reasons) = self.reasons {
            let switches = SWITCHES.into_iter().filter(|name| has_word(template, name));
            said.extend(switches.map(|name| (name, reasons.into())));
        }
        let takes_level = has_word(template, LEVEL);
        if let Some(level) = self.level.as_deref().filter(|_| takes_level) {
            let level = if format == Some(ReasoningFormat::Harmony) { harmony_level(level) } else { level };
            said.push((LEVEL, level.into()));
        }
        if self.without == WithoutReasoning::Refuse && said.is_empty() && !takes_level && format.is_none() {
            let message = format!(
                "'{}' is not supported here, because this model's chat template has no reasoning; remove it",
                self.field
            );
            return Err(ApiError::bad_request("unsupported_parameter", message).of(self.field));
        }
        for (name, value) in said {
            variables.entry(name).or_insert(value);
        }
        Ok(())
    }
}

/// Returns the nearest level that gpt-oss was trained with; the model has no mode without reasoning.
fn harmony_level(level: &str) -> &str {
    match level {
        NONE | "minimal" => "low",
        "xhigh" => "high",
        known => known,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const HARMONY: &str = "{{ reasoning_effort }}<|channel|>analysis<|message|>";
    const QWEN: &str =
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}";

    fn said(value: &Value, template: &str) -> Result<Value, ApiError> {
        let mut fields = StrictFields::of(json!({ "think": value }), "the body")?;
        let effort = read_switch(&mut fields, "think")?.unwrap();
        let format = ReasoningFormat::of(settings::ReasoningParser::Auto, Some(template));
        let mut variables = Map::new();
        effort.apply_to_template(Some(template), format, &mut variables)?;
        Ok(variables.into())
    }

    #[test]
    fn a_template_is_told_what_it_asks_for() {
        for (value, template, effort) in [
            (json!(true), QWEN, json!({ "enable_thinking": true })),
            (json!(false), QWEN, json!({ "enable_thinking": false })),
            (json!("none"), QWEN, json!({ "enable_thinking": false })),
            (json!("high"), QWEN, json!({ "enable_thinking": true })),
            (json!("high"), "{{ reasoning_effort }}", json!({ "reasoning_effort": "high" })),
            (json!(true), "{{ reasoning_effort }}", json!({})),
            (json!(false), "{{ reasoning_effort }}", json!({ "reasoning_effort": "none" })),
            (json!(false), HARMONY, json!({ "reasoning_effort": "low" })),
            (json!("xhigh"), HARMONY, json!({ "reasoning_effort": "high" })),
            (json!("medium"), HARMONY, json!({ "reasoning_effort": "medium" })),
            (json!("low"), "{{ c.split('</think>') }}", json!({})),
            (json!(false), "{{ messages }}", json!({})),
        ] {
            assert_eq!(said(&value, template).unwrap(), effort, "{value} {template}");
        }
    }

    #[test]
    fn what_a_caller_says_to_the_template_itself_stays() {
        let mut fields = StrictFields::of(json!({ "reasoning_effort": "none" }), "the body").unwrap();
        let effort = read(&mut fields, "reasoning_effort").unwrap().unwrap();
        let mut variables = Map::from_iter([("enable_thinking".to_owned(), json!(true))]);
        effort.apply_to_template(Some(QWEN), None, &mut variables).unwrap();
        assert_eq!(variables["enable_thinking"], true);
    }

    #[test]
    fn thoughts_of_a_model_that_has_none_and_levels_that_are_none_are_refused() {
        for (value, template) in [(json!(true), "{{ messages }}"), (json!("very"), QWEN), (json!(3), QWEN)] {
            let error = format!("{:?}", said(&value, template).unwrap_err());
            assert!(error.contains("param: Some(\"think\")"), "{value}: {error}");
        }
    }
}
