//! Sends spans to a trace collector: OTLP over HTTP in JSON, with OpenTelemetry's crates.
//!
//! Each request is one span, with attribute names of OpenTelemetry's conventions for HTTP and generative
//! models. OpenTelemetry's tracer would generate its own ids, but [`trace`](super::trace) has already sent
//! ids to the caller. Therefore each span is built when its request ends and given to OpenTelemetry's
//! processor, which sends batches on its own thread. Collectors run beside the gateway, so there is no TLS.
//!
//! Requests never wait for a collector: at most [`QUEUE_SPANS`] spans are queued, and further or
//! undeliverable spans are dropped, counted and logged. [`SpanCounters`] counts them, because the processor
//! reports a full queue only once, its total only at shutdown, and failed deliveries not at all.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use hyper::Uri;
use opentelemetry::{
    Array, InstrumentationScope, KeyValue, Value,
    trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceState},
};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter as OtlpExporter, WithExportConfig as _, WithHttpConfig as _,
};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks,
        SpanProcessor as _,
    },
};
use tokio::{task::spawn_blocking, time::timeout};
use ureq::Agent;

use super::{
    record::{ArrivalRecord, Generated, SpanRecord},
    trace::TraceFlag,
};

/// Maximum number of spans that are queued or being sent.
const QUEUE_SPANS: usize = 2048;
const BATCH_SPANS: usize = 256;
/// Time that a span waits for others to share its batch.
const BATCH_TIME: Duration = Duration::from_secs(1);
/// Timeout of one message, retries included.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that shutdown waits for queued spans.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone)]
pub(crate) struct Exporter {
    processor: Arc<BatchSpanProcessor>,
    tally: Arc<SpanCounters>,
}

impl Exporter {
    /// Starts the export to the collector at `endpoint` (`http://host:port`, to which `/v1/traces` is added).
    /// Returns `None` if the address is invalid.
    #[must_use]
    pub(crate) fn start(endpoint: &str) -> Option<Self> {
        let collector = traces_url(endpoint)?;
        let refused = |error: &ExporterBuildError| tracing::error!(%error, "cannot send traces");
        let exporter = otlp_exporter(&collector).inspect_err(refused).ok()?;
        let tally =
            Arc::new(SpanCounters { collector, waiting: AtomicUsize::new(0), lost: AtomicUsize::new(0) });
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(QUEUE_SPANS)
            .with_max_export_batch_size(BATCH_SPANS)
            .with_scheduled_delay(BATCH_TIME)
            .build();
        let counted = CountedExporter { exporter, tally: Arc::clone(&tally) };
        Some(Self { processor: Arc::new(BatchSpanProcessor::new(counted, batches)), tally })
    }

    /// Queues a span if its trace is sampled.
    pub(crate) fn send(&self, record: &SpanRecord) {
        if record.arrival.trace.sampled == TraceFlag::Yes && self.tally.admit() {
            self.processor.on_end(span(record));
        }
    }

    /// Sends queued spans within [`FLUSH_TIMEOUT`] and stops the export.
    pub(crate) async fn close(&self) {
        let processor = Arc::clone(&self.processor);
        let flushed = spawn_blocking(move || processor.shutdown_with_timeout(FLUSH_TIMEOUT));
        // The processor's own timeout does not cover the wait for a blocking thread.
        let _ = timeout(FLUSH_TIMEOUT, flushed).await;
        self.tally.abandon();
    }
}

#[derive(Debug)]
struct SpanCounters {
    collector: String,
    /// Number of spans that are queued or being sent.
    waiting: AtomicUsize,
    /// Number of lost spans that are not logged yet.
    lost: AtomicUsize,
}

impl SpanCounters {
    /// Counts a span if the queue has capacity for it; returns whether it has.
    fn admit(&self) -> bool {
        let has_room = self.waiting.fetch_add(1, Ordering::Relaxed) < QUEUE_SPANS;
        if !has_room {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// Counts the result of a message with `spans` spans.
    fn sent(&self, spans: usize, result: &OTelSdkResult) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        if result.is_err() {
            self.lost.fetch_add(spans, Ordering::Relaxed);
        }
        self.log_lost(result.as_ref().err());
    }

    /// Counts all waiting spans as lost.
    fn abandon(&self) {
        self.lost.fetch_add(self.waiting.load(Ordering::Relaxed), Ordering::Relaxed);
        self.log_lost(Some("the gateway has ended"));
    }

    fn log_lost(&self, reason: Option<impl fmt::Display>) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let reason = reason.map(tracing::field::display);
            tracing::warn!(lost, reason, collector = self.collector, "spans were lost");
        }
    }
}

/// OpenTelemetry's exporter with counted deliveries.
#[derive(Debug)]
struct CountedExporter {
    exporter: OtlpExporter,
    tally: Arc<SpanCounters>,
}

impl SpanExporter for CountedExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let result = self.exporter.export(batch).await;
        self.tally.sent(spans, &result);
        result
    }
}

