//! Parses untrusted JSON documents of the size of a configuration.
//!
//! A parsed value takes up to a hundred times the bytes of its text (`[[0],[0],...]`), so a limit on the file
//! size does not bound memory. Therefore the signs that begin or separate values are counted before parsing.

use serde::de::{DeserializeOwned, Error as _};

/// Maximum signs that begin or separate values, in a configuration. Each costs at most about 200 bytes.
pub const MAX_SIGNS: usize = 1 << 16;

/// Parses `json` after a check of its size.
///
/// # Errors
/// Fails if `json` is malformed, not a `T`, or has more than 65,536 values.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, serde_json::Error> {
    check_size(json, MAX_SIGNS)?;
    serde_json::from_slice(json)
}

/// Refuses a document whose parsed form would take too much memory. Signs within texts count too, because the
/// limit is far above the needs of any document of its kind.
///
/// # Errors
/// If the document has more than `max_signs` signs.
pub fn check_size(json: &[u8], max_signs: usize) -> Result<(), serde_json::Error> {
    let signs = json.iter().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count();
    if signs <= max_signs {
        return Ok(());
    }
    Err(serde_json::Error::custom(format!(
        "it has {signs} values and separators, and the limit is {max_signs}"
    )))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_document_of_too_many_values_is_refused_before_it_is_read() {
        let list = |count: usize| format!("[{}0]", "0,".repeat(count));
        assert!(parse::<Value>(list(MAX_SIGNS - 1).as_bytes()).is_ok());
        let error = parse::<Value>(list(MAX_SIGNS).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("65537 values and separators"), "{error}");
    }
}
