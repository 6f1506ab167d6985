//! Records of a request: at arrival, after generation, and at the end.

use std::{sync::Arc, time::Duration};

use tracing::Span;

use super::trace::Trace;
use crate::{metrics::meter::AdmissionWaits, usage::Usage};

#[derive(Debug, Clone)]
pub(crate) struct ArrivalRecord {
    pub id: Arc<str>,
    pub method: String,
    /// Matched path of the route table, or `none`.
    pub route: String,
    pub trace: Trace,
    /// Span of the log.
    pub span: Span,
}

#[derive(Debug, Clone)]
pub(crate) struct Generated {
    pub model: String,
    /// Version of the adapter; `None` for the base model.
    pub generation: Option<String>,
    /// Token counts, as sent to the caller.
    pub usage: Usage,
    /// Time from the request's start to its first token.
    pub first_token: Option<Duration>,
    /// Parts of the time to first token that were waits.
    pub waits: Option<AdmissionWaits>,
    /// Distinct finish reasons of the choices, comma-separated.
    pub finish: String,
    /// Number of times that sequences were resumed on an executor.
    pub redone: u32,
}

/// A finished request, for a span.
#[derive(Debug, Clone)]
pub(crate) struct SpanRecord {
    pub arrival: ArrivalRecord,
    pub status: u16,
    /// Error code, if the request failed.
    pub error: Option<&'static str>,
    pub duration: Duration,
    pub generated: Option<Generated>,
}
