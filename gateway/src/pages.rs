//! What a browser is shown: the page, the description of the API, and the documentation made from it.
//!
//! All three are embedded and load nothing from elsewhere; their headers tell the browser to hold them to that.

use axum::{
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};

const INDEX: &str = include_str!("../assets/index.html");
const DOCS: &str = include_str!("../assets/docs.html");
/// The description of every route, in OpenAPI 3.1.
pub const OPENAPI: &str = include_str!("../assets/openapi.json");

const HTML: &str = "text/html; charset=utf-8";
/// Scripts and styles are part of the pages; nothing else may be loaded, and nobody may frame them.
const POLICY: &str = "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; \
    img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'";

/// `GET /`.
pub(crate) async fn index() -> Response {
    page(HTML, INDEX)
}

/// `GET /docs`.
pub(crate) async fn docs() -> Response {
    page(HTML, DOCS)
}

/// `GET /openapi.json`.
pub(crate) async fn openapi() -> Response {
    page("application/json", OPENAPI)
}

fn page(kind: &'static str, text: &'static str) -> Response {
    let mut response = text.into_response();
    secure(response.headers_mut());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn secure(headers: &mut HeaderMap) {
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
