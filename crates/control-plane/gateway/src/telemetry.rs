//! Log, metrics and traces of requests, written from one record per request. Traces need the cargo feature
//! `otel` and the option `--otlp-endpoint`.
//!
//! - [`record`]: the data of a request; [`request`]: the middleware that collects it.
//! - [`trace`]: the W3C `traceparent` header.
//! - [`sinks`]: metrics and trace exporter; `otlp`: spans, sent in batches.
//!
//! Log lines are written to standard error synchronously: a slow reader blocks the writer, and no line is
//! lost. Prompts, answers and keys are never logged, at any level.

#[cfg(feature = "otel")]
pub mod otlp;
pub mod record;
pub mod request;
pub mod sinks;
pub mod trace;

use std::io::IsTerminal as _;

use settings::LogFormat;
use tracing_subscriber::EnvFilter;

pub use self::{
    record::{ArrivalRecord, Generated},
    request::{began, current_id, failed, generated, is_fault, observe, started},
    sinks::{EndpointError, Sinks},
};

/// Starts the log; `RUST_LOG` sets its filter.
pub fn start(format: LogFormat) {
    let json = match format {
        LogFormat::Json => true,
        LogFormat::Human => false,
        LogFormat::Auto => !std::io::stderr().is_terminal(),
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json { log.json().with_span_list(false).init() } else { log.init() }
}
