//! Spans for a collector of traces: OTLP over HTTP, in its JSON form, by OpenTelemetry's own crates.
//!
//! One span for each request, with the attribute names of OpenTelemetry's conventions for HTTP and for generative
//! models. Their tracer would draw ids of its own, where [`trace`](super::trace) has told them to the caller already:
//! a span is made whole when its request has ended, and handed to their processor, which batches and sends on a thread
//! of its own. Collectors stand beside the gateway, so there is no TLS.
//!
//! Nothing waits for a collector: at most [`QUEUE_SPANS`] are on their way, and what does not fit or cannot be
//! delivered is lost, counted and said in the log. The counting is ours ([`SpanCounters`]): the processor tells what it had no
//! room for once, and how much at its end, and does not count what it could not deliver.

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

/// Spans that wait to be sent or are being sent.
const QUEUE_SPANS: usize = 2048;
/// Most spans in one message.
const BATCH_SPANS: usize = 256;
/// How long a span waits for company.
const BATCH_TIME: Duration = Duration::from_secs(1);
/// How long one message may take, and until when it is tried again.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the end of the gateway waits for what is still to be sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// A handle to the thread that sends.
#[derive(Debug, Clone)]
pub struct Exporter {
    processor: Arc<BatchSpanProcessor>,
    tally: Arc<SpanCounters>,
}

impl Exporter {
    /// Starts to send to the collector at `endpoint` (`http://host:port`, to which `/v1/traces` is added). `None` if
    /// it is no such address.
    #[must_use]
    pub fn start(endpoint: &str) -> Option<Self> {
        let collector = traces_url(endpoint)?;
        let refused = |error: &ExporterBuildError| tracing::error!(%error, "traces cannot be sent");
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

    /// Queues a span, if its trace is kept.
    pub fn send(&self, record: &SpanRecord) {
        if record.arrival.trace.sampled == TraceFlag::Yes && self.tally.admit() {
            self.processor.on_end(span(record));
        }
    }

    /// Sends what waits, as far as [`FLUSH_TIMEOUT`] allows, and nothing after it.
    pub async fn close(&self) {
        let processor = Arc::clone(&self.processor);
        let flushed = spawn_blocking(move || processor.shutdown_with_timeout(FLUSH_TIMEOUT));
        // Its own limit does not hold while it waits for a thread.
        let _ = timeout(FLUSH_TIMEOUT, flushed).await;
        self.tally.abandon();
    }
}

/// What becomes of spans.
#[derive(Debug)]
struct SpanCounters {
    /// The collector's address.
    collector: String,
    /// Spans that are queued or being sent.
    waiting: AtomicUsize,
    /// Spans that will not arrive, and of which the log has not told yet.
    lost: AtomicUsize,
}

impl SpanCounters {
    /// Whether there is room for one more span, which has it then.
    fn admit(&self) -> bool {
        let has_room = self.waiting.fetch_add(1, Ordering::Relaxed) < QUEUE_SPANS;
        if !has_room {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// A message of `spans` was delivered, or was not.
    fn sent(&self, spans: usize, result: &OTelSdkResult) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        if result.is_err() {
            self.lost.fetch_add(spans, Ordering::Relaxed);
        }
        self.log_lost(result.as_ref().err());
    }

    /// Nothing more will be sent.
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

/// The library's exporter, whose deliveries are counted.
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

/// How the library reaches the collector: from the processor's thread, which may wait.
#[derive(Debug)]
struct CollectorClient(Agent);

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // The library tells only that there was an error.
        let told = |error: &ureq::Error| tracing::debug!(%error, "the collector was not reached");
        let response = self.0.run(request.map(Vec::from)).inspect_err(told)?;
        // The body says nothing that is needed; it is read so that the connection serves again.
        Ok(response.map(|mut body| body.read_to_vec().unwrap_or_default().into()))
    }
}

/// Where the collector at `endpoint` takes traces.
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

/// The names are those of OpenTelemetry's conventions for generative models; `holobiont.` where they have none.
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
