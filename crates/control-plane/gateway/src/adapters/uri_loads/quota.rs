//! The quota of adapters that a tenant's requests loaded by URI. The least recently used are unloaded.

use std::{sync::Arc, time::Duration};

use crate::adapters::{
    entry::AdapterEntry,
    errors::{AdapterError, FetchError},
    registry::Registry,
    remote::FetchKey,
    uri::is_uri,
};

/// How long an unload waits for a request that leased the adapter after it was chosen. The unload continues
/// after that.
const PATIENCE: Duration = Duration::from_secs(5);

impl Registry {
    /// Unloads adapters until one of `bytes` fits the quota of the owner. Adapters in use stay.
    pub(super) async fn apply_quota(self: &Arc<Self>, key: &FetchKey, bytes: u64) -> Result<(), FetchError> {
        let limit_bytes = self.remote.options.tenant_bytes;
        loop {
            let others = self.fetched_beside(key);
            let held: u64 = others.iter().map(|entry| entry.record.tenant_bytes()).sum();
            if held.saturating_add(bytes) <= limit_bytes && others.len() < self.share.max_adapters() {
                return Ok(());
            }
            let idle = others.into_iter().filter(|entry| entry.requests() == 0 && !entry.is_pinned());
            let oldest = idle.min_by_key(|entry| entry.last_used_us()).filter(|_| bytes <= limit_bytes);
            let Some(oldest) = oldest else {
                return Err(FetchError::Quota { uri: key.uri.to_string(), bytes, limit_bytes });
            };
            tracing::info!(name = %oldest.record.name, "unloading an adapter for another one of its tenant");
            let generation = oldest.record.generation.to_string();
            let unload = self.unload(&oldest.record.name, Some(&generation));
            match tokio::time::timeout(PATIENCE, unload).await {
                // Another request unloaded or replaced the adapter after the list was made.
                Ok(Ok(_) | Err(AdapterError::NotFound(_) | AdapterError::OtherGeneration { .. }))
                | Err(_) => {}
                Ok(Err(error)) => return Err(error.into()),
            }
        }
    }

    /// Returns the adapters of the owner that requests loaded by other URIs.
    fn fetched_beside(&self, key: &FetchKey) -> Vec<Arc<AdapterEntry>> {
        let name = key.name();
        let entries = self.entries();
        let others = entries.values().filter(|entry| {
            let record = &entry.record;
            is_uri(&record.name) && record.tenant == key.owner && record.name != name
        });
        others.cloned().collect()
    }
}
