//! Reads a JSON body field by field.
//!
//! Each field is taken with its required type and range, so an error names the field. A field that is left at
//! the end is refused by name, unless its value asks for nothing.

use std::ops::RangeInclusive;

use model_files::strict_json::{self, StrictJsonError};
use serde_json::{Map, Value};

use crate::errors::ApiError;

/// Labels for the caller's own records: labels change nothing, and the tenant comes from the API key alone.
const LABELS: [&str; 3] = ["user", "safety_identifier", "prompt_cache_key"];

/// Values that ask for nothing, of fields that this server does not have. `null`, `[]`, `{}` and `""` never
/// ask for anything, except in [`ASKS_WHEN_EMPTY`].
const NEUTRAL: &[(&str, &str)] = &[
    ("best_of", "1"),
    // Without tools, these values change nothing.
    ("tool_choice", r#""none""#),
    ("tool_choice", r#""auto""#),
    ("parallel_tool_calls", "true"),
    ("parallel_tool_calls", "false"),
    ("function_call", r#""none""#),
    ("function_call", r#""auto""#),
    ("modalities", r#"["text"]"#),
    ("background", "false"),
    ("truncation", r#""disabled""#),
    ("think", "false"),
    ("store", "false"),
    ("service_tier", r#""auto""#),
    ("service_tier", r#""default""#),
    ("service_tier", r#""standard_only""#),
    ("speed", r#""standard""#),
    ("use_beam_search", "false"),
    ("skip_special_tokens", "true"),
    ("include_stop_str_in_output", "false"),
    ("add_generation_prompt", "true"),
    ("continue_final_message", "false"),
    ("reasoning_effort", r#""none""#),
    ("verbosity", r#""medium""#),
    ("echo", "false"),
    ("cache_prompt", "true"),
    ("length_penalty", "1"),
    ("length_penalty", "1.0"),
    ("early_stopping", "false"),
    ("spaces_between_special_tokens", "true"),
    ("return_token_ids", "false"),
    ("receipt", "false"),
    // Ollama's options.
    ("mirostat", "0"),
    ("tfs_z", "1"),
    ("tfs_z", "1.0"),
    ("typical_p", "1"),
    ("typical_p", "1.0"),
];

/// Fields whose presence alone asks for something.
const ASKS_WHEN_EMPTY: &[&str] = &["web_search_options"];

#[cfg(test)]
std::thread_local! {
    /// Every field that parsers looked up on this thread, which tests compare with the documented fields.
    pub(crate) static TAKEN: std::cell::RefCell<std::collections::BTreeSet<String>> = const {
        std::cell::RefCell::new(std::collections::BTreeSet::new())
    };
}

/// The fields of an object that are not read yet.
#[derive(Debug)]
pub struct StrictFields {
    map: Map<String, Value>,
}

impl StrictFields {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::of(strict_json::parse(body).map_err(no_json)?, "the body")
    }

    /// Reads the fields of `value`, which must be an object; `what` names the value in errors.
    pub fn of(value: Value, what: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map }),
            other => {
                Err(ApiError::invalid(what, format!("{what} must be a JSON object, not {}", kind(&other))))
            }
        }
    }

    /// Takes a field; `null` counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        #[cfg(test)]
        TAKEN.with_borrow_mut(|taken| taken.insert(name.to_owned()));
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Returns a field without taking it.
    #[must_use]
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_f64() {
            // Options are single precision on the wire; the range keeps the conversion finite.
            #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
            Some(number) if range.contains(&number) => Ok(Some(number as f32)),
            _ => Err(wrong(name, &format!("a number from {} to {}", range.start(), range.end()), &value)),
        }
    }

    pub(crate) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match whole(&value).and_then(|number| i64::try_from(number).ok()) {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(wrong(name, &format!("an integer from {} to {}", range.start(), range.end()), &value)),
        }
    }

    pub fn count(&mut self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let number = self.integer(name, i64::from(*range.start())..=i64::from(*range.end()))?;
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }

    /// Takes a boolean; an absent field has a meaning of its own.
    pub(crate) fn optional_flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(name, "true or false", &other)),
        }
    }

    pub fn flag(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(wrong(name, "true or false", &other)),
        }
    }

    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(name, "a string", &other)),
        }
    }

    /// Takes a required, non-empty string.
    pub(crate) fn required_text(&mut self, name: &str) -> Result<String, ApiError> {
        match self.text(name)? {
            Some(text) if !text.is_empty() => Ok(text),
            _ => Err(ApiError::missing(name, format!("'{name}' is required and must be a non-empty string"))),
        }
    }

    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(name, "an array", &other)),
        }
    }

    /// Takes the caller's labels, of which only the types are checked.
    pub fn labels(&mut self) -> Result<(), ApiError> {
        for name in LABELS {
            self.text(name)?;
        }
        for name in ["metadata", "client_metadata"] {
            match self.take(name) {
                None | Some(Value::Object(_)) => {}
                Some(other) => return Err(wrong(name, "an object", &other)),
            }
        }
        Ok(())
    }

    /// Drops fields that clients add for themselves and that change no answer.
    pub(crate) fn inert(&mut self, names: &[&str]) {
        for name in names {
            self.map.remove(*name);
        }
    }

    /// Fails if a remaining field asks for something.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(name, value)| !is_neutral(name, value)) {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::unsupported(name)),
        }
    }
}

