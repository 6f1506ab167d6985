//! Small queries on schemas, and constructors of small schemas.

use serde_json::{Map, Value, json};

/// Names of the JSON types; an integer has two of them.
pub(super) const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Keywords that do not constrain a value.
const ANNOTATIONS: [&str; 17] = [
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$id",
    "id",
    "$anchor",
    "$defs",
    "definitions",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
];

pub(super) fn is_annotation(keyword: &str) -> bool {
    ANNOTATIONS.contains(&keyword) || keyword.starts_with("x-")
}

/// Returns the keywords of `map` that constrain a value.
pub(super) fn constraints(map: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    map.iter().filter(|(keyword, _)| !is_annotation(keyword))
}

/// True if `schema` evidently allows every value.
pub(super) fn allows_all(schema: &Value) -> bool {
    match schema {
        Value::Bool(allows) => *allows,
        Value::Object(map) => constraints(map).next().is_none(),
        _ => false,
    }
}

/// Returns the types that `type` names, or all types.
pub(super) fn types(map: &Map<String, Value>) -> Vec<&str> {
    match map.get("type") {
        Some(Value::String(only)) => vec![only],
        Some(Value::Array(some)) => some.iter().filter_map(Value::as_str).collect(),
        _ => TYPES.to_vec(),
    }
}

/// Whether the keyword `type` allows the type `wanted`.
pub(super) fn may_be(map: &Map<String, Value>, wanted: &str) -> bool {
    types(map).contains(&wanted)
}

/// Whether the keyword `type` allows only the type `wanted`.
pub(super) fn has_to_be(map: &Map<String, Value>, wanted: &str) -> bool {
    types(map).iter().all(|one| *one == wanted)
}

/// Returns a schema of all types except `left_out`.
pub(super) fn other_types(left_out: &[&str]) -> Value {
    let left: Vec<&str> =
        TYPES.into_iter().filter(|one| !left_out.contains(one) && *one != "integer").collect();
    json!({ "type": left })
}

/// Adds a further constraint by `allOf`.
pub(super) fn and(map: &mut Map<String, Value>, schema: Value) {
    if let Value::Array(all) = map.entry("allOf").or_insert_with(|| json!([])) {
        all.push(schema);
    }
}

/// Returns the conjunction of both schemas.
pub(super) fn both(first: Value, second: Value) -> Value {
    if allows_all(&second) {
        first
    } else if allows_all(&first) {
        second
    } else {
        json!({ "allOf": [first, second] })
    }
}

/// Adds the constraint that a value of the type `kind` conforms to one of `cases`, each of which states
/// that type.
pub(super) fn and_one_of(map: &mut Map<String, Value>, kind: &str, mut cases: Vec<Value>) {
    if !has_to_be(map, kind) {
        cases.push(other_types(&[kind]));
    }
    and(map, json!({ "anyOf": cases }));
}

/// Returns the values that `const` and `enum` allow, if one of them is present.
pub(super) fn listed(map: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (map.get("const"), map.get("enum")) {
        (Some(only), _) => Some(vec![only]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// Whether two values are equal in JSON Schema, where 1 equals 1.0.
pub(super) fn are_equal(first: &Value, second: &Value) -> bool {
    match (first.as_f64(), second.as_f64()) {
        (Some(first), Some(second)) => first.total_cmp(&second).is_eq(),
        _ => first == second,
    }
}

/// Returns the strings of the list under `keyword`.
pub(super) fn texts_in<'a>(map: &'a Map<String, Value>, keyword: &str) -> Vec<&'a str> {
    let list = map.get(keyword).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str).collect()
}

pub(super) fn count_in(map: &Map<String, Value>, keyword: &str) -> Option<usize> {
    usize::try_from(map.get(keyword)?.as_u64()?).ok()
}
