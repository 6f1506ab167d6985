//! `Idempotency-Key`: the header that identifies a request sent again.

use axum::http::HeaderMap;

use crate::errors::ApiError;

const MAX_KEY_BYTES: usize = 255;
const HEADER: &str = "idempotency-key";

/// Returns the key of a request, if there is one.
///
/// # Errors
/// The key is empty or too long.
pub(super) fn key(headers: &HeaderMap) -> Result<Option<&[u8]>, ApiError> {
    let Some(key) = headers.get(HEADER).map(|key| key.as_bytes()) else { return Ok(None) };
    if (1..=MAX_KEY_BYTES).contains(&key.len()) {
        return Ok(Some(key));
    }
    let message =
        format!("the header 'Idempotency-Key' must have 1 to {MAX_KEY_BYTES} bytes, not {}", key.len());
    Err(ApiError::invalid(HEADER, message))
}
