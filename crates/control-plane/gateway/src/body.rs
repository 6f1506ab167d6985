//! Reads a request's body, and checks its type, length and duration.
//!
//! A body with a declared length above the limit is refused before it is read; other bodies are refused when
//! they pass the limit. A body that does not arrive in time is cut off. A body counts against its tenant's
//! memory from before the first byte until it is dropped.

pub(crate) mod drain;
pub(crate) mod file;
pub(crate) mod form;
pub(crate) mod stream;

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
    app::App, body_workers::BodyOrigin, caller::Caller, errors::ApiError, http_api::HttpApi,
    tenant_memory::Reservation,
};

/// A JSON body within the length limit. The content type is required, so that web pages cannot send one to
/// another site without CORS. Ollama's routes accept any content type, except from a page in a browser.
#[derive(Debug)]
pub struct JsonBody {
    bytes: Bytes,
    /// Reserved memory, released with `bytes`.
    memory: Reservation,
}

impl JsonBody {
    pub(crate) fn origin(&self) -> BodyOrigin {
        BodyOrigin { tenant: TenantId::of(Some(self.memory.tenant())), bytes: self.bytes.len() }
    }
}

impl JsonBody {
    /// Returns the bytes, which the body's reservation counts while the body exists.
    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Returns the bytes and releases their reservation.
    pub(crate) fn into_bytes(self) -> Bytes {
        self.bytes
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

#[derive(Debug)]
pub(crate) struct ProtobufBody(pub JsonBody);

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

fn kind(request: &Request) -> Option<&str> {
    request.headers().get(header::CONTENT_TYPE)?.to_str().ok()
}

/// Whether the content type `kind` is `wanted`, ignoring parameters.
fn is(kind: Option<&str>, wanted: &str) -> bool {
    let essence = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default();
    essence.trim().eq_ignore_ascii_case(wanted)
}

/// Whether the body is JSON regardless of its content type. Ollama ignores the type on its routes, and its
/// clients send none or another. A request of a web page, which browsers mark with headers, must declare the
/// type, because that requires CORS.
fn is_json_anyway(request: &Request) -> bool {
    let is_from_a_page =
        [header::ORIGIN.as_str(), "sec-fetch-site"].iter().any(|name| request.headers().contains_key(*name));
    HttpApi::of(request.uri().path(), request.headers()) == HttpApi::Ollama && !is_from_a_page
}

async fn read(request: Request, app: &Arc<App>) -> Result<JsonBody, ApiError> {
    check_encoding(&request)?;
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

/// Refuses a compressed body.
fn check_encoding(request: &Request) -> Result<(), ApiError> {
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    let encoding = encoding.map_or("identity", |encoding| encoding.to_str().unwrap_or("nothing known"));
    if encoding.eq_ignore_ascii_case("identity") { Ok(()) } else { Err(ApiError::encoded(encoding)) }
}

/// Returns the caller, as authenticated by the route's guard.
pub(crate) fn caller_of(request: &Request) -> Result<Caller, ApiError> {
    let caller = request.extensions().get::<Caller>().cloned();
    caller.ok_or_else(|| ApiError::internal("a route was served without its guard"))
}

/// Returns an error and its causes, the innermost last.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

fn broken(error: &(dyn Error + 'static)) -> ApiError {
    ApiError::body_broken(&causes(error).last().map(ToString::to_string).unwrap_or_default())
}

/// Maps a read error: the body is too long, violates HTTP, or broke off because the client disconnected.
fn unreadable(error: &axum::Error, limit: usize) -> ApiError {
    let is_too_long = causes(error).any(|cause| cause.is::<LengthLimitError>());
    if is_too_long { ApiError::too_large(limit) } else { broken(error) }
}
