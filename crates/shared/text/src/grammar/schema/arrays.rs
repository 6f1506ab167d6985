//! Rewrites array keywords that the library does not support.

use serde_json::{Map, Value, json};

use super::{
    super::GrammarError,
    Preparation,
    values::{allows_all, and_one_of, count_in, has_to_be, listed, may_be, types},
};

/// Maximum number of values for which all lists of distinct values are written out.
const MAX_DIFFERENT: usize = 4;

impl Preparation {
    pub(super) fn arrays(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        if !may_be(map, "array") {
            for keyword in ["contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"] {
                map.remove(keyword);
            }
            return Ok(());
        }
        contains(map);
        unevaluated_items(map);
        self.unique_items(map);
        Ok(())
    }

    /// Rewrites `uniqueItems` for small sets of allowed values.
    fn unique_items(&mut self, map: &mut Map<String, Value>) {
        let says_nothing = map.get("uniqueItems") != Some(&Value::Bool(true))
            || count_in(map, "maxItems").is_some_and(|most| most <= 1);
        if says_nothing {
            map.remove("uniqueItems");
            return;
        }
        let is_a_list_of_one_kind = ["prefixItems", "additionalItems", "enum", "const"].iter();
        if is_a_list_of_one_kind.clone().any(|keyword| map.contains_key(*keyword)) {
            return;
        }
        let Some(values) = map.get("items").and_then(|items| self.few_values(items)) else { return };
        let least = count_in(map, "minItems").unwrap_or(0);
        let most = count_in(map, "maxItems").unwrap_or(usize::MAX);
        let lists: Vec<Value> = without_repetition(&values)
            .into_iter()
            .filter(|list| (least..=most).contains(&list.len()))
            .map(Value::from)
            .collect();
        for keyword in ["uniqueItems", "items", "minItems", "maxItems"] {
            map.remove(keyword);
        }
        if has_to_be(map, "array") {
            map.insert("enum".to_owned(), lists.into());
        } else {
            and_one_of(map, "array", vec![json!({ "enum": lists })]);
        }
    }

    /// Returns all values that `schema` allows, if there are few.
    fn few_values(&self, schema: &Value) -> Option<Vec<Value>> {
        let map = self.document.resolved(schema).as_object()?;
        let values: Vec<Value> = match listed(map) {
            Some(values) => values.into_iter().cloned().collect(),
            None if types(map) == ["boolean"] => vec![false.into(), true.into()],
            None => return None,
        };
        let says_more = super::values::constraints(map)
            .any(|(keyword, _)| !matches!(keyword.as_str(), "const" | "enum" | "type"));
        (!says_more && values.len() <= MAX_DIFFERENT).then_some(values)
    }
}

/// Returns every ordered selection of distinct `values`.
fn without_repetition(values: &[Value]) -> Vec<Vec<Value>> {
    let mut all = vec![Vec::new()];
    for (index, value) in values.iter().enumerate() {
        let mut others = values.to_vec();
        others.remove(index);
        for mut rest in without_repetition(&others) {
            rest.insert(0, value.clone());
            all.push(rest);
        }
    }
    all
}

/// Removes a `contains` that every list satisfies, and turns a minimum of arbitrary items into `minItems`.
fn contains(map: &mut Map<String, Value>) {
    let Some(wanted) = map.get("contains") else {
        map.remove("minContains");
        map.remove("maxContains");
        return;
    };
    let (is_any, least) = (allows_all(wanted), count_in(map, "minContains").unwrap_or(1));
    if map.contains_key("maxContains") || (least > 0 && !is_any) {
        return;
    }
    map.remove("contains");
    map.remove("minContains");
    let least = least.max(count_in(map, "minItems").unwrap_or(0));
    if least > 0 {
        map.insert("minItems".to_owned(), least.into());
    }
}

/// Rewrites `unevaluatedItems` to `items` if no other keyword can evaluate items.
fn unevaluated_items(map: &mut Map<String, Value>) {
    const ELSEWHERE: [&str; 6] = ["allOf", "anyOf", "oneOf", "$ref", "if", "contains"];
    let Some(schema) = map.get("unevaluatedItems").cloned() else { return };
    if allows_all(&schema) || map.contains_key("items") {
        map.remove("unevaluatedItems");
    } else if !ELSEWHERE.iter().any(|keyword| map.contains_key(*keyword)) {
        map.remove("unevaluatedItems");
        map.insert("items".to_owned(), schema);
    }
}
