//! Stop strings and stop tokens, which end a text before its maximum length.

use serde_json::Value;
use text::stop::StopStrings;

use super::strict_fields::{StrictFields, token_id, wrong};
use crate::errors::ApiError;

const MAX_STOPS: usize = 16;
const MAX_STOP_CHARS: usize = 256;
const MAX_STOP_TOKENS: usize = 64;

pub(super) fn stop_strings(fields: &mut StrictFields) -> Result<Option<StopStrings>, ApiError> {
    let stops = match fields.take("stop") {
        None => return Ok(None),
        Some(stop @ Value::String(_)) => vec![stop_string(stop)?],
        Some(Value::Array(items)) if items.is_empty() => return Ok(None),
        Some(Value::Array(items)) if items.len() > MAX_STOPS => {
            return Err(ApiError::invalid("stop", format!("'stop' may hold at most {MAX_STOPS} strings")));
        }
        Some(Value::Array(items)) => items.into_iter().map(stop_string).collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong("stop", "a string or an array of strings", &other)),
    };
    StopStrings::new(&stops).map(Some).map_err(|error| ApiError::invalid("stop", error.to_string()))
}

fn stop_string(value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) if text.chars().count() > MAX_STOP_CHARS => {
            let message = format!("a string of 'stop' may have at most {MAX_STOP_CHARS} characters");
            Err(ApiError::invalid("stop", message))
        }
        Value::String(text) => Ok(text),
        other => Err(wrong("stop", "a string or an array of strings", &other)),
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
