//! One line of a batch: its request, repeated until the answer is final, and its result.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::body::Bytes;
use serde_json::value::RawValue;

use super::{
    input::InputLine,
    line_slots::LineSlots,
    records::BatchEndpoint,
    results::{LineError, LineResponse, LineResult},
    stats::BatchCounters,
};
use crate::{
    caller::{Caller, KeyRole},
    tenant_memory::Reservation,
};

/// Pause before the next search for a key of a line's tenant.
const KEY_WAIT: Duration = Duration::from_secs(1);
/// Maximum pause before a line is sent again, for any `Retry-After`.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Bytes of a body per token, for the estimate of a line's cost.
const BYTES_PER_TOKEN: usize = 4;

/// Request of a line.
#[derive(Debug, Clone)]
pub(crate) struct LineRequest {
    pub(crate) endpoint: BatchEndpoint,
    /// Unique id of the line. The seed of a request without one follows from it, so a line that is computed
    /// again gets the same answer.
    pub(crate) id: Arc<str>,
    pub(crate) body: Bytes,
}

/// Answer to a line's request.
#[derive(Debug, Clone)]
pub(crate) struct LineAnswer {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
    /// Pause after which the same request may succeed; `None` for a final answer.
    pub(crate) retry_after: Option<Duration>,
}

/// Answers lines by the code that answers online requests.
#[async_trait]
pub(crate) trait LineService: Send + Sync {
    /// Returns the caller in whose name lines of `tenant` run; `None` if no key of the tenant is left.
    fn caller(&self, tenant: &str, role: KeyRole) -> Option<Caller>;

    /// Answers a request. Dropping the future cancels the request.
    async fn answer(&self, caller: Caller, request: LineRequest) -> LineAnswer;
}

/// Parts that all lines of a batch share.
pub(super) struct LineContext {
    pub(super) tenant: Arc<str>,
    pub(super) role: KeyRole,
    pub(super) endpoint: BatchEndpoint,
    pub(super) service: Arc<dyn LineService>,
    pub(super) slots: Arc<LineSlots>,
    pub(super) counters: Arc<BatchCounters>,
}

impl LineContext {
    /// Computes a line; returns its result as JSON. `_memory` holds the bytes of the line.
    pub(super) async fn compute(
        self: Arc<Self>,
        line: InputLine,
        id: String,
        _memory: Reservation,
    ) -> serde_json::Result<String> {
        let cost_tokens = (line.body.len() / BYTES_PER_TOKEN) as u64;
        let request = LineRequest { endpoint: self.endpoint, id: id.as_str().into(), body: line.body.into() };
        let answer = loop {
            let Some(caller) = self.service.caller(&self.tenant, self.role) else {
                tokio::time::sleep(KEY_WAIT).await;
                continue;
            };
            let mut slot = self.slots.acquire(&self.tenant, cost_tokens).await;
            let answer = tokio::select! {
                answer = self.service.answer(caller, request.clone()) => answer,
                () = slot.revoked() => {
                    self.counters.preempt();
                    continue;
                }
            };
            slot.used(cost_tokens + (answer.body.len() / BYTES_PER_TOKEN) as u64);
            drop(slot);
            match answer.retry_after {
                None => break answer,
                Some(pause) => tokio::time::sleep(pause.min(MAX_PAUSE)).await,
            }
        };
        let body: &RawValue = serde_json::from_slice(&answer.body)?;
        let response = Some(LineResponse { status_code: answer.status, request_id: &id, body });
        let result = LineResult { id: &id, custom_id: &line.custom_id, response, error: None };
        serde_json::to_string(&result)
    }
}

/// Returns the result of a line that was not computed before the end of the window.
pub(super) fn expired(line: &InputLine, id: &str) -> serde_json::Result<String> {
    let message = "This request could not be executed before the completion window expired.";
    let error = Some(LineError { code: "batch_expired", message });
    serde_json::to_string(&LineResult { id, custom_id: &line.custom_id, response: None, error })
}
