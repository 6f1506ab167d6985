//! Walks a schema by keyword, so that a property's name is never mistaken for a keyword.

use serde_json::{Map, Value};

use super::{super::GrammarError, MAX_NODES, Preparation};

/// Keywords with one schema. In earlier drafts `items` may also hold a list.
pub(super) const ONE: [&str; 12] = [
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
];
/// Keywords with a list of schemas.
pub(super) const LISTS: [&str; 5] = ["prefixItems", "allOf", "anyOf", "oneOf", "items"];
/// Keywords with schemas by name.
pub(super) const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// Keywords that remain after all rewrites only if no rewrite applies, with advice.
const LEFT: [(&str, &str); 14] = [
    ("not", "say what is allowed instead"),
    ("if", "write 'anyOf' with one choice for each case"),
    ("then", "write 'anyOf' with one choice for each case"),
    ("else", "write 'anyOf' with one choice for each case"),
    ("contains", "leave it out, or say 'items' or 'prefixItems'"),
    ("minContains", "leave it out"),
    ("maxContains", "leave it out"),
    ("uniqueItems", "leave it out; only lists of at most four different values can be held to it"),
    ("propertyNames", "say 'patternProperties' with one pattern and 'additionalProperties': false"),
    ("dependentRequired", "write 'anyOf' with one choice for each case"),
    ("dependentSchemas", "write 'anyOf' with one choice for each case"),
    ("unevaluatedItems", "say 'items': false where the items are listed"),
    ("unevaluatedProperties", "say 'additionalProperties': false where the properties are listed"),
    ("$dynamicRef", "write '$ref' with a path in this schema"),
];

impl Preparation {
    /// Rewrites the schema `value` and all its subschemas.
    pub(super) fn schema(&mut self, value: &mut Value) -> Result<(), GrammarError> {
        let Value::Object(map) = value else { return Ok(()) };
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(GrammarError::TooManySchemas);
        }
        self.rewrite(map)?;
        self.descend(map)
    }

    fn rewrite(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        if map.get("$recursiveRef").is_some_and(|target| target == "#") {
            map.remove("$recursiveRef");
            map.insert("$ref".to_owned(), "#".into());
        }
        for anchor in ["$dynamicAnchor", "$recursiveAnchor", "$anchor", "$vocabulary"] {
            map.remove(anchor);
        }
        self.numbers(map)?;
        self.texts(map)?;
        self.arrays(map)?;
        self.objects(map)?;
        self.logic(map)?;
        for (keyword, instead) in LEFT {
            if map.contains_key(keyword) {
                self.drop_keyword(map, keyword, instead)?;
            }
        }
        Ok(())
    }

    fn descend(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        for (keyword, value) in map.iter_mut() {
            self.path.push(keyword.clone());
            match value {
                Value::Array(items) if LISTS.contains(&keyword.as_str()) => {
                    for (index, item) in items.iter_mut().enumerate() {
                        self.at(index.to_string(), item)?;
                    }
                }
                Value::Object(named) if NAMED.contains(&keyword.as_str()) => {
                    for (name, item) in named.iter_mut() {
                        self.at(name.clone(), item)?;
                    }
                }
                other if ONE.contains(&keyword.as_str()) => self.schema(other)?,
                _ => {}
            }
            self.path.pop();
        }
        Ok(())
    }

    fn at(&mut self, name: String, value: &mut Value) -> Result<(), GrammarError> {
        self.path.push(name);
        self.schema(value)?;
        self.path.pop();
        Ok(())
    }
}

/// Returns the direct subschemas of `map`.
pub(super) fn children(map: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    map.iter().flat_map(|(keyword, value)| -> Vec<&Value> {
        let keyword = keyword.as_str();
        match value {
            Value::Array(items) if LISTS.contains(&keyword) => items.iter().collect(),
            Value::Object(named) if NAMED.contains(&keyword) => named.values().collect(),
            other if ONE.contains(&keyword) => vec![other],
            _ => Vec::new(),
        }
    })
}

/// Returns the direct subschemas of `map`, mutably.
pub(super) fn children_mut(map: &mut Map<String, Value>) -> impl Iterator<Item = &mut Value> {
    map.iter_mut().flat_map(|(keyword, value)| -> Vec<&mut Value> {
        let keyword = keyword.as_str();
        if value.is_array() && LISTS.contains(&keyword) {
            value.as_array_mut().into_iter().flatten().collect()
        } else if value.is_object() && NAMED.contains(&keyword) {
            value.as_object_mut().into_iter().flat_map(Map::values_mut).collect()
        } else if ONE.contains(&keyword) {
            vec![value]
        } else {
            Vec::new()
        }
    })
}