fn no_json(error: StrictJsonError) -> ApiError {
    let refusal = ApiError::bad_request("invalid_json", format!("the body is not valid JSON: {error}"));
    match error.repeated {
        Some(name) => refusal.of(&name),
        None => refusal,
    }
}

/// Returns the error for a field of wrong type or range.
pub(crate) fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::invalid(name, format!("'{name}' must be {expected}, not {}", excerpt(found)))
}

/// Largest integer up to which every integer has a distinct double.
const MAX_EXACT: f64 = 9_007_199_254_740_991.0;

/// Returns the integer that `value` is; as in JSON Schema, `16.0` is an integer.
#[must_use]
pub(crate) fn whole(value: &Value) -> Option<i128> {
    if let Some(number) = value.as_i64() {
        return Some(number.into());
    }
    if let Some(number) = value.as_u64() {
        return Some(number.into());
    }
    let number = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= MAX_EXACT)?;
    #[expect(clippy::cast_possible_truncation, reason = "the number is whole and within the exact range")]
    Some(number as i128)
}

/// Returns a token id below `vocab_size`; `name` is the field's name for the error.
pub(crate) fn token_id(name: &str, value: &Value, vocab_size: u32) -> Result<u32, ApiError> {
    let id = whole(value).and_then(|id| u32::try_from(id).ok()).filter(|id| *id < vocab_size);
    id.ok_or_else(|| wrong(name, &format!("token ids from 0 to {}", vocab_size.saturating_sub(1)), value))
}

fn excerpt(value: &Value) -> String {
    match value {
        Value::Number(_) | Value::Bool(_) => value.to_string(),
        other => kind(other).to_owned(),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn is_neutral(name: &str, value: &Value) -> bool {
    let empty = match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    let is = |neutral: &str| neutral.parse::<Value>().is_ok_and(|neutral| neutral == *value);
    if ASKS_WHEN_EMPTY.contains(&name) {
        return value.is_null();
    }
    empty || NEUTRAL.iter().any(|(field, neutral)| *field == name && is(neutral))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> StrictFields {
        StrictFields::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_field_nobody_read_is_refused_by_name() {
        let error = fields(r#"{"functions":[{"name":"f"}]}"#).finish().unwrap_err();
        assert_eq!(error, ApiError::unsupported("functions"));
    }

    #[test]
    fn a_field_that_asks_for_nothing_is_not_refused() {
        let body = r#"{"functions":[],"suffix":null,"best_of":1,"modalities":["text"],"logit_bias":{}}"#;
        fields(body).finish().unwrap();
    }

    #[test]
    fn a_field_that_asks_by_being_there_is_refused_by_name() {
        fields(r#"{"web_search_options":null}"#).finish().unwrap();
        let error = fields(r#"{"web_search_options":{}}"#).finish().unwrap_err();
        assert_eq!(error, ApiError::unsupported("web_search_options"));
    }

    #[test]
    fn a_number_out_of_range_names_its_field_and_the_range() {
        let error = fields(r#"{"temperature":3}"#).number("temperature", 0.0..=2.0).unwrap_err();
        assert_eq!(
            error,
            ApiError::invalid("temperature", "'temperature' must be a number from 0 to 2, not 3")
        );
    }

    #[test]
    fn a_number_without_a_fraction_is_whole_however_it_is_written() {
        for (written, number) in [("16", 16), ("16.0", 16), ("1.6e1", 16), ("-1.0", -1), ("0.0", 0)] {
            let mut fields = fields(&format!("{{\"n\":{written}}}"));
            assert_eq!(fields.integer("n", -1..=100).unwrap(), Some(number), "{written}");
        }
        for written in ["6000.5", "1e300", "1e17", "\"16\"", "true"] {
            let mut fields = fields(&format!("{{\"n\":{written}}}"));
            let error = fields.integer("n", i64::MIN..=i64::MAX).unwrap_err();
            assert_eq!(error.code(), "invalid_value", "{written}");
        }
        assert_eq!(token_id("stop_token_ids", &serde_json::json!(5.0), 300).unwrap(), 5);
        token_id("stop_token_ids", &serde_json::json!(5.5), 300).unwrap_err();
    }

    #[test]
    fn null_is_the_same_as_absent() {
        let mut fields = fields(r#"{"n":null}"#);
        assert_eq!(fields.count("n", 1..=16).unwrap(), None);
        fields.finish().unwrap();
    }
}
