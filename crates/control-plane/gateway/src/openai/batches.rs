//! `/v1/batches`: files of requests that are answered in the background.

use std::{io, sync::Arc};

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde_json::{Value, json};

use super::{
    creation,
    fine_tuning_request::metadata,
    paging::{self, PageQuery},
    strict_fields::{StrictFields, whole, wrong},
};
use crate::{
    adapters::database::DatabaseError,
    app::App,
    batches::{
        BatchError,
        records::{BatchEndpoint, BatchRecord, BatchSpec, BatchStatus},
    },
    body::JsonBody,
    caller::Caller,
    errors::ApiError,
    training::TrainingError,
};

/// Maximum number of list items per page.
const MAX_PAGE: u32 = 100;
/// The only window of OpenAI's API.
const WINDOW: &str = "24h";
/// Bounds of `output_expires_after.seconds`, as in OpenAI's API: an hour and 30 days.
const OUTPUT_TTL_S: std::ops::RangeInclusive<u64> = 3600..=2_592_000;

impl BatchSpec {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub(crate) fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let input_file = fields.required_text("input_file_id")?;
        let endpoint = endpoint(&fields.required_text("endpoint")?)?;
        let window = fields.required_text("completion_window")?;
        if window != WINDOW {
            let message = format!("'completion_window' must be '{WINDOW}', not '{window}'");
            return Err(ApiError::invalid("completion_window", message));
        }
        let output_ttl_s = fields.take("output_expires_after").map(output_ttl_s).transpose()?;
        let metadata = metadata(&mut fields)?;
        fields.finish()?;
        Ok(Self { endpoint, input_file, output_ttl_s, metadata })
    }
}

fn endpoint(path: &str) -> Result<BatchEndpoint, ApiError> {
    BatchEndpoint::ALL.into_iter().find(|endpoint| endpoint.path() == path).ok_or_else(|| {
        let known = BatchEndpoint::ALL.map(|endpoint| format!("'{}'", endpoint.path())).join(", ");
        ApiError::invalid("endpoint", format!("'endpoint' must be one of {known}"))
    })
}

fn output_ttl_s(value: Value) -> Result<u64, ApiError> {
    const FIELD: &str = "output_expires_after";
    let mut inside = StrictFields::of(value, FIELD)?;
    let mut read = || {
        if inside.required_text("anchor")? != "created_at" {
            return Err(ApiError::invalid("anchor", "'anchor' must be 'created_at'"));
        }
        let seconds = inside.take("seconds").unwrap_or_default();
        let number = whole(&seconds).and_then(|number| u64::try_from(number).ok());
        number.filter(|number| OUTPUT_TTL_S.contains(number)).ok_or_else(|| {
            let expected = format!("an integer from {} to {}", OUTPUT_TTL_S.start(), OUTPUT_TTL_S.end());
            wrong("seconds", &expected, &seconds)
        })
    };
    let seconds = read().map_err(|error| error.within(FIELD))?;
    inside.finish().map_err(|error| error.within(FIELD))?;
    Ok(seconds)
}

/// Creates a batch; answers when the batch is durable.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let spec = BatchSpec::read(&body)?;
    let (batches, tenant) = (Arc::clone(&app.batches), Arc::clone(&caller.tenant));
    let create = async move { batches.create(spec, (&caller.tenant, caller.role.into())).await };
    let slots = (app.batches.creation_slots(), &tenant);
    let batch = creation::create(slots, app.connections.body_timeout, "batches", create).await?;
    Ok(Json(describe(&batch)))
}

/// Lists the caller's batches, newest first.
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let listed = app.batches.list(&caller.tenant, &page.checked(MAX_PAGE)?).await?;
    Ok(Json(paging::list(&listed.items.iter().map(describe).collect::<Vec<_>>(), listed.has_more)))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.batches.batch(&id, &caller.tenant).await?)))
}

/// Cancels a batch; its results so far are kept.
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.batches.cancel(&id, &caller.tenant).await?)))
}

fn describe(batch: &BatchRecord) -> Value {
    let at = |status: BatchStatus| batch.entered.get(&status);
    let errors = (!batch.faults.is_empty()).then(|| json!({ "object": "list", "data": batch.faults }));
    let usage = &batch.usage;
    json!({
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.spec.endpoint.path(),
        "errors": errors,
        "input_file_id": batch.spec.input_file,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created_at(),
        "in_progress_at": at(BatchStatus::InProgress),
        "expires_at": batch.expires_at,
        "finalizing_at": at(BatchStatus::Finalizing),
        "completed_at": at(BatchStatus::Completed),
        "failed_at": at(BatchStatus::Failed),
        "expired_at": at(BatchStatus::Expired),
        "cancelling_at": at(BatchStatus::Cancelling),
        "cancelled_at": at(BatchStatus::Cancelled),
        "request_counts": batch.counts,
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": { "cached_tokens": usage.cached_tokens },
            "output_tokens": usage.output_tokens,
            "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": batch.spec.metadata,
    })
}

impl From<BatchError> for ApiError {
    fn from(error: BatchError) -> Self {
        let message = error.to_string();
        match error {
            BatchError::Files(error @ (TrainingError::NoFile(_) | TrainingError::WrongPurpose { .. })) => {
                Self::from(error).of("input_file_id")
            }
            BatchError::Files(error) => error.into(),
            BatchError::Database(DatabaseError::Full) => Self::no_room("insufficient_storage", message),
            BatchError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Self::no_room("insufficient_storage", message)
            }
            BatchError::Database(_) | BatchError::Io { .. } => Self::registry_unavailable(message),
            BatchError::NoBatch(_) => Self::not_found(message),
            BatchError::Ended(_) => Self::bad_request("invalid_batch_state", message),
            BatchError::TooMany(_) => Self::busy("batch_quota_exceeded", message),
            BatchError::Stopped(_) => Self::internal(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(change: impl FnOnce(&mut Value)) -> Result<BatchSpec, ApiError> {
        let mut body = json!({
            "input_file_id": "file-1",
            "endpoint": "/v1/responses",
            "completion_window": "24h",
            "output_expires_after": { "anchor": "created_at", "seconds": 3600 },
            "metadata": { "a": "b" },
        });
        change(&mut body);
        BatchSpec::read(body.to_string().as_bytes())
    }

    #[test]
    fn a_request_is_read_and_each_wrong_field_is_named() {
        let spec = read(|_| {}).unwrap();
        assert_eq!((spec.endpoint, spec.output_ttl_s), (BatchEndpoint::Responses, Some(3600)));
        assert_eq!(spec.metadata["a"], "b");
        for (field, value) in [
            ("input_file_id", json!(7)),
            ("endpoint", json!("/v1/images")),
            ("completion_window", json!("1h")),
            ("output_expires_after", json!(3600)),
            ("output_expires_after.seconds", json!({ "anchor": "created_at", "seconds": 3599 })),
            ("output_expires_after.seconds", json!({ "anchor": "created_at" })),
            ("output_expires_after.anchor", json!({ "anchor": "now", "seconds": 3600 })),
            ("metadata", json!("x")),
            ("other", json!(1)),
        ] {
            let name = field.split('.').next().unwrap();
            let error = read(|body| body[name] = value).unwrap_err();
            assert!(error.to_string().contains(field), "{field}: {error}");
        }
    }
}
