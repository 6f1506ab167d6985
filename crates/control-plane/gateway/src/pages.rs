//! Pages for browsers: the web interface, the API description, and the documentation made from it.
//!
//! All are embedded and load nothing from elsewhere; their headers make the browser enforce that.

use axum::{
    extract::Path,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use crate::errors::ApiError;

const INDEX: &str = include_str!("../assets/page/index.html");
const DOCS: &str = include_str!("../assets/docs.html");
/// OpenAPI 3.1 description of every route.
pub const OPENAPI: &str = include_str!("../assets/openapi.json");

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The page loads files of this server alone, never turns strings into HTML, and cannot be framed.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'";
/// Scripts and styles are inline in the documentation. The page loads nothing else and cannot be framed.
const DOCS_POLICY: &str = "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; \
    img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'";

/// Part of the page: name, media type, content.
type PageAsset = (&'static str, &'static str, &'static str);

macro_rules! parts {
    ($($kind:ident: $($name:literal),* $(,)?;)*) => {
        /// Parts of the page, by name.
        pub const PARTS: &[PageAsset] =
            &[$($(($name, $kind, include_str!(concat!("../assets/page/", $name)))),*),*];
    };
}

parts! {
    STYLE: "style.css", "talk.css", "operate.css";
    SCRIPT: "adapters.js", "answer.js", "api.js", "clipboard.js", "curl.js", "dom.js", "figures.js", "key.js",
        "main.js", "markdown.js", "meters.js", "metrics.js", "models.js", "notices.js", "plot.js", "residency.js",
        "settings.js", "status.js", "stream.js", "talk.js", "theme.js", "training.js", "view.js";
}

pub(crate) async fn index(asked: HeaderMap) -> Response {
    page(&asked, HTML, PAGE_POLICY, INDEX)
}

pub(crate) async fn part(Path(name): Path<String>, asked: HeaderMap) -> Result<Response, ApiError> {
    let part = PARTS.iter().find(|(known, ..)| *known == name);
    let (_, kind, text) =
        part.ok_or_else(|| ApiError::not_found(format!("the page has no part '{name}'; reload the page")))?;
    Ok(page(&asked, kind, PAGE_POLICY, text))
}

pub(crate) async fn docs(asked: HeaderMap) -> Response {
    page(&asked, HTML, DOCS_POLICY, DOCS)
}

pub(crate) async fn openapi(asked: HeaderMap) -> Response {
    page(&asked, "application/json", DOCS_POLICY, OPENAPI)
}

/// Answers with `text`, or with 304 if the client has this version.
fn page(asked: &HeaderMap, kind: &'static str, policy: &'static str, text: &'static str) -> Response {
    let tag = format!("\"{:.16}\"", blake3::hash(text.as_bytes()).to_hex());
    let known = asked.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response = if known { StatusCode::NOT_MODIFIED.into_response() } else { text.into_response() };
    let headers = response.headers_mut();
    for (name, value) in secured(policy) {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

fn secured(policy: &'static str) -> [(HeaderName, &'static str); 5] {
    [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Browsers cache the page but revalidate it each time, since a newer gateway has a newer page.
        (header::CACHE_CONTROL, "no-cache"),
    ]
}
