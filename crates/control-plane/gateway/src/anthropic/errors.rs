//! The error body of Anthropic's API:
//! `{"type": "error", "error": {"type", "message", "details"}, "request_id"}`.

use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use serde_json::{Value, json};

use crate::{
    errors::{ApiError, ErrorMessage},
    request::REQUEST_ID,
    telemetry,
};

/// Header with the id of a request, which Anthropic's clients read.
const OWN_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Status of Anthropic's API for a server without capacity.
const OVERLOADED: u16 = 529;

/// Copies the request id to the header that Anthropic's clients read.
pub(crate) fn name_request(response: &mut Response) {
    if let Some(id) = response.headers().get(REQUEST_ID).cloned() {
        response.headers_mut().insert(OWN_REQUEST_ID, id);
    }
}

/// Returns the body of an error, and sets the status that Anthropic's API has for it.
pub(crate) fn rewrite(response: &mut Response, error: &ErrorMessage) -> String {
    let is_temporary = response.headers().contains_key(header::RETRY_AFTER);
    if response.status() == StatusCode::SERVICE_UNAVAILABLE && is_temporary {
        *response.status_mut() = StatusCode::from_u16(OVERLOADED).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    }
    let id = response.headers().get(REQUEST_ID).and_then(|id: &HeaderValue| id.to_str().ok());
    body(response.status(), (&error.text, error.code), id).to_string()
}

/// Returns the last event of a stream that failed.
#[must_use]
pub(super) fn event(error: &ApiError) -> Value {
    body(error.status(), (&error.to_string(), error.code()), telemetry::current_id().as_deref())
}

fn body(status: StatusCode, (message, code): (&str, &str), request_id: Option<&str>) -> Value {
    let error = json!({ "type": kind(status), "message": message, "details": { "error_code": code } });
    json!({ "type": "error", "error": error, "request_id": request_id })
}

/// Returns Anthropic's error type of a status.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND | StatusCode::GONE => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        StatusCode::CONFLICT => "conflict_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        _ if status.as_u16() == OVERLOADED => "overloaded_error",
        _ if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}
