//! Rewrites `patternProperties`: few matching names are written out, so that none repeats and none blocks
//! the answer.

use serde_json::{Map, Value};

use super::{
    super::GrammarError,
    Preparation, patterns,
    values::{allows_all, both},
};

/// Maximum number of patterns of one object, which are compared pairwise.
const MAX_PATTERNS: usize = 24;
/// Maximum number of optional properties for which each combination becomes a case if properties are counted.
pub(super) const MAX_COUNTED: usize = 6;

impl Preparation {
    /// Rewrites `patternProperties`: patterns with few names are written out, and a pattern of all names
    /// becomes the schema of all other properties.
    pub(super) fn pattern_properties(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let Some(Value::Object(asked)) = map.remove("patternProperties") else { return Ok(()) };
        let mut properties = match map.remove("properties") {
            Some(Value::Object(properties)) => properties,
            _ => Map::new(),
        };
        let (mut kept, mut of_all) = (Map::new(), Value::Bool(true));
        for (pattern, schema) in asked {
            if patterns::finds_all(&pattern) {
                of_all = both(of_all, schema);
                continue;
            }
            let plain = match patterns::plain(&pattern) {
                Ok(plain) if plain.len() == 1 && kept.len() < MAX_PATTERNS => plain[0].clone(),
                Ok(_) => {
                    self.cannot_hold(
                        "patternProperties",
                        format!("more than one pattern is not supported; remove '{pattern}'"),
                    )?;
                    continue;
                }
                Err(why) => {
                    self.cannot_hold("patternProperties", why)?;
                    continue;
                }
            };
            match patterns::names(&plain).filter(|names| may_be_written_out(map, &properties, names)) {
                Some(names) => names.into_iter().for_each(|name| join(&mut properties, name, schema.clone())),
                None => self.keep(&mut kept, plain, schema)?,
            }
        }
        if !allows_all(&of_all) {
            for schema in properties.values_mut().chain(kept.values_mut()) {
                *schema = both(schema.take(), of_all.clone());
            }
            map.insert("additionalProperties".to_owned(), of_all);
        }
        if !properties.is_empty() {
            map.insert("properties".to_owned(), properties.into());
        }
        if !kept.is_empty() {
            map.insert("patternProperties".to_owned(), kept.into());
        }
        Ok(())
    }

    /// Keeps a pattern if it has no names in common with another.
    fn keep(
        &mut self,
        kept: &mut Map<String, Value>,
        pattern: String,
        schema: Value,
    ) -> Result<(), GrammarError> {
        let other = kept.iter().find(|(other, _)| !patterns::exclude_each_other(other, &pattern));
        match other.map(|(other, _)| other.clone()) {
            None => {
                kept.insert(pattern, schema);
                Ok(())
            }
            Some(other) => {
                let message = format!(
                    "a name may have both '{other}' and '{pattern}'; write patterns that exclude each other"
                );
                self.cannot_hold("patternProperties", message)
            }
        }
    }
}

/// Whether a pattern's names may become listed properties. If the schema bounds the number of properties,
/// only a few optional ones may.
fn may_be_written_out(map: &Map<String, Value>, properties: &Map<String, Value>, names: &[String]) -> bool {
    let is_counted = map.contains_key("minProperties") || map.contains_key("maxProperties");
    let new = names.iter().filter(|name| !properties.contains_key(*name)).count();
    !is_counted || new == 0 || properties.len() + new <= MAX_COUNTED
}

fn join(properties: &mut Map<String, Value>, name: String, schema: Value) {
    let own = properties.get_mut(&name).map(Value::take);
    let joined = match own {
        Some(own) => both(own, schema),
        None => schema,
    };
    properties.insert(name, joined);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::Enforcement, *};

    #[test]
    fn few_names_become_properties_and_one_for_all_becomes_the_others() {
        let mut map = json!({
            "properties": { "score": { "multipleOf": 5 }, "x": true },
            "patternProperties": { "^score$": { "type": "integer" }, "^(a|b)$": { "type": "null" }, ".*": { "maximum": 9 } },
            "additionalProperties": false,
        });
        let map = map.as_object_mut().unwrap();
        Preparation::new(&json!({}), Enforcement::Strict).pattern_properties(map).unwrap();
        let all = json!({ "maximum": 9 });
        assert_eq!(
            Value::Object(map.clone()),
            json!({
                "additionalProperties": all,
                "properties": {
                    "score": { "allOf": [{ "allOf": [{ "multipleOf": 5 }, { "type": "integer" }] }, all] },
                    "x": all,
                    "a": { "allOf": [{ "type": "null" }, all] },
                    "b": { "allOf": [{ "type": "null" }, all] },
                },
            })
        );
    }
}
