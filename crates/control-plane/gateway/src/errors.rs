//! The error body that all failures share: `{"error": {"message", "type", "param", "code"}}`.
//!
//! Codes are stable; messages state the cause and the next step. `Retry-After` tells clients that a retry
//! helps, and `x-should-retry: false` that it does not.

mod from;

use std::{borrow::Cow, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, Response, StatusCode, header},
    response::IntoResponse,
};
use serde::Serialize;

use crate::telemetry;

/// Longest message in bytes, since some messages quote the request.
const MAX_MESSAGE_BYTES: usize = 2048;
/// Replaces the content type in errors about bodies without one.
const NO_TYPE: &str = "a body without a type";
const MAX_NAME_BYTES: usize = 256;

/// Whether a retry of the same request may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RetryAdvice {
    /// Sets no header for retries.
    Unsaid,
    /// Sets `Retry-After` to this number of seconds.
    After(u32),
    /// Sets the header `x-should-retry: false`.
    Never,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    param: Option<String>,
    message: String,
    retry: RetryAdvice,
}

/// Message and code of an error answer, for middleware that answers in another format.
#[derive(Debug, Clone)]
pub(crate) struct ErrorMessage {
    pub text: Arc<str>,
    pub code: &'static str,
}

#[derive(Serialize)]
struct ErrorEnvelope<'a> {
    error: ErrorBody<'a>,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: &'a str,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        let message = shortened(&message.into(), MAX_MESSAGE_BYTES).into_owned();
        Self { status, kind, code, param: None, message, retry: RetryAdvice::Unsaid }
    }

    /// Returns a 400 with a code of its own.
    pub(crate) fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message)
    }

    pub(crate) fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self::bad_request("invalid_value", message).of(param)
    }

    pub fn missing(param: &str, message: impl Into<String>) -> Self {
        Self::bad_request("missing_required_parameter", message).of(param)
    }

    /// Returns an error for an unsupported option, which is never ignored silently.
    pub(crate) fn unsupported(param: &str) -> Self {
        let name = shortened(param, MAX_NAME_BYTES);
        let message = format!("'{name}' is not supported; remove it from the request");
        Self::bad_request("unsupported_parameter", message).of(param)
    }

    pub fn context_length(prompt_tokens: usize, limit: usize) -> Self {
        // Agents such as Claude Code shorten their conversation when they read this wording of Anthropic's.
        let message = format!(
            "the prompt is too long: {prompt_tokens} tokens > {limit}, the length of the model's context; \
             shorten the prompt"
        );
        Self::bad_request("context_length_exceeded", message)
    }

    pub fn model_not_found(name: &str) -> Self {
        let name = shortened(name, MAX_NAME_BYTES);
        let message = format!("the model '{name}' does not exist; GET /v1/models lists what is served");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message).of("model")
    }

    /// Adds the names of some models that exist to the error of an unknown model.
    #[must_use]
    pub(crate) fn naming_models(mut self, names: &[String]) -> Self {
        let names: Vec<_> = names.iter().map(|name| shortened(name, MAX_NAME_BYTES)).collect();
        self.message = format!("{}; among them are: {}", self.message, names.join(", "));
        self
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "not_found", message)
    }

    /// Returns an error for an object that existed but was removed for good.
    pub fn gone(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GONE, "invalid_request_error", "gone", message)
    }

    pub(crate) fn method_not_allowed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_allowed", message)
    }

    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    /// Returns an error for a key without the required role.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", "insufficient_permissions", message)
    }

    /// Returns an error for an unexpected state, which a retry cannot help.
    pub(crate) fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::CONFLICT, "invalid_request_error", code, message);
        Self { retry: RetryAdvice::Never, ..error }
    }

    /// Returns an error for a valid request that contradicts an earlier one.
    pub(crate) fn unprocessable(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_request_error", code, message)
    }

    /// Returns an error for a URI from which no adapter may be fetched.
    pub(crate) fn uri_forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", "adapter_uri_forbidden", message)
    }

    /// Returns an error for a URI that leads to no adapter.
    pub(crate) fn uri_not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "adapter_not_found", message)
    }

    /// Returns an error for a request that may come from a web page of another origin.
    pub fn foreign(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", "origin_not_allowed", message)
    }

    /// Returns an error for an exceeded rate limit, which ends after `wait_s` seconds.
    fn rate_limited(wait_s: u32, message: impl Into<String>) -> Self {
        let error =
            Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded", message);
        Self { retry: RetryAdvice::After(wait_s), ..error }
    }

    pub fn body_timeout(limit: Duration) -> Self {
        let limit_ms = limit.as_millis();
        let message = format!(
            "the request body did not arrive within {limit_ms} ms (--body-timeout-ms); send it faster"
        );
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "body_timeout", message)
    }

    /// Returns an error for a body that lagged more than `limit` behind `least_bytes_per_s`.
    pub(crate) fn body_too_slow(least_bytes_per_s: u64, limit: Duration) -> Self {
        let limit_ms = limit.as_millis();
        let message = format!(
            "the request body arrived too slowly: it may lag {limit_ms} ms (--body-timeout-ms) behind \
             {least_bytes_per_s} bytes per second; send it faster"
        );
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "body_timeout", message)
    }

    pub(crate) fn too_many_connections(limit: usize) -> Self {
        let message = format!(
            "the gateway has {limit} open connections, which is the limit (--max-connections); try again \
             shortly"
        );
        let error =
            Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "too_many_connections", message);
        Self { retry: RetryAdvice::After(1), ..error }
    }

    pub(crate) fn shutting_down() -> Self {
        let message = "the gateway is shutting down; try again when it is back";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "shutting_down", message);
        Self { retry: RetryAdvice::After(1), ..error }
    }

    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("the request body is longer than {limit} bytes (--max-body-bytes)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "body_too_large", message)
    }

    pub(crate) fn file_too_large(limit: u64) -> Self {
        let message = format!("the file is longer than {limit} bytes (--max-training-file-bytes)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "file_too_large", message)
    }

    pub(crate) fn body_broken(why: &str) -> Self {
        let message = format!("cannot read the request body: {why}; send it again");
        Self::bad_request("invalid_body", message)
    }

    pub(crate) fn encoded(found: &str) -> Self {
        Self::unsupported_media(format!("send the body uncompressed, not with 'content-encoding: {found}'"))
    }

    /// Returns an error for the content type `found` instead of JSON; `None` means no content type.
    pub(crate) fn not_json(found: Option<&str>) -> Self {
        let found = found.map_or_else(
            || "but this request has no content type".to_owned(),
            |found| format!("not '{found}'"),
        );
        Self::unsupported_media(format!("send the body as 'content-type: application/json', {found}"))
    }

    /// Returns an error for a body that is not protobuf; Tinker's package sent JSON before 0.25.
    pub(crate) fn not_protobuf(found: Option<&str>) -> Self {
        let found = found.unwrap_or(NO_TYPE);
        Self::unsupported_media(format!(
            "send the body as 'content-type: application/x-protobuf', not '{found}': upgrade tinker to >= 0.25"
        ))
    }

    pub(crate) fn not_multipart(found: Option<&str>) -> Self {
        let found = found.unwrap_or(NO_TYPE);
        Self::unsupported_media(format!(
            "send the body as 'content-type: multipart/form-data' with its boundary, not '{found}'"
        ))
    }

    pub(crate) fn not_binary(found: Option<&str>) -> Self {
        let found = found.unwrap_or(NO_TYPE);
        Self::unsupported_media(format!(
            "send the body as 'content-type: application/octet-stream' or 'application/x-safetensors', not '{found}'"
        ))
    }

    fn unsupported_media(message: String) -> Self {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "invalid_request_error", "unsupported_media_type", message)
    }

    /// Returns an error for a full queue or too long a wait. Capacity may be free after `wait_s` seconds.
    pub(crate) fn queue_full(wait_s: u32, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", message);
        Self { retry: RetryAdvice::After(wait_s), ..error }
    }

    /// Returns an error for a limited resource in use; a retry helps.
    pub fn busy(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", code, message);
        Self { retry: RetryAdvice::After(1), ..error }
    }

    /// Returns an error for missing storage, which a retry cannot help.
    pub(crate) fn no_room(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::INSUFFICIENT_STORAGE, "server_error", code, message);
        Self { retry: RetryAdvice::Never, ..error }
    }

    pub(crate) fn registry_unavailable(message: impl Into<String>) -> Self {
        Self::unavailable("registry_unavailable", message)
    }

    pub(crate) fn adapter_unusable(message: impl Into<String>) -> Self {
        let error =
            Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "adapter_unavailable", message);
        Self { retry: RetryAdvice::Never, ..error }.of("model")
    }

    pub(crate) fn not_implemented(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::NOT_IMPLEMENTED, "server_error", code, message);
        Self { retry: RetryAdvice::Never, ..error }
    }

    /// Returns an error for a required resource that is missing for now.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", code, message);
        Self { retry: RetryAdvice::After(1), ..error }
    }

    pub(crate) fn executor_unavailable(message: impl Into<String>) -> Self {
        Self::unavailable("executor_unavailable", message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", message)
    }

    /// Advises to repeat the request after `wait`.
    #[must_use]
    pub(crate) fn after(self, wait: Duration) -> Self {
        let seconds = wait.as_secs_f64().ceil().clamp(1.0, f64::from(u32::MAX));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the value is in range")]
        let seconds = seconds as u32;
        Self { retry: RetryAdvice::After(seconds), ..self }
    }

    /// Names the field that the error is about.
    #[must_use]
    pub fn of(mut self, param: &str) -> Self {
        self.param = Some(shortened(param, MAX_NAME_BYTES).into_owned());
        self
    }

    /// Prefixes the field's name with `place`, in the message too.
    #[must_use]
    pub(crate) fn within(mut self, place: &str) -> Self {
        if let Some(name) = self.param.take() {
            let path = format!("{place}.{name}");
            self.message = self.message.replace(&format!("'{name}'"), &format!("'{path}'"));
            self.param = Some(path);
        }
        self
    }

    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    #[must_use]
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Appends the error as JSON, for the end of a stream. The message always contains the request id.
    pub(crate) fn write_event(&self, out: &mut Vec<u8>) {
        self.write(out, telemetry::current_id().as_deref());
    }

    fn said(&self, request_id: Option<&str>) -> String {
        let id = request_id.map_or_else(String::new, |id| format!(" (request {id})"));
        format!("{}{id}", self.message)
    }

    /// Returns the message for the end of a stream, always with the request id.
    #[must_use]
    pub(crate) fn last_words(&self) -> String {
        self.said(telemetry::current_id().as_deref())
    }

    fn write(&self, out: &mut Vec<u8>, request_id: Option<&str>) {
        let shape = ErrorBody {
            message: &self.said(request_id),
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        // Writing strings to memory cannot fail.
        let _ = serde_json::to_writer(out, &ErrorEnvelope { error: shape });
    }
}

/// Shortens `text` to `limit` bytes, because an error never repeats long input in full.
fn shortened(text: &str, limit: usize) -> Cow<'_, str> {
    if text.len() <= limit {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("{}… ({} bytes)", &text[..text.floor_char_boundary(limit)], text.len()))
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        telemetry::failed(self.status, self.code, &self.message);
        // A fault of this server contains the request id, so that it can be found in the log.
        let id = telemetry::current_id().filter(|_| telemetry::is_fault(self.status));
        let mut body = Vec::with_capacity(256);
        self.write(&mut body, id.as_deref());
        let mut response = Response::new(Body::from(body));
        let text = self.said(id.as_deref()).into();
        response.extensions_mut().insert(ErrorMessage { text, code: self.code });
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.retry {
            RetryAdvice::Unsaid => {}
            RetryAdvice::After(seconds) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            }
            RetryAdvice::Never => {
                headers.insert("x-should-retry", HeaderValue::from_static("false"));
            }
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
