//! Log, metrics and traces of requests, written from one record per request. Traces need the
//! option `--otlp-endpoint`.
//!
//! - [`record`]: the data of a request; [`request`]: the middleware that collects it.
//! - [`trace`]: the W3C `traceparent` header.
//! - [`sinks`]: metrics and trace exporter; `otlp`: spans, sent in batches.
//!
//! Log lines are written to standard error synchronously: a slow reader blocks the writer, and no line is
//! lost. Prompts, answers and keys are never logged, at any level.

pub(crate) mod otlp;
pub(crate) mod record;
pub(crate) mod request;
pub mod sinks;
pub(crate) mod trace;

pub use self::sinks::{EndpointError, Sinks};
pub(crate) use self::{
    record::{ArrivalRecord, Generated},
    request::{began, current_id, failed, generated, is_fault, observe, started},
};
