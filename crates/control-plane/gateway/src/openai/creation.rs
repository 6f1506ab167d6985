//! Creation of objects that are durable before the answer: fine-tuning jobs and batches.

use std::{sync::Arc, time::Duration};

use crate::{errors::ApiError, tenant_slots::TenantSlots};

/// Waits at most `patience` for a slot of `tenant`, and runs `creation` to its end, even if the caller
/// disconnects. `what` names the objects in errors, in the plural.
pub(super) async fn create<T, E>(
    (slots, tenant): (&Arc<TenantSlots>, &Arc<str>),
    patience: Duration,
    what: &'static str,
    creation: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    E: Into<ApiError> + Send + 'static,
{
    // Acquired before the task starts, so a caller that disconnects while waiting leaves no task behind.
    let slot = slots.acquire(tenant, patience).await.ok_or_else(|| {
        ApiError::queue_full(1, format!("other {what} are being created; try again shortly"))
    })?;
    let created = tokio::spawn(async move {
        let _slot = slot;
        creation.await
    });
    let created = created.await;
    created
        .map_err(|panic| ApiError::internal(format!("creating {what} failed: {panic}")))?
        .map_err(Into::into)
}
