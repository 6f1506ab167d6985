//! Decides whether two schemas have no value in common.

use serde_json::{Map, Value};

use super::{
    patterns,
    references::Document,
    values::{TYPES, are_equal, count_in, listed, texts_in, types},
};

const MAX_DEPTH: usize = 8;

/// True if certainly no value conforms to both schemas.
pub(super) fn are_disjoint(first: &Value, second: &Value, document: &Document) -> bool {
    Comparison { document }.disjoint(first, second, MAX_DEPTH)
}

struct Comparison<'a> {
    document: &'a Document,
}

impl Comparison<'_> {
    fn disjoint(&self, first: &Value, second: &Value, depth: usize) -> bool {
        let Some(depth) = depth.checked_sub(1) else { return false };
        let (first, second) = (self.document.resolved(first), self.document.resolved(second));
        let (first, second) = match (first, second) {
            (Value::Object(first), Value::Object(second)) => (first, second),
            (first, second) => return *first == Value::Bool(false) || *second == Value::Bool(false),
        };
        self.by_parts(first, second, depth)
            || self.by_parts(second, first, depth)
            || self.by_values(first, second)
            || self.by_types(first, second, depth)
    }

    /// Whether each alternative of `first` excludes `second`, or one of its conjuncts does.
    fn by_parts(&self, first: &Map<String, Value>, second: &Map<String, Value>, depth: usize) -> bool {
        let second = Value::Object(second.clone());
        let choices = ["anyOf", "oneOf"].iter().filter_map(|keyword| first.get(*keyword)?.as_array());
        let excludes = |part: &Value| self.disjoint(part, &second, depth);
        let mut parts = first.get("allOf").and_then(Value::as_array).into_iter().flatten();
        let mut target = first.get("$ref").into_iter().map(|to| serde_json::json!({ "$ref": to }));
        let says_more = first.len() > 1;
        choices.into_iter().any(|choices| choices.iter().all(excludes))
            || parts.any(excludes)
            || says_more && target.any(|target| self.disjoint(&target, &second, depth))
    }

    fn by_values(&self, first: &Map<String, Value>, second: &Map<String, Value>) -> bool {
        match (listed(first), listed(second)) {
            (Some(first), Some(second)) => {
                !first.iter().any(|one| second.iter().any(|other| are_equal(one, other)))
            }
            (Some(values), None) => values.iter().all(|value| refuses(second, value)),
            (None, Some(values)) => values.iter().all(|value| refuses(first, value)),
            (None, None) => false,
        }
    }

    fn by_types(&self, first: &Map<String, Value>, second: &Map<String, Value>, depth: usize) -> bool {
        let (of_first, of_second) = (kinds(first), kinds(second));
        TYPES.iter().filter(|kind| of_first.contains(kind) && of_second.contains(kind)).all(
            |kind| match *kind {
                "object" => self.objects(first, second, depth) || self.objects(second, first, depth),
                "string" => texts(first, second) || texts(second, first),
                "integer" | "number" => is_below(first, second) || is_below(second, first),
                "array" => is_shorter(first, second, "array") || is_shorter(second, first, "array"),
                _ => false,
            },
        )
    }

    /// Whether `second` forbids a required property of `first`, or has a disjoint schema for it.
    fn objects(&self, first: &Map<String, Value>, second: &Map<String, Value>, depth: usize) -> bool {
        let of = |map: &'_ Map<String, Value>, name: &str| {
            map.get("properties").and_then(|all| all.get(name)).cloned()
        };
        texts_in(first, "required").into_iter().any(|name| {
            let is_closed = second.get("additionalProperties") == Some(&Value::Bool(false))
                && !second.contains_key("patternProperties");
            match (of(first, name), of(second, name)) {
                (_, None) => is_closed,
                (Some(first), Some(second)) => self.disjoint(&first, &second, depth),
                (None, Some(second)) => second == Value::Bool(false),
            }
        })
    }
}

