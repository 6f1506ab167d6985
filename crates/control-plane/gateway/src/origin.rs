//! Protection against foreign web pages that call a gateway through a user's browser.
//!
//! A gateway without keys trusts its machine. A page in a browser on that machine may point its own host name
//! at 127.0.0.1 (DNS rebinding), or simply send a request. Without keys a request must therefore name this
//! machine as its host, and must not come from a page of another origin unless `--cors-origins` names it.
//! With keys neither rule is needed, since a foreign page has no key.

use std::{net::IpAddr, sync::Arc};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header, uri::Authority},
    middleware::Next,
    response::Response,
};
use tower_http::cors::CorsLayer;

use crate::{app::App, config::AllowedHosts, errors::ApiError};

/// Time that a browser may cache a preflight response.
const PREFLIGHT_AGE: std::time::Duration = std::time::Duration::from_secs(600);

/// Passes a request on unless it may come from a foreign web page.
pub(crate) async fn check(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if !app.keys.are_asked_for() && app.origins.hosts == AllowedHosts::Local {
        let authority = request.uri().authority().map(Authority::as_str);
        if !is_from_before_hosts(&request) {
            check_headers(authority, request.headers(), &app.origins.allowed)?;
        }
    }
    Ok(next.run(request).await)
}

/// True for HTTP/1.0 requests without `Host`, as some load balancers' health checks send. Browsers always
/// send it.
fn is_from_before_hosts(request: &Request) -> bool {
    let named = |name| request.headers().contains_key(name);
    request.version() == Version::HTTP_10 && !named(header::HOST) && !named(header::ORIGIN)
}

fn check_headers(authority: Option<&str>, headers: &HeaderMap, allowed: &[String]) -> Result<(), ApiError> {
    let host = authority.or_else(|| headers.get(header::HOST)?.to_str().ok()).unwrap_or_default();
    if !is_local(host) {
        return Err(ApiError::foreign(format!(
            "a gateway without API keys answers only to the hosts 127.0.0.1 and localhost, not '{host}'; \
             use these, --api-key-file or --insecure"
        )));
    }
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let origin = origin.to_str().unwrap_or_default();
    if origin.strip_prefix("http://") == Some(host) || allowed.iter().any(|allowed| allowed == origin) {
        return Ok(());
    }
    Err(ApiError::foreign(format!(
        "a gateway without API keys refuses web pages of the origin '{origin}'; allow them with \
         --cors-origins '{origin}'"
    )))
}

/// True for names and addresses that always mean this machine.
fn is_local(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Allows pages of `origins` to use all `methods`, with the same rules for keys as other callers.
pub(crate) fn cors(origins: &[String], methods: Vec<Method>) -> CorsLayer {
    let origins = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
    let named = |names: &[&'static str]| -> Vec<HeaderName> {
        names.iter().map(|name| HeaderName::from_static(name)).collect()
    };
    CorsLayer::new()
        .allow_origin(origins.collect::<Vec<_>>())
        .allow_methods(methods)
        .allow_headers(named(&[
            "authorization",
            "x-api-key",
            "content-type",
            "idempotency-key",
            "x-request-id",
            "traceparent",
            "anthropic-version",
            "anthropic-beta",
            "anthropic-dangerous-direct-browser-access",
        ]))
        .expose_headers(named(&[
            "x-request-id",
            "request-id",
            "retry-after",
            "x-should-retry",
            "x-ratelimit-limit-requests",
            "x-ratelimit-remaining-requests",
            "x-ratelimit-reset-requests",
        ]))
        .max_age(PREFLIGHT_AGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(host: &str, origin: Option<&str>) -> Result<(), ApiError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        check_headers(None, &headers, &["https://a.example".to_owned()])
    }

    #[test]
    fn only_names_of_this_machine_are_answered_to() {
        for host in ["localhost", "localhost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:80", "LocalHost"] {
            asked(host, None).unwrap();
        }
        for host in
            ["evil.example", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example", "", "[::2]"]
        {
            assert_eq!(asked(host, None).unwrap_err().status().as_u16(), 403, "{host}");
        }
    }

    #[test]
    fn only_our_own_pages_and_those_that_were_named_may_ask() {
        asked("127.0.0.1:80", Some("http://127.0.0.1:80")).unwrap();
        asked("127.0.0.1:80", Some("https://a.example")).unwrap();
        for origin in ["http://127.0.0.1:81", "https://127.0.0.1:80", "null", "https://evil.example"] {
            asked("127.0.0.1:80", Some(origin)).unwrap_err();
        }
    }
}
