//! What becomes of a schema before the library sees it.

use serde_json::{Map, Value, json};

use super::GrammarError;

/// White space between two parts of a JSON text: enough to indent it, and an end to it.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// Largest `multipleOf`: the library counts remainders in 32 bits.
pub(super) const MAX_MULTIPLE: f64 = 1e6;

/// What a schema may say to the library and not to us: it would take back what is promised of every schema.
pub(super) const LIBRARY_OPTIONS: &str = "x-guidance";

/// Formats that say what a text is for, and that any text has: as Pydantic and OpenAPI write them.
const ANY_TEXT: [&str; 5] = ["path", "file-path", "directory-path", "password", "binary"];

/// Smallest bound of integers: the library turns its sign in 64 bits, of which this is the last that a float holds. What is bounded by less
/// keeps to less.
const MIN_INTEGER: i64 = -(i64::MAX - 1023);

/// Keywords whose values are no schemas and hold none.
const NO_SCHEMAS: [&str; 4] = ["const", "enum", "default", "examples"];

/// A schema as a rule's part of Lark.
///
/// # Errors
/// It sets the library's own options.
pub fn lark_json(schema: &Value) -> Result<String, GrammarError> {
    Ok(format!("%json {}", prepared(schema)?))
}

/// `schema` with an end to white space: an answer of it always gets on. And without what any answer keeps to.
pub(super) fn prepared(schema: &Value) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    if let Value::Object(map) = &mut schema {
        if map.contains_key(LIBRARY_OPTIONS) {
            return Err(GrammarError::LibraryOptions);
        }
        read(map)?;
        map.insert(LIBRARY_OPTIONS.to_owned(), json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    Ok(schema)
}

/// Refuses a step of numbers that is too large, and takes away what anything keeps to, wherever in the schema it stands.
fn read(map: &mut Map<String, Value>) -> Result<(), GrammarError> {
    let multiple = map.get("multipleOf").and_then(Value::as_f64);
    if multiple.is_some_and(|multiple| multiple > MAX_MULTIPLE) {
        return Err(GrammarError::Multiple);
    }
    if map.get("format").and_then(Value::as_str).is_some_and(|format| ANY_TEXT.contains(&format)) {
        map.remove("format");
    }
    if map.get("uniqueItems") == Some(&Value::Bool(false)) {
        map.remove("uniqueItems");
    }
    if map.get("type") == Some(&Value::from("integer")) {
        for key in ["minimum", "exclusiveMinimum"] {
            if let Some(bound) = map.get_mut(key)
                && bound.as_f64().is_some_and(|bound| bound < MIN_INTEGER as f64)
            {
                *bound = MIN_INTEGER.into();
            }
        }
    }
    let inner = map.iter_mut().filter(|(key, _)| !NO_SCHEMAS.contains(&key.as_str()));
    inner.map(|(_, value)| value).try_for_each(within)
}

fn within(value: &mut Value) -> Result<(), GrammarError> {
    match value {
        Value::Array(items) => items.iter_mut().try_for_each(within),
        Value::Object(map) => read(map),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_anything_keeps_to_is_taken_away_and_nothing_else() {
        let schema = json!({
            "properties": {
                "list": { "type": "array", "uniqueItems": true },
                "format": { "type": "string", "format": "password" },
                "when": { "type": "string", "format": "date" },
                "like": { "const": { "format": "path" } },
            },
        });
        let mut prepared = prepared(&schema).unwrap();
        prepared.as_object_mut().unwrap().remove(LIBRARY_OPTIONS);
        let mut expected = schema;
        expected["properties"]["format"].as_object_mut().unwrap().remove("format");
        assert_eq!(prepared, expected);
    }

    #[test]
    fn integers_of_64_bits_have_a_bound_that_the_library_takes() {
        let schema =
            json!({ "type": "integer", "minimum": i64::MIN, "maximum": i64::MAX, "uniqueItems": false });
        let prepared = prepared(&schema).unwrap();
        assert_eq!(prepared["minimum"], MIN_INTEGER);
        assert_eq!(prepared["maximum"], i64::MAX);
        assert!(prepared.get("uniqueItems").is_none());
    }

    #[test]
    fn a_step_that_is_too_large_is_refused_wherever_it_stands() {
        let schema = json!({ "anyOf": [{ "items": { "multipleOf": 1e7 } }] });
        assert_eq!(prepared(&schema), Err(GrammarError::Multiple));
        assert!(prepared(&json!({ "default": { "multipleOf": 1e7 } })).is_ok());
    }
}
