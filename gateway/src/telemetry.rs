//! What happened to a request, told three ways from one record: a line of the log, figures, and a span for a
//! collector of traces (with the cargo feature `otel`, and only if `--otlp-endpoint` is given).
//!
//! - [`request`]: the record, and the middleware that keeps it.
//! - [`trace`]: the W3C `traceparent` header.
//! - `otlp`: spans, sent in batches.
//!
//! The log is written to standard error as it happens: a reader that does not read holds the writer up, and no
//! line is ever lost. Neither prompts nor answers nor keys are written, at any level.

#[cfg(feature = "otel")]
pub mod otlp;
pub mod request;
pub mod trace;

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

pub use self::request::{Arrival, Generated, began, current_id, failed, generated, observe, started};
use crate::{
    config::{Figures, LogFormat},
    metrics::Metrics,
};

/// Spans cannot be sent there.
#[derive(Debug, thiserror::Error)]
#[error(
    "--otlp-endpoint '{0}' cannot be used; give http://host:port of a collector that takes OTLP over HTTP (no TLS)"
)]
pub struct EndpointError(pub String);

/// Starts the log; `RUST_LOG` chooses what is in it.
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

/// Begins to send spans, if somebody is to have them.
#[cfg(feature = "otel")]
pub fn export(metrics: &Metrics, figures: &Figures) -> Result<(), EndpointError> {
    if let Some(endpoint) = &figures.otlp_endpoint {
        metrics.export_to(otlp::Exporter::start(endpoint)?);
    }
    Ok(())
}

/// Without the feature `otel` there is nothing that could send.
#[cfg(not(feature = "otel"))]
pub fn export(_metrics: &Metrics, figures: &Figures) -> Result<(), EndpointError> {
    match &figures.otlp_endpoint {
        None => Ok(()),
        Some(endpoint) => Err(EndpointError(endpoint.clone())),
    }
}
