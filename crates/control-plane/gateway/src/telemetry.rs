//! What happened to a request, told three ways from one record: a line of the log, figures, and a span for a
//! collector of traces (with the cargo feature `otel`, and only if `--otlp-endpoint` is given).
//!
//! - [`record`]: what is known of a request; [`request`]: the middleware that learns it.
//! - [`trace`]: the W3C `traceparent` header.
//! - [`sinks`]: who is told beside the log; `otlp`: spans, sent in batches.
//!
//! The log is written to standard error as it happens: a reader that does not read holds the writer up, and no
//! line is ever lost. Neither prompts nor answers nor keys are written, at any level.

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
