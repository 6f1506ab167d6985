//! JSON schema validator, written from the specification alone, for the schemas of `structure`.

use serde_json::{Map, Value};

const MAX_DEPTH: usize = 64;

/// Whether `value` conforms to the schema; `None` if the schema has an unsupported keyword.
pub(crate) fn keeps_to(root: &Value, value: &Value) -> Option<bool> {
    Validator { root }.keeps(root, value, MAX_DEPTH)
}

struct Validator<'a> {
    root: &'a Value,
}

impl Validator<'_> {
    fn keeps(&self, schema: &Value, value: &Value, depth: usize) -> Option<bool> {
        let depth = depth.checked_sub(1)?;
        let Value::Object(map) = schema else { return schema.as_bool() };
        let mut keeps = true;
        for (keyword, said) in map {
            keeps &= match keyword.as_str() {
                "allOf" | "anyOf" | "oneOf" => {
                    let verdicts = said.as_array()?.iter().map(|one| self.keeps(one, value, depth));
                    let holding = verdicts.collect::<Option<Vec<bool>>>()?;
                    let count = holding.iter().filter(|holds| **holds).count();
                    match keyword.as_str() {
                        "allOf" => count == holding.len(),
                        "anyOf" => count > 0,
                        _ => count == 1,
                    }
                }
                "not" => !self.keeps(said, value, depth)?,
                "if" => {
                    let branch = if self.keeps(said, value, depth)? { "then" } else { "else" };
                    map.get(branch).map_or(Some(true), |branch| self.keeps(branch, value, depth))?
                }
                "then" | "else" | "$defs" | "$schema" | "title" | "description" | "default" | "examples" => {
                    true
                }
                "$ref" => self.keeps(self.root.pointer(said.as_str()?.strip_prefix('#')?)?, value, depth)?,
                "type" => match said {
                    Value::Array(kinds) => {
                        kinds.iter().any(|kind| kind.as_str().is_some_and(|kind| is(value, kind)))
                    }
                    kind => is(value, kind.as_str()?),
                },
                "const" => are_equal(said, value),
                "enum" => said.as_array()?.iter().any(|one| are_equal(one, value)),
                _ => match value {
                    Value::Object(object) => self.object((keyword, said), map, object, depth)?,
                    Value::Array(items) => self.array((keyword, said), map, items, depth)?,
                    Value::String(text) => of_text((keyword, said), text)?,
                    Value::Number(_) => of_number((keyword, said), value)?,
                    Value::Null | Value::Bool(_) => true,
                },
            };
        }
        Some(keeps)
    }

    fn object(
        &self,
        (keyword, said): (&str, &Value),
        map: &Map<String, Value>,
        object: &Map<String, Value>,
        depth: usize,
    ) -> Option<bool> {
        let named = |keyword: &str| map.get(keyword).and_then(Value::as_object);
        let has_all = |names: &Value| {
            Some(
                names
                    .as_array()?
                    .iter()
                    .all(|name| name.as_str().is_some_and(|name| object.contains_key(name))),
            )
        };
        let mut keeps = true;
        match keyword {
            "required" => keeps = has_all(said)?,
            "properties" => {
                for (name, schema) in said.as_object()? {
                    keeps &= object.get(name).map_or(Some(true), |value| self.keeps(schema, value, depth))?;
                }
            }
            "patternProperties" => {
                for (pattern, schema) in said.as_object()? {
                    for (name, value) in object {
                        keeps &= !finds(pattern, name)? || self.keeps(schema, value, depth)?;
                    }
                }
            }
            "additionalProperties" => {
                for (name, value) in object {
                    let by_pattern = named("patternProperties").into_iter().flat_map(Map::keys);
                    let is_known = named("properties").is_some_and(|all| all.contains_key(name))
                        || by_pattern
                            .map(|pattern| finds(pattern, name))
                            .collect::<Option<Vec<_>>>()?
                            .contains(&true);
                    keeps &= is_known || self.keeps(said, value, depth)?;
                }
            }
            "propertyNames" => {
                for name in object.keys() {
                    keeps &= self.keeps(said, &Value::from(name.as_str()), depth)?;
                }
            }
            "dependentRequired" => {
                for (name, others) in said.as_object()? {
                    keeps &= !object.contains_key(name) || has_all(others)?;
                }
            }
            "minProperties" => keeps = object.len() as u64 >= said.as_u64()?,
            "maxProperties" => keeps = object.len() as u64 <= said.as_u64()?,
            other => return is_of_other_types(other),
        }
        Some(keeps)
    }

    fn array(
        &self,
        (keyword, said): (&str, &Value),
        map: &Map<String, Value>,
        items: &[Value],
        depth: usize,
    ) -> Option<bool> {
        let mut keeps = true;
        match keyword {
            "items" => {
                let first = map.get("prefixItems").and_then(Value::as_array).map_or(0, Vec::len);
                for item in items.iter().skip(first) {
                    keeps &= self.keeps(said, item, depth)?;
                }
            }
            "prefixItems" => {
                for (schema, item) in said.as_array()?.iter().zip(items) {
                    keeps &= self.keeps(schema, item, depth)?;
                }
            }
            "uniqueItems" => {
                let is_new =
                    |(index, item): (usize, &Value)| !items[..index].iter().any(|one| are_equal(one, item));
                keeps = *said == Value::Bool(false) || items.iter().enumerate().all(is_new);
            }
            "minItems" => keeps = items.len() as u64 >= said.as_u64()?,
            "maxItems" => keeps = items.len() as u64 <= said.as_u64()?,
            other => return is_of_other_types(other),
        }
        Some(keeps)
    }
}

