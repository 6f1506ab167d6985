//! Checks the regular expressions of a `tokenizer.json` before the `tokenizers` crate compiles them without
//! limits.

use fancy_regex::RegexBuilder;
use serde_json::Value;

/// Maximum number of expressions of a normalizer or pre-tokenizer.
const MAX_EXPRESSIONS: usize = 16;
/// Maximum length of an expression in bytes; DeepSeek's list of letters takes 1,300.
const MAX_EXPRESSION_BYTES: usize = 1 << 13;
/// Maximum size of a compiled expression in bytes; classes of letters take some hundred thousand.
const MAX_COMPILED_BYTES: usize = 1 << 20;

/// Checks the number and size of the expressions anywhere in `component`; the error describes an invalid or
/// too large expression.
pub(super) fn check(component: &Value) -> Result<(), String> {
    let mut found = Vec::new();
    collect(component, &mut found);
    if found.len() > MAX_EXPRESSIONS {
        return Err(format!("{} regular expressions are beyond the limit of {MAX_EXPRESSIONS}", found.len()));
    }
    found.into_iter().try_for_each(check_one)
}

/// Recursion is safe because the depth of JSON values is limited.
fn collect<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("Regex").and_then(Value::as_str));
            fields.values().for_each(|field| collect(field, found));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        _ => {}
    }
}

fn check_one(expression: &str) -> Result<(), String> {
    if expression.len() > MAX_EXPRESSION_BYTES {
        return Err(format!("a regular expression has more than {MAX_EXPRESSION_BYTES} bytes"));
    }
    RegexBuilder::new(expression)
        .delegate_size_limit(MAX_COMPILED_BYTES)
        .build()
        .map(drop)
        .map_err(|error| format!("a regular expression cannot be compiled: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn expressions_are_found_at_any_depth_and_bounded() {
        let split = |expression: &str| json!({"pretokenizers": [{"pattern": {"Regex": expression}}]});
        assert_eq!(check(&split(r"\p{L}+|\s+(?!\S)")), Ok(()));
        assert!(check(&split("(")).is_err());
        assert!(check(&split("(?:\\w{1000}){1000}")).is_err());
        assert!(check(&split(&"a".repeat(MAX_EXPRESSION_BYTES + 1))).is_err());
        assert!(check(&json!(vec![split("a"); MAX_EXPRESSIONS + 1])).is_err());
    }
}
