//! The record of one HTTP request, from its arrival until the last byte of its answer.
//!
//! A task-local variable holds the record while the request is processed and its body is written, so handlers
//! do not pass it around. [`failed`] and [`generated`] add facts to the current record; outside a request
//! they do nothing.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::StatusCode,
    response::Response,
};
use hyper::body::{Frame, SizeHint};
use tracing::Instrument as _;

use super::{
    record::{ArrivalRecord, Generated},
    sinks::Sinks,
};

/// Status that is counted if the caller disconnects before the answer begins.
const CALLER_GONE: u16 = 499;

tokio::task_local! {
    static CURRENT: Arc<RequestRecord>;
}

#[derive(Debug, Clone)]
struct Failure {
    code: &'static str,
    /// Set for faults of this server.
    message: Option<String>,
}

#[derive(Debug, Default)]
struct RequestOutcome {
    status: Option<u16>,
    failure: Option<Failure>,
    generated: Option<Generated>,
    /// True once an output was received.
    began: bool,
}

#[derive(Debug)]
struct RequestRecord {
    arrival: ArrivalRecord,
    started: Instant,
    sinks: Sinks,
    outcome: Mutex<RequestOutcome>,
}

#[must_use]
pub(crate) fn current_id() -> Option<Arc<str>> {
    CURRENT.try_with(|request| Arc::clone(&request.arrival.id)).ok()
}

/// Returns the start time of the current request, or now outside a request.
#[must_use]
pub(crate) fn started() -> Instant {
    CURRENT.try_with(|request| request.started).unwrap_or_else(|_| Instant::now())
}

/// Records that the current request fails. Counts an error, and also a refusal if no output was produced.
pub(crate) fn failed(status: StatusCode, code: &'static str, message: &str) {
    with_current(|request, outcome| {
        request.sinks.metrics.failed(code);
        if !outcome.began && is_refusal(status) {
            request.sinks.metrics.refused(code);
        }
        let message = is_fault(status).then(|| message.to_owned());
        outcome.failure = Some(Failure { code, message });
    });
}

pub(crate) fn began() {
    with_current(|_, outcome| outcome.began = true);
}

pub(crate) fn generated(generated: Generated) {
    with_current(|_, outcome| outcome.generated = Some(generated));
}

fn with_current(note: impl FnOnce(&RequestRecord, &mut RequestOutcome)) {
    // Outside a request there is no record to change.
    let _ = CURRENT.try_with(|request| note(request, &mut request.outcome()));
}

/// True if the status is a fault of this server; an unsupported feature is none.
pub(crate) fn is_fault(status: StatusCode) -> bool {
    status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED
}

/// True if the status means that the request was refused.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status.as_u16(), 401 | 403 | 408 | 413 | 429 | 503)
}

/// Runs `answer` with a record of its request.
pub(crate) async fn observe(
    sinks: &Sinks,
    arrival: ArrivalRecord,
    answer: impl Future<Output = Response>,
) -> Response {
    let record = Arc::new(RequestRecord {
        arrival,
        started: Instant::now(),
        sinks: sinks.clone(),
        outcome: Mutex::default(),
    });
    // Dropped after the future, so that it sees facts recorded while the future is dropped.
    let mut unanswered = UnansweredRequest(Some(Arc::clone(&record)));
    let answer = answer.instrument(record.arrival.span.clone());
    let response = CURRENT.scope(Arc::clone(&record), answer).await;
    unanswered.0 = None;
    record.answered(response.status().as_u16());
    response.map(|body| Body::new(ObservedBody { body: Some(body), record }))
}

