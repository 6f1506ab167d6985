//! Routes of sessions and futures: `client/config`, `client/dynamic_config`, `create_session`,
//! `session_heartbeat`, `sessions/{id}/finish`, `get_server_capabilities`, `retrieve_future`, `telemetry`.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State},
    http::Response,
    response::IntoResponse as _,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    app::App, body::JsonBody, caller::Caller, errors::ApiError, training_sessions::sessions::SESSION_BYTES,
};

/// Time that `retrieve` waits for an answer; the client's own timeout is 45 s.
const LONG_POLL: Duration = Duration::from_secs(25);
/// Interval of checks whether the gateway shuts down.
const LOOK: Duration = Duration::from_millis(500);
/// Maximum body size in bytes of requests without batch or prompt.
const MAX_BODY_BYTES: usize = 256 << 10;
/// Maximum length in bytes of a message that quotes a client.
const MAX_MESSAGE_BYTES: usize = 512;
/// Number of parts of the maximum body size, of which a chunk may use three.
const CHUNK_SHARE: usize = 4;

/// Reads a short JSON body.
///
/// # Errors
/// The body is too long, or a field is missing, malformed or unknown; the error names it.
pub(super) async fn read<T>(app: &App, body: JsonBody) -> Result<T, ApiError>
where
    T: DeserializeOwned + Send + 'static,
{
    if body.len() > MAX_BODY_BYTES {
        let message = format!(
            "the body has {} bytes, and without a batch or prompt the limit is {MAX_BODY_BYTES}",
            body.len()
        );
        return Err(ApiError::bad_request("body_too_large", message));
    }
    app.bodies.run(body.origin(), move || parse(&body)).await
}

/// Parses a JSON body.
///
/// # Errors
/// A field is missing, malformed or unknown; the error names it.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let invalid =
        |error: serde_json::Error| ApiError::bad_request("invalid_value", clipped(error.to_string()));
    serde_json::from_slice(body).map_err(invalid)
}

/// Truncates a message that quotes the client, such as the name of an unknown field.
pub(super) fn clipped(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
    message
}

/// Returns the settings in which this server differs from the client's defaults.
pub async fn config(State(app): State<Arc<App>>) -> Json<Value> {
    let largest = app.connections.max_body_bytes / CHUNK_SHARE * 3;
    Json(json!({
        "parallel_fwdbwd_chunks": true,
        "proto_compress_fwdbwd": false,
        "fwdbwd_max_chunk_len": 1024,
        "fwdbwd_max_chunk_bytes_count": largest.min(5_000_000),
    }))
}

/// Returns the settings that a client fetches again every few minutes. Samples cannot be cancelled.
pub async fn dynamic_config() -> Json<Value> {
    Json(json!({ "refresh_interval_sec": 300, "sample_cancel_enabled": false }))
}

pub(crate) async fn capabilities(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let serving = app.last_serving()?;
    Ok(Json(json!({
        "supported_models": [{
            "model_name": serving.base_name,
            "max_context_length": serving.context_tokens,
            "trainable": app.runs.means.trainers.check().is_ok(),
            "sampleable": true,
        }],
    })))
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    _body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let memory = app.memory.reserve(&caller.tenant, SESSION_BYTES)?;
    let session = app.runs.book.begin(memory)?;
    let warning = app.runs.means.trainers.check().err().map(|error| error.to_string());
    Ok(Json(json!({ "type": "create_session", "session_id": session, "warning_message": warning })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Heartbeat {
    session_id: String,
    #[serde(rename = "type")]
    _type: Option<String>,
}

pub(crate) async fn heartbeat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let Heartbeat { session_id, .. } = read(&app, body).await?;
    app.runs.book.touch(&session_id, &caller.tenant)?;
    Ok(Json(json!({ "type": "session_heartbeat" })))
}

pub(crate) async fn finish(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(session): Path<String>,
) -> Json<Value> {
    app.runs.book.end(&session, &caller.tenant);
    Json(json!({}))
}

/// Accepts and discards the client's telemetry; without this route the SDK ends each run with a traceback.
pub(crate) async fn telemetry(_batch: JsonBody) -> Json<Value> {
    Json(json!({ "status": "accepted" }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RetrieveFuture {
    request_id: String,
    #[serde(default, rename = "allow_metadata_only")]
    _allow_metadata_only: bool,
}

/// Returns the answer of a future, or a retry message while the answer is not ready.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Response<Body>, ApiError> {
    let RetrieveFuture { request_id, .. } = read(&app, body).await?;
    let promise = app.runs.promises.find(&request_id, &caller.tenant);
    let promise = promise.ok_or_else(|| {
        ApiError::gone("there is no such request: its answer was dropped, or the gateway was restarted")
    })?;
    let mut waited = Duration::ZERO;
    while waited < LONG_POLL && !app.is_draining() {
        if let Some(outcome) = promise.wait(LOOK).await {
            return Ok(outcome.respond());
        }
        waited += LOOK;
    }
    let reason = promise.reason();
    let state = if reason.is_some() { "paused_capacity" } else { "active" };
    let pending = json!({
        "type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": reason,
    });
    Ok(Json(pending).into_response())
}
