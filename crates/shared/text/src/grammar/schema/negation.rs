//! Computes the schema of all values that another schema refuses.

use serde_json::{Map, Value, json};

use super::{
    patterns,
    values::{TYPES, allows_all, constraints, listed, other_types},
};

/// Maximum depth of a schema that is negated.
const MAX_DEPTH: usize = 8;
/// Maximum number of strings or numbers that are excluded.
const MAX_LEFT_OUT: usize = 64;

/// Returns the negation of `schema`; `None` if the supported keywords cannot express it.
pub(super) fn negated(schema: &Value) -> Option<Value> {
    within(schema, MAX_DEPTH)
}

fn within(schema: &Value, depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    if allows_all(schema) {
        return Some(Value::Bool(false));
    }
    let Value::Object(map) = schema else { return schema.as_bool().map(|allows| Value::Bool(!allows)) };
    // A value is refused if at least one keyword refuses it.
    let cases: Option<Vec<Value>> =
        constraints(map).map(|(keyword, value)| of_keyword(keyword, value, depth)).collect();
    let cases = cases?;
    Some(match <[Value; 1]>::try_from(cases) {
        Ok([only]) => only,
        Err(cases) => json!({ "anyOf": cases }),
    })
}

fn of_keyword(keyword: &str, value: &Value, depth: usize) -> Option<Value> {
    let all = |value: &Value| -> Option<Vec<Value>> {
        value.as_array()?.iter().map(|schema| within(schema, depth)).collect()
    };
    Some(match keyword {
        "type" => other_than(value)?,
        "const" | "enum" => none_of(&listed(&Map::from_iter([(keyword.to_owned(), value.clone())]))?)?,
        "not" => value.clone(),
        "anyOf" => json!({ "allOf": all(value)? }),
        "allOf" => json!({ "anyOf": all(value)? }),
        "required" => {
            let without =
                |name: &Value| Some(json!({ "type": "object", "properties": { name.as_str()?: false } }));
            let cases: Option<Vec<Value>> = value.as_array()?.iter().map(without).collect();
            json!({ "anyOf": cases? })
        }
        "properties" => {
            let other = |(name, schema): (&String, &Value)| {
                let other = within(schema, depth)?;
                Some(json!({ "type": "object", "properties": { name.as_str(): other }, "required": [name] }))
            };
            let cases: Option<Vec<Value>> = value.as_object()?.iter().map(other).collect();
            json!({ "anyOf": cases? })
        }
        "minimum" => json!({ "type": "number", "exclusiveMaximum": value.as_f64().map(|_| value)? }),
        "maximum" => json!({ "type": "number", "exclusiveMinimum": value.as_f64().map(|_| value)? }),
        "exclusiveMinimum" => json!({ "type": "number", "maximum": value.as_f64().map(|_| value)? }),
        "exclusiveMaximum" => json!({ "type": "number", "minimum": value.as_f64().map(|_| value)? }),
        "minLength" => fewer("string", "maxLength", value)?,
        "minItems" => fewer("array", "maxItems", value)?,
        "minProperties" => fewer("object", "maxProperties", value)?,
        "maxLength" => json!({ "type": "string", "minLength": value.as_u64()?.checked_add(1)? }),
        "maxItems" => json!({ "type": "array", "minItems": value.as_u64()?.checked_add(1)? }),
        "maxProperties" => json!({ "type": "object", "minProperties": value.as_u64()?.checked_add(1)? }),
        _ => return None,
    })
}

fn fewer(kind: &str, keyword: &str, least: &Value) -> Option<Value> {
    Some(match least.as_u64()?.checked_sub(1) {
        None => Value::Bool(false),
        Some(most) => json!({ "type": kind, keyword: most }),
    })
}

/// Returns all other types; `None` for integers alone, because non-integer numbers have no type.
fn other_than(types: &Value) -> Option<Value> {
    let types: Vec<&str> = match types {
        Value::String(only) => vec![only],
        Value::Array(some) => some.iter().filter_map(Value::as_str).collect(),
        _ => return None,
    };
    let has_whole_numbers_alone = types.contains(&"integer") && !types.contains(&"number");
    (!has_whole_numbers_alone && types.iter().all(|kind| TYPES.contains(kind))).then(|| other_types(&types))
}

/// Returns a schema of all values except `values`.
fn none_of(values: &[&Value]) -> Option<Value> {
    if values.len() > MAX_LEFT_OUT {
        return None;
    }
    let texts: Vec<&str> = values.iter().filter_map(|value| value.as_str()).collect();
    let mut all = Vec::new();
    if !texts.is_empty() {
        all.push(json!({ "pattern": patterns::all_but(&texts) }));
    }
    for value in values {
        match value {
            Value::String(_) => {}
            Value::Null => all.push(other_types(&["null"])),
            Value::Bool(left_out) => all.push(json!({ "anyOf": [other_types(&["boolean"]), { "const": !left_out }] })),
            Value::Number(number) => all.push(
                json!({ "anyOf": [other_types(&["number"]), { "type": "number", "exclusiveMaximum": number }, { "type": "number", "exclusiveMinimum": number }] }),
            ),
            Value::Array(items) if items.is_empty() => {
                all.push(json!({ "anyOf": [other_types(&["array"]), { "type": "array", "minItems": 1 }] }));
            }
            Value::Array(_) | Value::Object(_) => return None,
        }
    }
    Some(json!({ "allOf": all }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_turned_around_says_each_case() {
        for (schema, turned) in [
            (json!({}), json!(false)),
            (json!({ "title": "all" }), json!(false)),
            (
                json!({ "type": ["string", "null"] }),
                json!({ "type": ["boolean", "number", "array", "object"] }),
            ),
            (json!({ "not": { "minimum": 1 } }), json!({ "minimum": 1 })),
            (
                json!({ "properties": { "a": { "minimum": 1 } }, "required": ["a"] }),
                json!({ "anyOf": [
                    { "anyOf": [{ "type": "object", "properties": { "a": { "type": "number", "exclusiveMaximum": 1 } }, "required": ["a"] }] },
                    { "anyOf": [{ "type": "object", "properties": { "a": false } }] },
                ] }),
            ),
        ] {
            assert_eq!(negated(&schema), Some(turned), "{schema}");
        }
        for schema in
            [json!({ "type": "integer" }), json!({ "pattern": "a" }), json!({ "const": { "a": 1 } })]
        {
            assert_eq!(negated(&schema), None, "{schema}");
        }
    }
}
