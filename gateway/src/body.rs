//! Reading a request's body: of the right type, not too long, and in time.
//!
//! A body that says it is too long is refused before any of it is read, one that turns out to be is refused when
//! it passes the limit, and one that does not come in time is cut off. Only so many large ones are held at once: each
//! has a permit from its first byte until it is dropped, wherever it has gone by then.

pub(crate) mod rest;

use std::{ops::Deref, sync::Arc};

use axum::{
    body::{Bytes, HttpBody as _},
    extract::{FromRequest, Request},
    http::header,
};
use http_body_util::LengthLimitError;
use tokio::{sync::OwnedSemaphorePermit, time::timeout};

use crate::{
    app::{App, LARGE_BODIES},
    errors::ApiError,
};

/// Bodies that may be longer than this need a permit.
const LARGE_BYTES: u64 = 256 * 1024;

/// A body that says it is JSON, not longer than allowed. Browsers cannot send one to another site unasked.
#[derive(Debug)]
pub struct JsonBody {
    bytes: Bytes,
    /// A large body's, given back when the bytes are.
    _permit: Option<OwnedSemaphorePermit>,
}

impl Deref for JsonBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let kind = kind(&request);
        if !essence(&kind).eq_ignore_ascii_case("application/json") {
            return Err(ApiError::not_json(&kind));
        }
        read(request, app).await
    }
}

/// A body that says it is protobuf, not longer than allowed.
#[derive(Debug)]
pub struct ProtobufBody(pub JsonBody);

impl FromRequest<Arc<App>> for ProtobufBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let kind = kind(&request);
        if !essence(&kind).eq_ignore_ascii_case("application/x-protobuf") {
            return Err(ApiError::not_protobuf(&kind));
        }
        read(request, app).await.map(Self)
    }
}

/// What a request says its body is.
fn kind(request: &Request) -> String {
    let kind = request.headers().get(header::CONTENT_TYPE);
    kind.and_then(|kind| kind.to_str().ok()).unwrap_or("nothing").to_owned()
}

/// The same without parameters.
fn essence(kind: &str) -> &str {
    kind.split(';').next().unwrap_or_default().trim()
}

async fn read(request: Request, app: &Arc<App>) -> Result<JsonBody, ApiError> {
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    let encoding = encoding.map_or("identity", |encoding| encoding.to_str().unwrap_or("nothing known"));
    if !encoding.eq_ignore_ascii_case("identity") {
        return Err(ApiError::encoded(encoding));
    }
    let (body, limits) = (request.into_body(), &app.connections);
    if body.size_hint().lower() > limits.max_body_bytes as u64 {
        return Err(ApiError::too_large(limits.max_body_bytes));
    }
    let _permit = permit(body.size_hint().upper(), app).await?;
    let read = timeout(limits.body_timeout, axum::body::to_bytes(body, limits.max_body_bytes)).await;
    let read = read.map_err(|_| ApiError::body_timeout(limits.body_timeout))?;
    let bytes = read.map_err(|error| unreadable(&error, limits.max_body_bytes))?;
    Ok(JsonBody { bytes, _permit })
}

/// The permit of a body of at most `bytes`, if that is known, once there is one. Nothing is read of those that wait, and
/// their time has not begun.
async fn permit(bytes: Option<u64>, app: &App) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
    if bytes.is_some_and(|bytes| bytes <= LARGE_BYTES) {
        return Ok(None);
    }
    let permit = Arc::clone(&app.large_bodies).acquire_owned();
    match timeout(app.connections.body_timeout, permit).await {
        // The semaphore is never closed.
        Ok(permit) => Ok(permit.ok()),
        Err(_) => Err(ApiError::queue_full(
            1,
            format!(
                "{LARGE_BODIES} bodies above {LARGE_BYTES} bytes are being read or worked on, which is the limit; try again \
             shortly"
            ),
        )),
    }
}

/// Why a body did not come: it is too long, or not as HTTP has it, or its sender is gone and will not see the answer.
fn unreadable(error: &axum::Error, limit: usize) -> ApiError {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    let mut last = String::new();
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return ApiError::too_large(limit);
        }
        last = error.to_string();
        cause = error.source();
    }
    ApiError::body_broken(&last)
}
