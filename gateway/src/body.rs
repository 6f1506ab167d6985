//! Reading a request's body: of the right type, not too long, and in time.
//!
//! A body that says it is too long is refused before any of it is read, one that turns out to be is refused when
//! it passes the limit, and one that does not come in time is cut off. Only so many large ones are held at once.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes, HttpBody as _},
    extract::{FromRequest, Request},
    http::header,
};

use crate::{app::App, errors::ApiError};

/// Bodies that may be longer than this need a permit.
const LARGE_BYTES: u64 = 256 * 1024;

/// A body that says it is JSON, not longer than allowed. Browsers cannot send one to another site unasked.
#[derive(Debug)]
pub struct JsonBody(pub Bytes);

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or("nothing");
        let essence = kind.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(ApiError::not_json(kind));
        }
        let limits = &app.connections;
        let reading = read(request.into_body(), app, limits.max_body_bytes);
        let read = tokio::time::timeout(limits.body_timeout, reading).await;
        read.unwrap_or_else(|_| Err(ApiError::body_timeout(limits.body_timeout))).map(Self)
    }
}

async fn read(body: Body, app: &App, limit: usize) -> Result<Bytes, ApiError> {
    let size = body.size_hint();
    if size.lower() > limit as u64 {
        return Err(ApiError::too_large(limit));
    }
    let is_small = size.upper().is_some_and(|bytes| bytes <= LARGE_BYTES);
    // The semaphore is never closed.
    let _permit = if is_small { None } else { app.large_bodies.acquire().await.ok() };
    // What cannot be read is too long, or its sender is gone and will not see the answer.
    axum::body::to_bytes(body, limit).await.map_err(|_| ApiError::too_large(limit))
}