/// Returns the types that `map` allows; integers also count as numbers.
fn kinds(map: &Map<String, Value>) -> Vec<&str> {
    let mut kinds = match listed(map) {
        Some(values) => values.into_iter().filter(|value| has_type(map, value)).map(kind_of).collect(),
        None => types(map),
    };
    if kinds.contains(&"number") && !kinds.contains(&"integer") {
        kinds.push("integer");
    }
    kinds
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// True if `map` certainly refuses `value`.
fn refuses(map: &Map<String, Value>, value: &Value) -> bool {
    let has_pattern = match (map.get("pattern").and_then(Value::as_str), value.as_str()) {
        (Some(pattern), Some(text)) => patterns::plain(pattern).is_err() || patterns::finds(pattern, text),
        _ => true,
    };
    !has_type(map, value) || !has_pattern
}

fn has_type(map: &Map<String, Value>, value: &Value) -> bool {
    let kind = kind_of(value);
    types(map).iter().any(|one| *one == kind || (kind == "number" && *one == "integer"))
}

fn texts(first: &Map<String, Value>, second: &Map<String, Value>) -> bool {
    let pattern = |map: &Map<String, Value>| map.get("pattern").and_then(Value::as_str).map(str::to_owned);
    let by_pattern = match (pattern(first), pattern(second)) {
        (Some(first), Some(second)) => patterns::exclude_each_other(&first, &second),
        _ => false,
    };
    by_pattern || is_shorter(first, second, "string")
}

fn is_shorter(first: &Map<String, Value>, second: &Map<String, Value>, kind: &str) -> bool {
    let (least, most) = if kind == "array" { ("minItems", "maxItems") } else { ("minLength", "maxLength") };
    matches!((count_in(first, most), count_in(second, least)), (Some(most), Some(least)) if most < least)
}

fn is_below(first: &Map<String, Value>, second: &Map<String, Value>) -> bool {
    let number = |map: &Map<String, Value>, keyword: &str| map.get(keyword).and_then(Value::as_f64);
    let meets = |most: &str, least: &str| number(first, most).zip(number(second, least));
    meets("maximum", "minimum").is_some_and(|(most, least)| most < least)
        || [
            ("maximum", "exclusiveMinimum"),
            ("exclusiveMaximum", "minimum"),
            ("exclusiveMaximum", "exclusiveMinimum"),
        ]
        .into_iter()
        .any(|(most, least)| meets(most, least).is_some_and(|(most, least)| most <= least))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_are_told_apart_by_types_values_tags_patterns_and_bounds() {
        let tagged = |tag: &str| json!({ "type": "object", "properties": { "kind": { "const": tag } }, "required": ["kind"] });
        let document = Document::new(&json!({ "$defs": { "a": tagged("a"), "b": tagged("b") } }));
        for (first, second, disjoint) in [
            (json!({ "type": "string" }), json!({ "type": ["null", "array"] }), true),
            (json!({ "type": "integer" }), json!({ "type": "number" }), false),
            (json!({ "enum": [1, "a"] }), json!({ "const": 1.0 }), false),
            (json!({ "enum": ["b", "a"] }), json!({ "const": "c" }), true),
            (json!({ "$ref": "#/$defs/a" }), json!({ "$ref": "#/$defs/b" }), true),
            (json!({ "$ref": "#/$defs/a" }), json!({ "$ref": "#/$defs/a" }), false),
            (
                json!({ "$ref": "#/$defs/a" }),
                json!({ "anyOf": [{ "type": "null" }, { "$ref": "#/$defs/b" }] }),
                true,
            ),
            (
                json!({ "type": "string", "pattern": "^a" }),
                json!({ "type": "string", "pattern": "^b" }),
                true,
            ),
            (json!({ "type": "string", "pattern": "^a" }), json!({ "enum": ["b", 1] }), true),
            (
                json!({ "type": "integer", "maximum": 3 }),
                json!({ "type": "number", "exclusiveMinimum": 3 }),
                true,
            ),
            (
                json!({ "type": "object", "required": ["a"] }),
                json!({ "type": "object", "properties": {}, "additionalProperties": false }),
                true,
            ),
            (
                json!({ "type": "object", "required": ["a"] }),
                json!({ "type": "object", "required": ["b"] }),
                false,
            ),
            (json!({}), json!({ "type": "null" }), false),
        ] {
            assert_eq!(are_disjoint(&first, &second, &document), disjoint, "{first} {second}");
            assert_eq!(are_disjoint(&second, &first, &document), disjoint, "{second} {first}");
        }
    }
}
