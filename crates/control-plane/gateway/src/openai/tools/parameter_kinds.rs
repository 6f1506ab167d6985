//! Functions with the JSON types of their parameters. A call without quotes does not say whether `7` is a
//! number or a string.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{python::literal, scan_result::CallKind};

/// Maximum number of schemas searched for one parameter's types, because references may be cyclic.
const MAX_SCHEMAS: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    pub name: String,
    pub kind: CallKind,
    parameters: BTreeMap<String, JsonKinds>,
}

impl Function {
    #[must_use]
    pub fn new(name: &str, schema: &Value) -> Self {
        let properties = schema["properties"].as_object().into_iter().flatten();
        let parameters = properties.map(|(key, of)| (key.clone(), JsonKinds::of(of, schema))).collect();
        Self { name: name.to_owned(), kind: CallKind::Function, parameters }
    }

    #[must_use]
    pub(crate) fn custom(name: &str) -> Self {
        Self { name: name.to_owned(), kind: CallKind::Custom, parameters: BTreeMap::new() }
    }

    /// Returns the types of a parameter; an undeclared parameter takes strings.
    #[must_use]
    pub fn takes(&self, parameter: &str) -> JsonKinds {
        self.parameters.get(parameter).copied().unwrap_or(JsonKinds::TEXT)
    }
}

/// A set of JSON types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JsonKinds(u8);

impl JsonKinds {
    /// The string type alone.
    pub(crate) const TEXT: Self = Self(1);
    const NULL: Self = Self(1 << 1);
    const BOOLEAN: Self = Self(1 << 2);
    const NUMBER: Self = Self(1 << 3);
    const ARRAY: Self = Self(1 << 4);
    const OBJECT: Self = Self(1 << 5);

    /// Returns the types that `schema`, a part of `root`, permits; strings if the schema names none.
    #[must_use]
    pub fn of(schema: &Value, root: &Value) -> Self {
        let mut left = MAX_SCHEMAS;
        Self::said(schema, root, &mut left).unwrap_or(Self::TEXT)
    }

    /// Searches at most `left` schemas; returns `None` if they name no type.
    fn said(schema: &Value, root: &Value, left: &mut usize) -> Option<Self> {
        *left = left.checked_sub(1)?;
        let schema = schema.as_object()?;
        let all = |values: &[Value], each: &mut dyn FnMut(&Value) -> Option<Self>| {
            values.iter().filter_map(each).reduce(|all, one| Self(all.0 | one.0))
        };
        if let Some(kind) = schema.get("type") {
            let mut each = |name: &Value| name.as_str().and_then(Self::named);
            return match kind.as_array() {
                Some(names) => all(names, &mut each),
                None => each(kind),
            };
        }
        if let Some(value) = schema.get("const") {
            return Some(Self::of_value(value));
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            return all(values, &mut |value| Some(Self::of_value(value)));
        }
        if let Some(to) = schema.get("$ref").and_then(Value::as_str) {
            let target = to.strip_prefix('#').and_then(|at| root.pointer(at))?;
            return Self::said(target, root, left);
        }
        let choices = ["anyOf", "oneOf", "allOf"].into_iter().find_map(|key| schema.get(key)?.as_array());
        if let Some(choices) = choices {
            return all(choices, &mut |choice| Self::said(choice, root, left));
        }
        let shows = |key| schema.contains_key(key);
        match () {
            () if shows("properties") || shows("additionalProperties") => Some(Self::OBJECT),
            () if shows("items") || shows("prefixItems") => Some(Self::ARRAY),
            () => None,
        }
    }

    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "string" => Self::TEXT,
            "null" => Self::NULL,
            "boolean" => Self::BOOLEAN,
            "integer" | "number" => Self::NUMBER,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => return None,
        })
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::String(_) => Self::TEXT,
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// True if strings are permitted.
    #[must_use]
    pub(crate) fn hold_texts(self) -> bool {
        self.0 & Self::TEXT.0 != 0
    }

    /// True if only strings, or strings and `null`, are permitted.
    #[must_use]
    pub(crate) fn are_texts(self) -> bool {
        self.hold_texts() && self.0 & !(Self::TEXT.0 | Self::NULL.0) == 0
    }

    /// Reads an unquoted value: JSON or a Python literal if its type is in the set, otherwise a string.
    #[must_use]
    pub fn read(self, written: &str) -> Value {
        let others = Self(self.0 & !Self::TEXT.0);
        let parsed = serde_json::from_str(written).ok().or_else(|| literal(written));
        let meant = parsed.filter(|value| Self::of_value(value).0 & others.0 != 0);
        meant.unwrap_or_else(|| Value::from(written))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_written_without_quotes_is_read_as_its_schema_says() {
        let root =
            json!({ "$defs": { "unit": { "enum": ["c", "f"] }, "again": { "$ref": "#/$defs/again" } } });
        for (schema, written, read) in [
            (json!({ "type": "string" }), "7", json!("7")),
            (json!({ "type": "string" }), "\"a\"", json!("\"a\"")),
            (json!({}), "7", json!("7")),
            (json!({ "type": "integer" }), "7", json!(7)),
            (json!({ "type": "integer" }), "seven", json!("seven")),
            (json!({ "type": "boolean" }), "True", json!(true)),
            (json!({ "type": ["string", "null"] }), "null", json!(null)),
            (json!({ "type": ["string", "null"] }), "None", json!(null)),
            (json!({ "type": ["number", "string"] }), "1.5", json!(1.5)),
            (json!({ "type": "array" }), "[1, 'a']", json!([1, "a"])),
            (json!({ "properties": {} }), "{\"a\": 1}", json!({ "a": 1 })),
            (json!({ "$ref": "#/$defs/unit" }), "c", json!("c")),
            (json!({ "$ref": "#/$defs/again" }), "1", json!("1")),
            (json!({ "anyOf": [{ "type": "null" }, { "type": "object" }] }), "{}", json!({})),
            (json!({ "const": 3 }), "3", json!(3)),
        ] {
            assert_eq!(JsonKinds::of(&schema, &root).read(written), read, "{schema} {written}");
        }
    }

    #[test]
    fn choices_that_refer_to_each_other_come_to_an_end() {
        let choices = vec![json!({ "$ref": "#/$defs/again" }); 1000];
        let root = json!({ "$defs": { "again": { "anyOf": choices } } });
        assert_eq!(JsonKinds::of(&json!({ "$ref": "#/$defs/again" }), &root), JsonKinds::TEXT);
    }
}
