//! Decides whether a schema has finite values; a value that must contain another value of its own schema
//! has no end.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{
    super::GrammarError,
    values::{count_in, has_to_be, texts_in},
    walk,
};

/// Removes choices, optional properties and items without finite values.
///
/// # Errors
/// If the whole schema has no finite value.
pub(super) fn prune(root: &mut Value) -> Result<(), GrammarError> {
    let mut references = BTreeSet::new();
    collect(root, &mut references);
    let mut known = BTreeSet::new();
    loop {
        let before = known.len();
        for reference in &references {
            let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
            // The library reports references without a target.
            if target.is_none_or(|target| has_end(target, &known)) {
                known.insert(reference.clone());
            }
        }
        if known.len() == before {
            break;
        }
    }
    if !has_end(root, &known) {
        return Err(GrammarError::Endless);
    }
    if known.len() < references.len() {
        prune_within(root, &known);
    }
    Ok(())
}

fn collect(schema: &Value, references: &mut BTreeSet<String>) {
    let Value::Object(map) = schema else { return };
    references.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
    walk::children(map).for_each(|child| collect(child, references));
}

/// Whether `schema` has a finite value, given that the `known` references have.
fn has_end(schema: &Value, known: &BTreeSet<String>) -> bool {
    let Value::Object(map) = schema else { return *schema != Value::Bool(false) };
    let parts = |keyword: &str| map.get(keyword).and_then(Value::as_array);
    let reference = map.get("$ref").and_then(Value::as_str);
    reference.is_none_or(|reference| known.contains(reference))
        && parts("allOf").is_none_or(|all| all.iter().all(|part| has_end(part, known)))
        && ["anyOf", "oneOf"].iter().all(|keyword| {
            parts(keyword).is_none_or(|choices| choices.iter().any(|choice| has_end(choice, known)))
        })
        && parts("enum").is_none_or(|values| !values.is_empty())
        && (!has_to_be(map, "object") || properties_have_end(map, known))
        && (!has_to_be(map, "array") || items_have_end(map, known))
}

fn properties_have_end(map: &Map<String, Value>, known: &BTreeSet<String>) -> bool {
    let properties = map.get("properties");
    texts_in(map, "required")
        .into_iter()
        .filter_map(|name| properties?.get(name))
        .all(|property| has_end(property, known))
}

fn items_have_end(map: &Map<String, Value>, known: &BTreeSet<String>) -> bool {
    let least = count_in(map, "minItems").unwrap_or(0);
    let first = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let others = map.get("items").filter(|_| least > first.len());
    first.iter().take(least).chain(others).all(|item| has_end(item, known))
}

fn prune_within(schema: &mut Value, known: &BTreeSet<String>) {
    let Value::Object(map) = schema else { return };
    let has_no_end = |schema: &Value| !has_end(schema, known);
    for keyword in ["anyOf", "oneOf"] {
        if let Some(Value::Array(choices)) = map.get_mut(keyword)
            && !choices.iter().all(has_no_end)
        {
            choices.retain(|choice| has_end(choice, known));
        }
    }
    let is_endless = |schema: &&mut Value| schema.is_object() && has_no_end(schema);
    for keyword in ["properties", "patternProperties"] {
        if let Some(Value::Object(named)) = map.get_mut(keyword) {
            named.values_mut().filter(is_endless).for_each(|schema| *schema = false.into());
        }
    }
    for keyword in ["additionalProperties", "items"] {
        map.get_mut(keyword).into_iter().filter(is_endless).for_each(|schema| *schema = false.into());
    }
    walk::children_mut(map).for_each(|child| prune_within(child, known));
}
