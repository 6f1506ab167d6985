//! Rewrites patterns and formats of strings.

use serde_json::{Map, Value, json};

use super::{
    super::GrammarError,
    Preparation,
    formats::{self, Format},
    patterns,
    values::{and, may_be},
};

impl Preparation {
    pub(super) fn texts(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        self.format(map)?;
        let Some(Value::String(pattern)) = map.get("pattern") else { return Ok(()) };
        match patterns::plain(pattern) {
            Ok(plain) => say_patterns(map, plain),
            Err(why) => self.drop_keyword(map, "pattern", why)?,
        }
        Ok(())
    }

    fn format(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let Some(Value::String(name)) = map.get("format") else { return Ok(()) };
        if !may_be(map, "string") {
            map.remove("format");
            return Ok(());
        }
        match formats::of(name) {
            Some(Format::Known(known)) => {
                map.insert("format".to_owned(), known.into());
            }
            Some(Format::Pattern(pattern)) => {
                map.remove("format");
                and(map, json!({ "pattern": pattern }));
            }
            Some(Format::Either(first, second)) => {
                map.remove("format");
                and(map, json!({ "anyOf": [{ "format": first }, { "format": second }] }));
            }
            Some(Format::Any) => {
                map.remove("format");
            }
            None => {
                let message = format!("the format '{name}' is not supported; remove it or use 'pattern'");
                self.drop_keyword(map, "format", message)?;
            }
        }
        Ok(())
    }
}

/// Replaces the `pattern` of strings by the patterns `plain`.
fn say_patterns(map: &mut Map<String, Value>, plain: Vec<String>) {
    let mut plain = plain.into_iter();
    if let Some(first) = plain.next() {
        map.insert("pattern".to_owned(), first.into());
    }
    plain.for_each(|pattern| and(map, json!({ "pattern": pattern })));
}