impl RequestRecord {
    fn outcome(&self) -> MutexGuard<'_, RequestOutcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answered(&self, status: u16) {
        self.sinks.metrics.answered(&self.arrival.route, status);
        self.outcome().status = Some(status);
    }

    /// Logs and exports the record; called once, at the end of the request.
    fn ended(&self) {
        let outcome = self.outcome();
        self.arrival.span.in_scope(|| self.log(&outcome));
        self.export(&outcome);
    }

    fn log(&self, outcome: &RequestOutcome) {
        let status = outcome.status.unwrap_or(CALLER_GONE);
        let failure = outcome.failure.as_ref();
        let generated = outcome.generated.as_ref();
        let usage = generated.map(|generated| &generated.usage);
        let waits = generated.and_then(|generated| generated.waits);
        // `tracing` requires a constant level.
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    method = self.arrival.method,
                    route = self.arrival.route,
                    status,
                    error = failure.map(|failure| failure.code),
                    detail = failure.and_then(|failure| failure.message.as_deref()),
                    model = generated.map(|generated| generated.model.as_str()),
                    generation = generated.and_then(|generated| generated.generation.as_deref()).map(short),
                    prompt_tokens = usage.map(|usage| usage.prompt_tokens),
                    completion_tokens = usage.map(|usage| usage.completion_tokens),
                    cached_tokens = usage.map(|usage| usage.prompt_tokens_details.cached_tokens),
                    ttft_ms = generated.and_then(|generated| generated.first_token).map(milliseconds),
                    queue_ms = waits.map(|waits| milliseconds(waits.alone())),
                    adapter_wait_ms = waits.map(|waits| milliseconds(waits.adapter)),
                    kv_wait_ms = waits.map(|waits| milliseconds(waits.kv)),
                    total_ms = milliseconds(self.started.elapsed()),
                    finish = generated.map(|generated| generated.finish.as_str()),
                    redone = generated.map(|generated| generated.redone).filter(|redone| *redone > 0),
                    "request finished"
                )
            };
        }
        if failure.is_some_and(|failure| failure.message.is_some()) {
            line!(error);
        } else if self.arrival.method == "GET" && status < 400 {
            // Probes and scrapes arrive every second.
            line!(debug);
        } else {
            line!(info);
        }
    }

    fn export(&self, outcome: &RequestOutcome) {
        if let Some(exporter) = &self.sinks.exporter {
            exporter.send(&super::record::SpanRecord {
                arrival: self.arrival.clone(),
                status: outcome.status.unwrap_or(CALLER_GONE),
                error: outcome.failure.as_ref().map(|failure| failure.code),
                duration: self.started.elapsed(),
                generated: outcome.generated.clone(),
            });
        }
    }
}

/// Returns the first characters of a version, enough to distinguish versions in the log.
fn short(generation: &str) -> &str {
    generation.get(..12).unwrap_or(generation)
}

/// Returns milliseconds with microsecond precision.
#[expect(clippy::cast_precision_loss, reason = "a time of 2^53 microseconds is centuries")]
fn milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

/// Ends the record of a request that is dropped without an answer.
struct UnansweredRequest(Option<Arc<RequestRecord>>);

impl Drop for UnansweredRequest {
    fn drop(&mut self) {
        if let Some(record) = self.0.take() {
            if std::thread::panicking() {
                let message = Some("a handler panicked".to_owned());
                record.sinks.metrics.failed("internal_error");
                record.outcome().failure = Some(Failure { code: "internal_error", message });
                record.answered(500);
            } else {
                record.answered(CALLER_GONE);
            }
            record.ended();
        }
    }
}

/// A response body; its end or drop ends the request's record.
struct ObservedBody {
    /// `None` only during `drop`.
    body: Option<Body>,
    record: Arc<RequestRecord>,
}

impl HttpBody for ObservedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let record = Arc::clone(&self.record);
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        CURRENT.sync_scope(Arc::clone(&record), || {
            record.arrival.span.in_scope(|| Pin::new(body).poll_frame(context))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, HttpBody::size_hint)
    }
}

impl Drop for ObservedBody {
    fn drop(&mut self) {
        let record = Arc::clone(&self.record);
        // Dropping the body drops the generation inside, which records its result.
        CURRENT.sync_scope(Arc::clone(&record), || drop(self.body.take()));
        record.ended();
    }
}