fn of_text((keyword, said): (&str, &Value), text: &str) -> Option<bool> {
    let letters = text.chars().count() as u64;
    match keyword {
        "minLength" => Some(letters >= said.as_u64()?),
        "maxLength" => Some(letters <= said.as_u64()?),
        "pattern" => finds(said.as_str()?, text),
        other => is_of_other_types(other),
    }
}

fn of_number((keyword, said): (&str, &Value), value: &Value) -> Option<bool> {
    let (least, number) = (said.as_f64()?, value.as_f64()?);
    let order = match (whole(said), whole(value)) {
        (Some(bound), Some(number)) => number.cmp(&bound),
        _ => number.total_cmp(&least),
    };
    Some(match keyword {
        "minimum" => order.is_ge(),
        "maximum" => order.is_le(),
        "exclusiveMinimum" => order.is_gt(),
        "exclusiveMaximum" => order.is_lt(),
        "multipleOf" => match (whole(said), whole(value)) {
            (Some(step), Some(number)) => step != 0 && number % step == 0,
            _ => ((number / least).round() * least - number).abs() <= number.abs() * 1e-9,
        },
        other => return is_of_other_types(other),
    })
}

fn whole(value: &Value) -> Option<i128> {
    value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from))
}

fn is(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

fn are_equal(first: &Value, second: &Value) -> bool {
    match (first, second) {
        (Value::Number(_), Value::Number(_)) => match (whole(first), whole(second)) {
            (Some(first), Some(second)) => first == second,
            _ => first.as_f64() == second.as_f64(),
        },
        (Value::Array(first), Value::Array(second)) => {
            first.len() == second.len() && first.iter().zip(second).all(|(one, other)| are_equal(one, other))
        }
        (Value::Object(first), Value::Object(second)) => {
            let has =
                |(name, one): (&String, &Value)| second.get(name).is_some_and(|other| are_equal(one, other));
            first.len() == second.len() && first.iter().all(has)
        }
        _ => first == second,
    }
}

/// Whether a keyword constrains only values of another type.
fn is_of_other_types(keyword: &str) -> Option<bool> {
    const KNOWN: [&str; 21] = [
        "required",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "dependentRequired",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "uniqueItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ];
    KNOWN.contains(&keyword).then_some(true)
}

/// Whether a pattern matches; `None` if unknown. Uses the syntax of `regex` where possible, which reads
/// nested repetitions and white space in braces differently from the engine with look-around.
pub(crate) fn finds(pattern: &str, text: &str) -> Option<bool> {
    match regex::Regex::new(pattern) {
        Ok(plain) => Some(plain.is_match(text)),
        Err(regex::Error::CompiledTooBig(_)) => None,
        Err(_) => fancy_regex::Regex::new(pattern).ok()?.is_match(text).ok(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keywords_say_what_the_specification_says() {
        let tree = json!({ "$ref": "#/$defs/n", "$defs": { "n": { "type": "object", "properties": { "c": { "items": { "$ref": "#/$defs/n" } } }, "additionalProperties": false } } });
        for (schema, value, verdict) in [
            (json!({ "type": ["integer", "null"] }), json!(1.0), Some(true)),
            (json!({ "type": "integer", "multipleOf": 5 }), json!(12), Some(false)),
            (json!({ "multipleOf": 0.01 }), json!(1.15), Some(true)),
            (json!({ "oneOf": [{ "minimum": 1 }, { "maximum": 5 }] }), json!(3), Some(false)),
            (
                json!({ "if": { "type": "string" }, "then": { "minLength": 2 }, "else": false }),
                json!("a"),
                Some(false),
            ),
            (
                json!({ "patternProperties": { "^a": { "type": "null" } }, "additionalProperties": false }),
                json!({ "b": 1 }),
                Some(false),
            ),
            (json!({ "dependentRequired": { "a": ["b"] } }), json!({ "a": 1 }), Some(false)),
            (json!({ "prefixItems": [true], "items": false, "uniqueItems": true }), json!([1]), Some(true)),
            (json!({ "uniqueItems": true }), json!([1, 1.0]), Some(false)),
            (json!({ "format": "date" }), json!("x"), None),
            (tree.clone(), json!({ "c": [{ "c": [] }] }), Some(true)),
            (tree, json!({ "c": [{ "d": 1 }] }), Some(false)),
        ] {
            assert_eq!(keeps_to(&schema, &value), verdict, "{schema} {value}");
        }
    }
}
