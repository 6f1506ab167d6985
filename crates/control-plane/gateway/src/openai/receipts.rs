//! Receipts of answers: `GET /v1/receipts/key` and `POST /v1/receipts/verify`.
//!
//! # Modules
//!
//! - [`record`]: records an answer while it is generated.
//! - `replay`: checks a record against what is served, and turns it into a request that replays it.
//! - `mismatch`: the part of a receipt that does not hold.

mod mismatch;
pub(crate) mod record;
mod replay;

use std::sync::Arc;

use axum::{Json, extract::State};
use receipts::Receipt;
use serde_json::{Value, json};
use shmproto::message::DeviceKind;

use self::{mismatch::ReceiptMismatch, replay::Replay};
use super::{
    generation_request::GenerationRequest, request_context::RequestContext, strict_fields::StrictFields,
};
use crate::{app::App, errors::ApiError};

/// Field that asks for a receipt, and field with the receipt to verify.
const FIELD: &str = "receipt";

/// Returns the public key, which checks the signatures of this deployment.
pub(crate) async fn key(State(app): State<Arc<App>>) -> Json<Value> {
    Json(
        json!({ "object": "receipt.key", "algorithm": "ed25519", "public_key": app.receipt_key.public_key() }),
    )
}

/// Verifies a receipt: signature and chain, base, adapter and settings, then every token by a replay.
pub(crate) async fn verify(
    State(app): State<Arc<App>>,
    ask: RequestContext,
) -> Result<Json<Value>, ApiError> {
    let shared = Arc::clone(&app);
    let prepared = app
        .bodies
        .run(ask.body.origin(), move || {
            let receipt = read_receipt(&ask.body)?;
            Replay::prepare(receipt, &shared, &ask.caller, ask.serving)
        })
        .await?;
    let verified = match prepared {
        Ok(replay) => replay.run(&app).await?,
        Err(mismatch) => Err(mismatch),
    };
    Ok(Json(verified.map_or_else(|mismatch| mismatch.body(), |tokens| valid(tokens))))
}

/// Reads the body of a verification. Its field `model` only chooses one of several bases.
///
/// # Errors
/// The body has no receipt, or a field of the receipt has a wrong type.
pub fn read_receipt(body: &[u8]) -> Result<Receipt, ApiError> {
    let mut fields = StrictFields::parse(body)?;
    fields.text("model")?;
    let receipt = fields.take(FIELD);
    fields.finish()?;
    let receipt = receipt.ok_or_else(|| {
        ApiError::missing(FIELD, "'receipt' is required: the object that an answer has under this name")
    })?;
    serde_json::from_value(receipt)
        .map_err(|error| ApiError::invalid(FIELD, format!("'receipt' is not a receipt: {error}")))
}

fn valid(tokens: usize) -> Value {
    json!({ "object": "receipt.verdict", "valid": true, "tokens": tokens })
}

/// Refuses requests for receipts that cannot be given.
pub(crate) fn check(job: &GenerationRequest) -> Result<(), ApiError> {
    if !job.params.with_receipt {
        return Ok(());
    }
    let refused = |message: &str| Err(ApiError::invalid(FIELD, message));
    if job.choices() != 1 {
        return refused("'receipt' is for one answer; send one prompt and 'n': 1, or remove 'receipt'");
    }
    if !job.switches.is_empty() {
        return refused("'receipt' and 'adapter_switches' exclude each other; send one of them");
    }
    if job.params.max_tokens == Some(0) {
        return refused("'receipt' needs an answer; raise 'max_tokens', or remove 'receipt'");
    }
    if job.serving.welcome.device.kind != DeviceKind::Cpu {
        return refused("'receipt' is available only for a base on a CPU; remove it");
    }
    Ok(())
}

/// Result of a verification: the number of confirmed tokens, or the part that does not hold.
type Verdict = Result<usize, ReceiptMismatch>;
