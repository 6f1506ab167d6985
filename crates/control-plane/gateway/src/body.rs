//! Reading a request's body: of the right type, not too long, and in time.
//!
//! A body that says it is too long is refused before any of it is read, one that turns out to be is refused when
//! it passes the limit, and one that does not come in time is cut off. A body counts to its tenant's memory from before its
//! first byte is read until it is dropped, wherever it has gone by then.

pub(crate) mod drain;
pub(crate) mod file;
pub(crate) mod form;

use std::{error::Error, ops::Deref, sync::Arc};

use axum::{
    body::{Bytes, HttpBody as _},
    extract::{FromRequest, Request},
    http::header,
};
use http_body_util::LengthLimitError;
use tokio::time::timeout;
use types::TenantId;

use crate::{
    app::App, body_workers::BodyOrigin, caller::Caller, errors::ApiError, tenant_memory::Reservation,
};

/// A body that says it is JSON, not longer than allowed. Browsers cannot send one to another site unasked. Ollama's routes take JSON
/// of any type, unless a page of a browser sends it.
#[derive(Debug)]
pub struct JsonBody {
    bytes: Bytes,
    /// Given back when the bytes are.
    memory: Reservation,
}

impl JsonBody {
    /// The tenant and the length of the body.
    pub(crate) fn origin(&self) -> BodyOrigin {
        BodyOrigin { tenant: TenantId::of(Some(self.memory.tenant())), bytes: self.bytes.len() }
    }
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
        if !is(kind, "application/json") && !is_json_anyway(&request) {
            return Err(ApiError::not_json(kind));
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
        if !is(kind, "application/x-protobuf") {
            return Err(ApiError::not_protobuf(kind));
        }
        read(request, app).await.map(Self)
    }
}

/// What a request says its body is.
fn kind(request: &Request) -> Option<&str> {
    request.headers().get(header::CONTENT_TYPE)?.to_str().ok()
}

/// Whether `kind` is `wanted`, parameters aside.
fn is(kind: Option<&str>, wanted: &str) -> bool {
    let essence = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default();
    essence.trim().eq_ignore_ascii_case(wanted)
}

/// Whether the body is JSON whatever its type says. Ollama ignores the type on its routes, and its clients send none or another.
/// A browser names the page that asks; its requests have to name the type, which no page may do for another site unasked.
fn is_json_anyway(request: &Request) -> bool {
    let is_from_a_page =
        [header::ORIGIN.as_str(), "sec-fetch-site"].iter().any(|name| request.headers().contains_key(*name));
    is_of_ollama(request.uri().path()) && !is_from_a_page
}

/// Whether a path is one of Ollama's API; Tinker's routes stand below `/api/v1/`.
pub(crate) fn is_of_ollama(path: &str) -> bool {
    path.starts_with("/api/") && !path.starts_with("/api/v1/")
}

async fn read(request: Request, app: &Arc<App>) -> Result<JsonBody, ApiError> {
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    let encoding = encoding.map_or("identity", |encoding| encoding.to_str().unwrap_or("nothing known"));
    if !encoding.eq_ignore_ascii_case("identity") {
        return Err(ApiError::encoded(encoding));
    }
    let caller = caller_of(&request)?;
    let (body, limits) = (request.into_body(), &app.connections);
    if body.size_hint().lower() > limits.max_body_bytes as u64 {
        return Err(ApiError::too_large(limits.max_body_bytes));
    }
    let most = body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
    let most = most.unwrap_or(limits.max_body_bytes);
    let mut memory = app.memory.reserve(&caller.tenant, most)?;
    let read = timeout(limits.body_timeout, axum::body::to_bytes(body, limits.max_body_bytes)).await;
    let read = read.map_err(|_| ApiError::body_timeout(limits.body_timeout))?;
    let bytes = read.map_err(|error| unreadable(&error, limits.max_body_bytes))?;
    memory.resize(bytes.len())?;
    Ok(JsonBody { bytes, memory })
}

/// Who sends a request, as the route's guard has found out.
pub(crate) fn caller_of(request: &Request) -> Result<Caller, ApiError> {
    let caller = request.extensions().get::<Caller>().cloned();
    caller.ok_or_else(|| ApiError::internal("a route was served without its guard"))
}

/// An error and all that caused it, the innermost last.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

/// A body broke off, or is not as HTTP or its format has it.
fn broken(error: &(dyn Error + 'static)) -> ApiError {
    ApiError::body_broken(&causes(error).last().map(ToString::to_string).unwrap_or_default())
}

/// Why a body did not come: it is too long, or not as HTTP has it, or its sender is gone and will not see the answer.
fn unreadable(error: &axum::Error, limit: usize) -> ApiError {
    let is_too_long = causes(error).any(|cause| cause.is::<LengthLimitError>());
    if is_too_long { ApiError::too_large(limit) } else { broken(error) }
}