/// HTTP client of the exporter, which blocks on the processor's thread.
#[derive(Debug)]
struct CollectorClient(Agent);

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // Logged here, because the library does not report the cause.
        let log = |error: &ureq::Error| tracing::debug!(%error, "cannot reach the collector");
        let response = self.0.run(request.map(Vec::from)).inspect_err(log)?;
        // The body is read so that the connection can be reused.
        Ok(response.map(|mut body| body.read_to_vec().unwrap_or_default().into()))
    }
}

fn traces_url(endpoint: &str) -> Option<String> {
    let uri: Uri = endpoint.parse().ok()?;
    let authority = uri.authority().filter(|_| uri.scheme_str() == Some("http"))?;
    let port = authority.port_u16().unwrap_or(80);
    Some(format!("http://{}:{port}{}/v1/traces", authority.host(), uri.path().trim_end_matches('/')))
}

fn otlp_exporter(url: &str) -> Result<OtlpExporter, ExporterBuildError> {
    let agent = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .timeout_global(Some(SEND_TIMEOUT))
        .build();
    let mut exporter = OtlpExporter::builder()
        .with_http()
        .with_http_client(CollectorClient(agent.into()))
        .with_protocol(Protocol::HttpJson)
        .with_endpoint(url)
        .with_timeout(SEND_TIMEOUT)
        .build()?;
    let service = [
        KeyValue::new("service.name", "holobiont-gateway"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ];
    exporter.set_resource(&Resource::builder_empty().with_attributes(service).build());
    Ok(exporter)
}

fn span(record: &SpanRecord) -> SpanData {
    let ArrivalRecord { id, method, route, trace, .. } = &record.arrival;
    let (trace_id, span_id) = (trace.trace.into(), trace.span.into());
    let end = SystemTime::now();
    let mut attributes = vec![
        KeyValue::new("http.request.method", method.clone()),
        KeyValue::new("http.route", route.clone()),
        KeyValue::new("http.response.status_code", i64::from(record.status)),
        KeyValue::new("holobiont.request_id", Arc::clone(id)),
    ];
    attributes.extend(record.error.map(|code| KeyValue::new("error.type", code)));
    attributes.extend(record.generated.iter().flat_map(generation_attributes));
    SpanData {
        span_context: SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, TraceState::NONE),
        parent_span_id: trace.parent.map_or(SpanId::INVALID, SpanId::from),
        parent_span_is_remote: trace.parent.is_some(),
        span_kind: SpanKind::Server,
        name: format!("{method} {route}").into(),
        start_time: end.checked_sub(record.duration).unwrap_or(end),
        end_time: end,
        attributes,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: if record.error.is_some() { Status::error("") } else { Status::Unset },
        instrumentation_scope: InstrumentationScope::builder("gateway").build(),
    }
}

/// Returns attributes with OpenTelemetry's names for generative models, or our own with `holobiont.`.
fn generation_attributes(generated: &Generated) -> Vec<KeyValue> {
    let Generated { model, generation, usage, first_token, finish, redone, waits: _ } = generated;
    let reasons = finish.split(',').map(|reason| reason.to_owned().into()).collect();
    let mut attributes = vec![
        KeyValue::new("gen_ai.provider.name", "holobiont"),
        KeyValue::new("gen_ai.request.model", model.clone()),
        tokens("gen_ai.usage.input_tokens", usage.prompt_tokens),
        tokens("gen_ai.usage.output_tokens", usage.completion_tokens),
        tokens("holobiont.cached_tokens", usage.prompt_tokens_details.cached_tokens),
        KeyValue::new("holobiont.redone", i64::from(*redone)),
        KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons))),
    ];
    let generation = generation.iter().map(|id| KeyValue::new("holobiont.generation", id.clone()));
    attributes.extend(generation);
    let seconds = first_token.map(|time| time.as_secs_f64());
    attributes.extend(seconds.map(|seconds| KeyValue::new("gen_ai.server.time_to_first_token", seconds)));
    attributes
}

fn tokens(key: &'static str, count: usize) -> KeyValue {
    KeyValue::new(key, i64::try_from(count).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_reached_over_http_alone() {
        let url = |endpoint| traces_url(endpoint).unwrap();
        assert_eq!(url("http://localhost:4318/"), "http://localhost:4318/v1/traces");
        assert_eq!(url("http://c/base"), "http://c:80/base/v1/traces");
        for bad in ["https://localhost:4318", "localhost:4318", "", "http://"] {
            assert_eq!(traces_url(bad), None, "{bad}");
        }
    }

    #[test]
    fn spans_without_room_and_spans_not_delivered_are_counted_as_lost() {
        let tally = SpanCounters {
            collector: String::new(),
            waiting: AtomicUsize::new(0),
            lost: AtomicUsize::new(0),
        };
        let admitted = (0..QUEUE_SPANS + 10).filter(|_| tally.admit()).count();
        assert_eq!((admitted, tally.lost.load(Ordering::Relaxed)), (QUEUE_SPANS, 10));
        tally.sent(BATCH_SPANS, &Ok(()));
        assert_eq!(tally.waiting.load(Ordering::Relaxed), QUEUE_SPANS - BATCH_SPANS);
        assert_eq!(tally.lost.load(Ordering::Relaxed), 0, "it was told");
        assert!(tally.admit(), "there is room again");
    }
}
