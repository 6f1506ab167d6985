//! The error body of Ollama's API: `{"error": "..."}`.

use serde_json::json;

use crate::errors::ErrorMessage;

/// Returns the body of an error in Ollama's format.
pub(crate) fn body(error: &ErrorMessage) -> String {
    json!({ "error": &*error.text }).to_string()
}
