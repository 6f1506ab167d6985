//! Receipts of answers: `GET /v1/receipts/key` and `POST /v1/receipts/verify`.
//!
//! # Modules
//!
//! - `replay`: checks a record against what is served, and turns it into a request that replays it.
//! - `mismatch`: the part of a receipt that does not hold.

mod mismatch;
mod replay;

use std::sync::Arc;

use axum::{Json, extract::State};
use receipts::Receipt;
use serde_json::{Value, json};

use self::{mismatch::ReceiptMismatch, replay::Replay};
use super::{request_context::RequestContext, strict_fields::StrictFields};
use crate::{app::App, errors::ApiError};

/// Field with the receipt to verify.
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
    Ok(Json(verified.map_or_else(|mismatch| mismatch.body(), valid)))
}

/// Reads the body of a verification. The field `model` of the body only chooses one of several bases.
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

/// Result of a verification: the number of confirmed tokens, or the part that does not hold.
type Verdict = Result<usize, ReceiptMismatch>;
