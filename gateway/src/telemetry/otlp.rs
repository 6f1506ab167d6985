//! Spans for a collector of traces: OTLP over HTTP, in its JSON form.
//!
//! Written by hand on the HTTP library that is here anyway: the messages are one page, where the OpenTelemetry SDK
//! with its exporter is some fifty crates. One span for each request, with the attribute names of OpenTelemetry's
//! conventions for HTTP and for generative models. Collectors stand beside the gateway, so there is no TLS.
//!
//! Nothing waits for a collector: spans queue up to [`QUEUE_SPANS`], and what does not fit or cannot be delivered is
//! lost, counted and said in the log.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, StatusCode, Uri,
    body::Bytes,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    sync::mpsc,
    time::{MissedTickBehavior, timeout},
};

use super::{
    record::{Arrival, Generated, SpanRecord},
    trace::Sampled,
};

/// Spans that wait to be sent.
const QUEUE_SPANS: usize = 2048;
/// Most spans in one message.
const BATCH_SPANS: usize = 256;
/// How long a span waits for company.
const BATCH_TIME: Duration = Duration::from_secs(1);
/// How long one message may take.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// OpenTelemetry's number for a span of a server.
const KIND_SERVER: u8 = 2;
/// OpenTelemetry's number for a span that ended in an error.
const STATUS_ERROR: u8 = 2;

/// A handle to the task that sends.
#[derive(Debug, Clone)]
pub struct Exporter {
    queue: mpsc::Sender<Value>,
    lost: Arc<AtomicU64>,
}

/// Where a collector listens.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Collector {
    /// `host:port`.
    authority: String,
    path: String,
}

impl Exporter {
    /// Starts to send to the collector at `endpoint` (`http://host:port`, to which `/v1/traces` is added). `None` if
    /// it is no such address.
    #[must_use]
    pub fn start(endpoint: &str) -> Option<Self> {
        let collector = Collector::parse(endpoint)?;
        let (queue, spans) = mpsc::channel(QUEUE_SPANS);
        let lost = Arc::new(AtomicU64::new(0));
        tokio::spawn(send_all(collector, spans, Arc::clone(&lost)));
        Some(Self { queue, lost })
    }

    /// Queues a span, if its trace is kept.
    pub fn send(&self, record: &SpanRecord) {
        if record.arrival.trace.sampled == Sampled::Yes && self.queue.try_send(span(record)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Collector {
    fn parse(endpoint: &str) -> Option<Self> {
        let uri: Uri = endpoint.parse().ok()?;
        let authority = uri.authority().filter(|_| uri.scheme_str() == Some("http"))?;
        let port = authority.port_u16().unwrap_or(80);
        Some(Self {
            authority: format!("{}:{port}", authority.host()),
            path: format!("{}/v1/traces", uri.path().trim_end_matches('/')),
        })
    }

    /// Sends one message over a connection of its own.
    async fn post(&self, body: Vec<u8>) -> Result<(), String> {
        let stream = TcpStream::connect(&self.authority).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        // It ends with the sender.
        tokio::spawn(connection);
        let request = Request::post(&self.path)
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let status = response.status();
        // The answer says nothing that is needed; it is read so that the collector is not cut off.
        let _ = response.into_body().collect().await;
        if status == StatusCode::OK { Ok(()) } else { Err(format!("it answered {status}")) }
    }
}

async fn send_all(collector: Collector, mut spans: mpsc::Receiver<Value>, lost: Arc<AtomicU64>) {
    let mut ticks = tokio::time::interval(BATCH_TIME);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut batch = Vec::new();
    loop {
        if spans.recv_many(&mut batch, BATCH_SPANS).await == 0 {
            return;
        }
        let count = batch.len() as u64;
        let message = message(&batch).to_string();
        batch.clear();
        let sent = timeout(SEND_TIMEOUT, collector.post(message.into_bytes())).await;
        let failed = sent.unwrap_or_else(|_| Err("it did not answer in time".to_owned())).err();
        if failed.is_some() {
            lost.fetch_add(count, Ordering::Relaxed);
        }
        let lost = lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            tracing::warn!(lost, reason = failed, collector = collector.authority, "spans were lost");
        }
        ticks.tick().await;
    }
}

fn message(spans: &[Value]) -> Value {
    let service =
        [text("service.name", "holobiont-gateway"), text("service.version", env!("CARGO_PKG_VERSION"))];
    json!({ "resourceSpans": [{
        "resource": { "attributes": service },
        "scopeSpans": [{ "scope": { "name": "gateway" }, "spans": spans }],
    }] })
}

fn span(record: &SpanRecord) -> Value {
    let Arrival { id, method, route, trace, .. } = &record.arrival;
    let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let start = end.saturating_sub(record.duration);
    let mut attributes = vec![
        text("http.request.method", method),
        text("http.route", route),
        number("http.response.status_code", record.status.into()),
        text("holobiont.request_id", id),
    ];
    attributes.extend(record.error.map(|code| text("error.type", code)));
    attributes.extend(record.generated.iter().flat_map(generation_attributes));
    let mut span = json!({
        "traceId": format!("{:032x}", trace.trace),
        "spanId": format!("{:016x}", trace.span),
        "name": format!("{method} {route}"),
        "kind": KIND_SERVER,
        "startTimeUnixNano": start.as_nanos().to_string(),
        "endTimeUnixNano": end.as_nanos().to_string(),
        "attributes": attributes,
        "status": if record.error.is_some() { json!({ "code": STATUS_ERROR }) } else { json!({}) },
    });
    if let Some(parent) = trace.parent {
        span["parentSpanId"] = json!(format!("{parent:016x}"));
    }
    span
}

/// The names are those of OpenTelemetry's conventions for generative models; `holobiont.` where they have none.
fn generation_attributes(generated: &Generated) -> Vec<Value> {
    let mut attributes = vec![
        text("gen_ai.provider.name", "holobiont"),
        text("gen_ai.request.model", &generated.model),
        number("gen_ai.usage.input_tokens", generated.usage.prompt_tokens as u64),
        number("gen_ai.usage.output_tokens", generated.usage.completion_tokens as u64),
        number("holobiont.cached_tokens", generated.usage.prompt_tokens_details.cached_tokens as u64),
        number("holobiont.redone", generated.redone.into()),
        json!({ "key": "gen_ai.response.finish_reasons", "value": { "arrayValue": {
            "values": generated.finish.split(',').map(|reason| json!({ "stringValue": reason })).collect::<Vec<_>>(),
        } } }),
    ];
    attributes
        .extend(generated.generation.as_ref().map(|generation| text("holobiont.generation", generation)));
    attributes.extend(generated.first_token.map(|time| {
        json!({ "key": "gen_ai.server.time_to_first_token", "value": { "doubleValue": time.as_secs_f64() } })
    }));
    attributes
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

/// A whole number; JSON writes 64 bits as a string.
fn number(key: &str, value: u64) -> Value {
    json!({ "key": key, "value": { "intValue": value.to_string() } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_reached_over_http_alone() {
        let collector = Collector::parse("http://localhost:4318/").unwrap();
        assert_eq!((collector.authority.as_str(), collector.path.as_str()), ("localhost:4318", "/v1/traces"));
        assert_eq!(Collector::parse("http://c/base").unwrap().path, "/base/v1/traces");
        for bad in ["https://localhost:4318", "localhost:4318", "", "http://"] {
            assert!(Collector::parse(bad).is_none(), "{bad}");
        }
    }
}
