//! Request processing of all routes: each request gets an id, a span in the log, and an answer even if the
//! gateway is stopping or a handler panics.

use std::{any::Any, sync::Arc};

use axum::{
    body::Body,
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use crate::{
    app::App,
    errors::ApiError,
    random::random_u64,
    telemetry::{
        self, ArrivalRecord,
        trace::{self, Trace},
    },
};

/// Route name under which unmatched requests are counted.
const NO_ROUTE: &str = "none";
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACE_PARENT: HeaderName = HeaderName::from_static(trace::HEADER);
/// Maximum length in bytes of a caller's own id.
const MAX_ID_BYTES: usize = 128;
/// Length of a `traceparent` in bytes, in its only version.
const TRACE_PARENT_BYTES: usize = 55;
/// Routes that are answered even while the gateway drains; `/v1/load` then reports that the host stops.
const PROBES: &[&str] = &["/health", "/ready", "/metrics", control_protocol::fleet::PATH];

/// Id of a request in the log and in its answer; the id is never a lookup key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestId(pub Arc<str>);

/// Trace that a request is part of, in the W3C format `traceparent`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TraceParent(pub Arc<str>);

/// Names the request, logs its answer, and refuses it if the gateway is draining.
pub(crate) async fn identify(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    failpoint::pass("gateway.accepted");
    let id = RequestId(id_of(request.headers()));
    let trace = trace_parent(request.headers());
    let arrival = arrival(&request, &id, trace.as_ref());
    request.extensions_mut().insert(id.clone());
    if let Some(trace) = trace.clone() {
        request.extensions_mut().insert(trace);
    }
    let is_probe = PROBES.contains(&request.uri().path());
    let answer = async {
        if app.is_draining() && !is_probe {
            ApiError::shutting_down().into_response()
        } else {
            next.run(request).await
        }
    };
    let mut response = telemetry::observe(&app.sinks, arrival, answer).await;
    let headers = response.headers_mut();
    insert(headers, REQUEST_ID, &id.0);
    if let Some(trace) = trace {
        insert(headers, TRACE_PARENT, &trace.0);
    }
    if app.is_draining() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Begins the record of a request. All log lines about the request carry its id and its place in the trace.
fn arrival(request: &Request, id: &RequestId, trace: Option<&TraceParent>) -> ArrivalRecord {
    let route = request.extensions().get::<MatchedPath>().map_or(NO_ROUTE, MatchedPath::as_str);
    let trace = Trace::after(trace.map(|trace| &*trace.0));
    ArrivalRecord {
        id: Arc::clone(&id.0),
        method: request.method().to_string(),
        route: route.to_owned(),
        span: tracing::info_span!("request", request_id = %id.0, traceparent = %trace),
        trace,
    }
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// Returns the caller's own id if it is short and printable, otherwise a new one.
fn id_of(headers: &HeaderMap) -> Arc<str> {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let given =
        given.filter(|id| (1..=MAX_ID_BYTES).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic()));
    given.map_or_else(|| format!("{:016x}", random_u64()).into(), Into::into)
}

/// Parses `00-<32 hexadecimal digits>-<16>-<2>`; anything else is ignored.
fn trace_parent(headers: &HeaderMap) -> Option<TraceParent> {
    let text = headers.get(TRACE_PARENT)?.to_str().ok()?;
    let hex = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let parts: Vec<&str> = text.split('-').collect();
    let lengths = [2, 32, 16, 2];
    let fits = text.len() == TRACE_PARENT_BYTES
        && parts.len() == lengths.len()
        && parts.iter().zip(lengths).all(|(part, length)| part.len() == length && hex(part));
    (fits && parts[0] == "00").then(|| TraceParent(text.into()))
}

#[expect(clippy::needless_pass_by_value, reason = "the signature is the layer's")]
pub(crate) fn panicked(panic: Box<dyn Any + Send>) -> Response<Body> {
    let text =
        panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    tracing::error!(panic = text.unwrap_or("unknown"), "a request handler panicked");
    ApiError::internal("internal server error; see the server's log").into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn a_callers_id_is_taken_over_if_it_is_short_and_printable() {
        assert_eq!(&*id_of(&with(REQUEST_ID, "my-id/7")), "my-id/7");
        for bad in ["", "two words", &"x".repeat(129)] {
            assert_ne!(&*id_of(&with(REQUEST_ID, bad)), bad);
        }
    }

    #[test]
    fn a_trace_is_taken_over_only_as_the_standard_writes_it() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(trace_parent(&with(TRACE_PARENT, good)), Some(TraceParent(good.into())));
        for bad in [
            &good[..54],
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            &good.to_uppercase(),
            "x",
        ] {
            assert_eq!(trace_parent(&with(TRACE_PARENT, bad)), None, "{bad}");
        }
    }
}
