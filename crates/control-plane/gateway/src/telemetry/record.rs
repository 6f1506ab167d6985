//! What is known of a request: when it comes, once it has generated, and when it has ended.

use std::{sync::Arc, time::Duration};

use tracing::Span;

use super::trace::Trace;
use crate::{metrics::meter::AdmissionWaits, usage::Usage};

/// Who asks for what.
#[derive(Debug, Clone)]
pub struct ArrivalRecord {
    /// What the request is called.
    pub id: Arc<str>,
    /// Its HTTP method.
    pub method: String,
    /// The path of the table it matched, or `none`.
    pub route: String,
    /// Where it stands in a trace.
    pub trace: Trace,
    /// What the log knows it by.
    pub span: Span,
}

/// What a generation came to.
#[derive(Debug, Clone)]
pub struct Generated {
    /// The model as the caller named it.
    pub model: String,
    /// The generation that answered; `None` is the base model.
    pub generation: Option<String>,
    /// Tokens of prompt and completion, as its caller was told.
    pub usage: Usage,
    /// From the request's start to its first token.
    pub first_token: Option<Duration>,
    /// What it waited for of that time.
    pub waits: Option<AdmissionWaits>,
    /// How its choices ended, each way once.
    pub finish: String,
    /// How often a sequence was redone.
    pub redone: u32,
}

/// What is known of a request that has ended.
#[cfg(feature = "otel")]
#[derive(Debug, Clone)]
pub struct SpanRecord {
    /// Who asked for what.
    pub arrival: ArrivalRecord,
    /// The HTTP status.
    pub status: u16,
    /// The code of its error.
    pub error: Option<&'static str>,
    /// From its arrival to its last byte.
    pub duration: Duration,
    /// What was generated.
    pub generated: Option<Generated>,
}
