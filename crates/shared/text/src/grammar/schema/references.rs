//! Resolves the references of a schema.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::walk;

/// Maximum length of a chain of references.
const MAX_CHAIN: usize = 16;

/// A schema as received.
#[derive(Debug, Clone)]
pub(super) struct Document {
    root: Value,
}

impl Document {
    pub(super) fn new(root: &Value) -> Self {
        Self { root: root.clone() }
    }

    /// Follows the references of `schema` while the schema holds nothing else.
    pub(super) fn resolved<'a>(&'a self, mut schema: &'a Value) -> &'a Value {
        for _ in 0..MAX_CHAIN {
            let Some(map) = schema.as_object() else { break };
            let says_more = super::values::constraints(map).any(|(keyword, _)| keyword != "$ref");
            let target = map.get("$ref").and_then(Value::as_str).and_then(|to| self.target(to));
            match target {
                Some(target) if !says_more => schema = target,
                _ => break,
            }
        }
        schema
    }

    fn target(&self, reference: &str) -> Option<&Value> {
        self.root.pointer(&decoded(reference.strip_prefix('#')?))
    }
}

/// Decodes the URI escapes of a JSON pointer.
fn decoded(pointer: &str) -> String {
    if pointer == "/" {
        return String::new();
    }
    let mut bytes = Vec::new();
    let mut rest = pointer.as_bytes();
    while let [first, others @ ..] = rest {
        let hex = (*first == b'%').then(|| others.get(..2)).flatten();
        let byte = hex.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &others[2..] } else { others };
    }
    String::from_utf8(bytes).unwrap_or_default()
}

/// Copies targets of references into `$defs` if the library could not follow the reference or a rewrite
/// could move its target. The root and plain names in `$defs` and `definitions` stay.
pub(super) fn hoist(root: &mut Value) {
    let document = Document::new(root);
    let mut names = BTreeMap::new();
    rename(root, &mut |reference| {
        if is_plain(reference) {
            return None;
        }
        document.target(reference)?;
        let next = names.len();
        let number = *names.entry(reference.to_owned()).or_insert(next);
        Some(format!("#/$defs/{}", name_of(number)))
    });
    let mut copies = Vec::new();
    for (reference, number) in &names {
        let Some(target) = document.target(reference) else { continue };
        let mut copy = target.clone();
        rename(&mut copy, &mut |inner| {
            names.get(inner).map(|number| format!("#/$defs/{}", name_of(*number)))
        });
        copies.push((name_of(*number), copy));
    }
    if copies.is_empty() {
        return;
    }
    let Some(map) = root.as_object_mut() else { return };
    let definitions = map.entry("$defs").or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(definitions) = definitions {
        definitions.extend(copies);
    }
}

fn name_of(number: usize) -> String {
    format!("hoisted-{number}")
}

/// Whether the library can follow `reference` and no rewrite moves the target.
fn is_plain(reference: &str) -> bool {
    if reference == "#" {
        return true;
    }
    let name = ["#/$defs/", "#/definitions/"].iter().find_map(|start| reference.strip_prefix(start));
    name.is_some_and(|name| !name.contains(['/', '~', '%']))
}

/// Replaces each reference in `schema` by its name in `new`.
fn rename(schema: &mut Value, new: &mut impl FnMut(&str) -> Option<String>) {
    let Value::Object(map) = schema else { return };
    if let Some(Value::String(reference)) = map.get_mut("$ref")
        && let Some(name) = new(reference)
    {
        *reference = name;
    }
    walk::children_mut(map).for_each(|child| rename(child, new));
}
