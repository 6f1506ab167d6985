//! Prepares schemas within a Lark grammar, by the rules for any schema.

use serde_json::Value;

use super::{
    GrammarError,
    schema::{Enforcement, lark_json},
};

pub(super) const JSON: &str = "%json";
const OPTIONS: &str = "%llguidance";

/// Returns a Lark grammar with its schemas prepared.
///
/// # Errors
/// If a schema is not valid JSON or unsupported, or the grammar sets options of the library.
pub fn lark_source(source: &str) -> Result<String, GrammarError> {
    let (mut prepared, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(next) = rest.chars().next() {
        let taken = match next {
            '"' => quoted(rest, '"'),
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' => quoted(rest, '/'),
            '%' if rest.starts_with(JSON) => {
                let (schema, bytes) = value_behind(rest, JSON)?;
                prepared.push_str(&lark_json(&schema, Enforcement::Strict)?.0);
                rest = &rest[bytes..];
                continue;
            }
            '%' if rest.starts_with(OPTIONS) => {
                let (options, bytes) = value_behind(rest, OPTIONS)?;
                if options.as_object().is_none_or(|options| !options.is_empty()) {
                    return Err(GrammarError::LibraryOptions);
                }
                bytes
            }
            other => other.len_utf8(),
        };
        prepared.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    Ok(prepared)
}

/// Returns the length of a text or expression between two `sign`s.
fn quoted(text: &str, sign: char) -> usize {
    let mut is_escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            letter if letter == sign => return at + sign.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Parses the JSON after `word`; also returns the length of both together.
fn value_behind(text: &str, word: &str) -> Result<(Value, usize), GrammarError> {
    let mut values = serde_json::Deserializer::from_str(&text[word.len()..]).into_iter();
    match values.next() {
        Some(Ok(value)) => Ok((value, word.len() + values.byte_offset())),
        Some(Err(error)) => Err(GrammarError::NoSchema(error.to_string())),
        None => Err(GrammarError::NoSchema("nothing stands there".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_prepared_wherever_they_stand_and_nothing_else_is() {
        let source = "%llguidance {}\nstart: \"%json {\" X a // %json {\nX: /\"[/]\\/%json {/\na: %json {\"type\": \"null\"} \"é\"";
        let prepared = lark_source(source).unwrap();
        let (before, behind) = source.split_once("{\"type\"").unwrap();
        assert!(prepared.starts_with(before), "{prepared}");
        assert!(prepared.contains("{\"type\":\"null\",\"x-guidance\""), "{prepared}");
        assert!(prepared.ends_with(behind.split_once('}').unwrap().1), "{prepared}");
    }

    #[test]
    fn guards_hold_for_schemas_in_lark() {
        for (source, word) in [
            ("start: %json {\"type\": \"integer\", \"multipleOf\": 99999989}", "multipleOf"),
            ("start: %json {\"x-guidance\": {\"lenient\": true}}", "x-guidance"),
            ("%llguidance {\"allow_invalid_utf8\": true}\nstart: \"a\"", "%llguidance"),
            ("start: %json {\"type\"", "%json"),
        ] {
            let error = lark_source(source).unwrap_err().to_string();
            assert!(error.contains(word), "{source}: {error}");
        }
    }
}
