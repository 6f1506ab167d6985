//! Unloads adapters, and frees memory and files that no name refers to.

use std::sync::{Arc, atomic::Ordering};

use super::{
    database::DatabaseError,
    detached_task::run_detached,
    entry::AdapterEntry,
    errors::AdapterError,
    registry::Registry,
    request::check_generation,
    store::{CleanupScope, ContentId},
};
use crate::{lock::lock, thread};

impl Registry {
    /// Refuses new requests for `name`, waits for running ones, frees the adapter, and returns the bytes
    /// freed.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub async fn unload(self: &Arc<Self>, name: &str, expected: Option<&str>) -> Result<u64, AdapterError> {
        let (registry, name, expected) = (Arc::clone(self), name.to_owned(), expected.map(str::to_owned));
        run_detached(async move { registry.remove_and_retire(&name, expected.as_deref()).await }).await
    }

    async fn remove_and_retire(
        self: &Arc<Self>,
        name: &str,
        expected: Option<&str>,
    ) -> Result<u64, AdapterError> {
        let changing = self.changing.lock().await;
        let entry = self.entry(name)?;
        check_generation(name, expected, Some(&entry))?;
        self.records.remove(&entry).await?;
        self.change_table(|table| table.remove(name));
        self.after_commit().await;
        drop(changing);
        failpoint::pass("gateway.unload_committed");
        let freed = self.retire(&entry).await;
        tracing::info!(name, generation = %entry.record.generation, freed, "adapter unloaded");
        Ok(freed)
    }

    /// Waits for the leases of an entry that has left the table, then frees its memory and files.
    pub(super) async fn retire(&self, entry: &Arc<AdapterEntry>) -> u64 {
        entry.drained().await;
        failpoint::pass("gateway.unload_drained");
        lock(&self.draining).retain(|other| !Arc::ptr_eq(other, entry));
        let freed = self.free_sums_of(entry).await + self.free_everywhere(entry).await;
        // A change may have just stored the same files, and not registered them yet.
        let _changing = self.changing.lock().await;
        self.remove_unreferenced(entry.record.content);
        freed
    }

    /// Removes from the store the content of a failed load.
    pub(super) fn discard(&self, content: ContentId, error: &AdapterError) {
        if let AdapterError::Database(DatabaseError::Failed(_) | DatabaseError::Unclear { .. }) = error {
            // A failed commit may turn out to have happened, so the files stay until a later change overwrites it.
            self.sweep_due.store(true, Ordering::Relaxed);
        } else {
            self.remove_unreferenced(content);
        }
    }

    /// Runs a due cleanup. The caller holds `changing`, so that nothing is installed meanwhile.
    pub(super) async fn after_commit(&self) {
        if self.sweep_due.swap(false, Ordering::Relaxed) {
            let keep = self.every_entry().iter().map(|entry| entry.record.content).collect();
            let store = self.store.clone();
            let swept =
                thread::run("adapter-sweep", move || store.sweep(&keep, CleanupScope::Contents)).await;
            if let Ok(Err(error)) = swept {
                tracing::warn!(%error, "cannot remove files that belong to no adapter");
            }
        }
    }

    fn remove_unreferenced(&self, content: ContentId) {
        if !self.every_entry().iter().any(|entry| entry.record.content == content) {
            self.store.remove(content);
        }
    }
}
