//! Small questions about a schema, and small schemas.

use serde_json::{Map, Value, json};

/// Types of JSON values. A number that is whole is of two.
pub(super) const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Keywords that say nothing about a value.
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

/// Whether `keyword` says nothing about a value.
pub(super) fn is_annotation(keyword: &str) -> bool {
    ANNOTATIONS.contains(&keyword) || keyword.starts_with("x-")
}

/// What `map` says about a value.
pub(super) fn constraints(map: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    map.iter().filter(|(keyword, _)| !is_annotation(keyword))
}

/// Whether `schema` allows everything, seen at once.
pub(super) fn allows_all(schema: &Value) -> bool {
    match schema {
        Value::Bool(allows) => *allows,
        Value::Object(map) => constraints(map).next().is_none(),
        _ => false,
    }
}

/// The types that `type` names, or all.
pub(super) fn types(map: &Map<String, Value>) -> Vec<&str> {
    match map.get("type") {
        Some(Value::String(only)) => vec![only],
        Some(Value::Array(some)) => some.iter().filter_map(Value::as_str).collect(),
        _ => TYPES.to_vec(),
    }
}

/// Whether `type` leaves values of this type.
pub(super) fn may_be(map: &Map<String, Value>, wanted: &str) -> bool {
    types(map).contains(&wanted)
}

/// Whether a value has to be of this type.
pub(super) fn has_to_be(map: &Map<String, Value>, wanted: &str) -> bool {
    types(map).iter().all(|one| *one == wanted)
}

/// A schema of all types but `type`.
pub(super) fn other_types(left_out: &[&str]) -> Value {
    let left: Vec<&str> =
        TYPES.into_iter().filter(|one| !left_out.contains(one) && *one != "integer").collect();
    json!({ "type": left })
}

/// Adds what else a value has to keep to.
pub(super) fn and(map: &mut Map<String, Value>, schema: Value) {
    if let Value::Array(all) = map.entry("allOf").or_insert_with(|| json!([])) {
        all.push(schema);
    }
}

/// What keeps to both schemas.
pub(super) fn both(first: Value, second: Value) -> Value {
    if allows_all(&second) {
        first
    } else if allows_all(&first) {
        second
    } else {
        json!({ "allOf": [first, second] })
    }
}

/// Adds that a value of the type `kind` keeps to one of `cases`, each of which says that type.
pub(super) fn and_one_of(map: &mut Map<String, Value>, kind: &str, mut cases: Vec<Value>) {
    if !has_to_be(map, kind) {
        cases.push(other_types(&[kind]));
    }
    and(map, json!({ "anyOf": cases }));
}

/// The values that `const` and `enum` leave, if either is there.
pub(super) fn listed(map: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (map.get("const"), map.get("enum")) {
        (Some(only), _) => Some(vec![only]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// Whether two values are the same to JSON Schema, to which 1 is 1.0.
pub(super) fn are_equal(first: &Value, second: &Value) -> bool {
    match (first.as_f64(), second.as_f64()) {
        (Some(first), Some(second)) => first.total_cmp(&second).is_eq(),
        _ => first == second,
    }
}

/// Texts in the list under `keyword`.
pub(super) fn texts_in<'a>(map: &'a Map<String, Value>, keyword: &str) -> Vec<&'a str> {
    let list = map.get(keyword).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str).collect()
}

/// A count under `keyword`.
pub(super) fn count_in(map: &Map<String, Value>, keyword: &str) -> Option<usize> {
    usize::try_from(map.get(keyword)?.as_u64()?).ok()
}
