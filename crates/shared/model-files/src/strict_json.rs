//! Parses untrusted JSON once, within bounds, and refuses repeated names.
//!
//! Most parsers keep one of two fields with the same name, but they differ in which one. A program that
//! checked the document earlier may have seen another field, so a repeated name is refused. Depth, names and
//! values are counted while reading, so a refusal costs no more than reading up to the defect.

use std::{cell::Cell, fmt};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Maximum nesting depth of a document.
const MAX_DEPTH: usize = 32;
/// Maximum number of names in all objects of a document together.
const MAX_NAMES: usize = 64 * 1024;
/// Maximum number of values of a document. A prompt of token ids has one value per token.
const MAX_VALUES: usize = 1 << 20;

/// Error for a refused document.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct StrictJsonError {
    source: serde_json::Error,
    /// Repeated name, if the document was refused because of one.
    pub repeated: Option<String>,
}

/// Parses `json` within the bounds of this module.
///
/// # Errors
/// If `json` is not JSON, repeats a name in one object, or exceeds a limit on depth or size.
pub fn parse(json: &[u8]) -> Result<Value, StrictJsonError> {
    let counts = JsonCounts::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    let value = BoundedValue { counts: &counts, depth: 0 }.deserialize(&mut reader);
    let value = value.and_then(|value| reader.end().map(|()| value));
    value.map_err(|source| StrictJsonError { source, repeated: counts.repeated.take() })
}

#[derive(Default)]
struct JsonCounts {
    names: Cell<usize>,
    values: Cell<usize>,
    repeated: Cell<Option<String>>,
}

impl JsonCounts {
    fn name<E: Error>(&self) -> Result<(), E> {
        count(&self.names, MAX_NAMES, "names")
    }

    fn value<E: Error>(&self) -> Result<(), E> {
        count(&self.values, MAX_VALUES, "values")
    }
}

fn count<E: Error>(counter: &Cell<usize>, limit: usize, what: &str) -> Result<(), E> {
    counter.set(counter.get() + 1);
    if counter.get() > limit {
        Err(E::custom(format_args!("it holds more than {limit} {what}")))
    } else {
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct BoundedValue<'a> {
    counts: &'a JsonCounts,
    depth: usize,
}

impl BoundedValue<'_> {
    fn inside<E: Error>(self) -> Result<Self, E> {
        let depth = self.depth + 1;
        if depth > MAX_DEPTH {
            return Err(E::custom(format_args!("it is nested more than {MAX_DEPTH} deep")));
        }
        Ok(Self { depth, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for BoundedValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.counts.value()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for BoundedValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let inside = self.inside()?;
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(inside)? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let inside = self.inside()?;
        let mut map = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            self.counts.name()?;
            if map.contains_key(&name) {
                let error = A::Error::custom(format_args!("the field '{name}' appears twice; keep one"));
                self.counts.repeated.set(Some(name));
                return Err(error);
            }
            let value = entries.next_value_seed(inside)?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refusal(body: &str) -> String {
        parse(body.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_field_that_comes_twice_is_refused_by_name() {
        let error = parse(br#"{"a":1,"b":{"n":1,"n":2}}"#).unwrap_err();
        assert!(error.to_string().contains("'n' appears twice"), "{error}");
        assert_eq!(error.repeated.as_deref(), Some("n"));
        parse(br#"{"a":{"n":1},"b":{"n":2}}"#).unwrap();
    }

    #[test]
    fn what_is_too_deep_or_too_much_is_refused() {
        assert!(refusal(&"[".repeat(100_000)).contains("32 deep"));
        let names: Vec<String> = (0..=MAX_NAMES).map(|i| format!("\"{i}\":0")).collect();
        assert!(refusal(&format!("{{{}}}", names.join(","))).contains("names"));
        assert!(refusal(&format!("[{}0]", "0,".repeat(MAX_VALUES))).contains("values"));
    }

    #[test]
    fn half_a_character_and_what_follows_the_end_are_refused() {
        refusal(r#"{"a":"\ud800"}"#);
        refusal("{} {}");
        parse(b"{}\n").unwrap();
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<i16>().prop_map(|quarters| Value::from(f64::from(quarters) / 4.0)),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 8, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                proptest::collection::btree_map(".*", inner, 0..8)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(value in json()) {
            prop_assert_eq!(parse(value.to_string().as_bytes()).unwrap(), value);
        }

        #[test]
        fn any_bytes_are_read_as_the_plain_parser_reads_them_or_refused(body in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(value) = parse(&body) {
                prop_assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), value);
            }
        }
    }
}
