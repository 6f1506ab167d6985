//! Stop strings and stop tokens, which end a text before its maximum length.

use serde_json::Value;
use text::stop::StopStrings;

use super::strict_fields::{StrictFields, token_id, wrong};
use crate::errors::ApiError;

const STOP: &str = "stop";
const MAX_STOPS: usize = 16;
const MAX_STOP_CHARS: usize = 256;
const MAX_STOP_TOKENS: usize = 64;

/// Reads `stop`: one string or several.
pub(crate) fn read(fields: &mut StrictFields) -> Result<Option<StopStrings>, ApiError> {
    match fields.take(STOP) {
        None => Ok(None),
        Some(stop @ Value::String(_)) => stop_strings(STOP, vec![stop]),
        Some(Value::Array(items)) => stop_strings(STOP, items),
        Some(other) => Err(wrong(STOP, "a string or an array of strings", &other)),
    }
}

/// Reads the stop strings in `items`, which stand in `field`.
pub(crate) fn stop_strings(field: &str, items: Vec<Value>) -> Result<Option<StopStrings>, ApiError> {
    if items.is_empty() {
        return Ok(None);
    }
    if items.len() > MAX_STOPS {
        return Err(ApiError::invalid(field, format!("'{field}' may hold at most {MAX_STOPS} strings")));
    }
    let stops = items.into_iter().map(|item| stop_string(field, item)).collect::<Result<Vec<_>, _>>()?;
    StopStrings::new(&stops).map(Some).map_err(|error| ApiError::invalid(field, error.to_string()))
}

fn stop_string(field: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) if text.chars().count() > MAX_STOP_CHARS => {
            let message = format!("a string of '{field}' may have at most {MAX_STOP_CHARS} characters");
            Err(ApiError::invalid(field, message))
        }
        Value::String(text) => Ok(text),
        other => Err(wrong(field, "an array of strings", &other)),
    }
}

pub(super) fn stop_tokens(fields: &mut StrictFields, vocab_size: u32) -> Result<Vec<u32>, ApiError> {
    let Some(items) = fields.array("stop_token_ids")? else {
        return Ok(Vec::new());
    };
    if items.len() > MAX_STOP_TOKENS {
        let message = format!("'stop_token_ids' may hold at most {MAX_STOP_TOKENS} tokens");
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    items.iter().map(|item| token_id("stop_token_ids", item, vocab_size)).collect()
}
