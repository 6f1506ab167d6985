//! Pins keep adapters resident.

use std::{collections::HashMap, sync::Arc};

use types::AdapterId;

use super::{
    detached_task::run_detached, entry::AdapterEntry, errors::AdapterError, registry::Registry,
    residency::ExecutorAdapters,
};

/// Whether an adapter stays resident while no request uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    Keep,
    Release,
}

impl Registry {
    /// Pins or releases an adapter; the setting survives a restart.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub async fn pin(self: &Arc<Self>, name: &str, pin: Pin) -> Result<Arc<AdapterEntry>, AdapterError> {
        let (registry, name) = (Arc::clone(self), name.to_owned());
        run_detached(async move { registry.set_pin(&name, pin).await }).await
    }

    async fn set_pin(&self, name: &str, pin: Pin) -> Result<Arc<AdapterEntry>, AdapterError> {
        let _held = match pin {
            Pin::Keep => Some(self.fetch(&*self.entry(name)?).await?),
            Pin::Release => None,
        };
        let _changing = self.changing.lock().await;
        let (entry, pinned) = (self.entry(name)?, pin == Pin::Keep);
        if pinned {
            self.check_pins(name, entry.id(), entry.record.bytes)?;
            for home in self.in_use() {
                let _moving = home.moving.lock().await;
                self.make_resident(home, &entry).await?;
            }
            entry.set_fault(None);
        }
        let version = self.records.set_pinned(&entry, pinned).await?;
        failpoint::pass("gateway.pin_committed");
        entry.set_pinned(pinned);
        entry.set_version(version);
        self.after_commit().await;
        Ok(entry)
    }

    /// Loads a pinned adapter into every executor. After a failure the executor gets it later, on restore or
    /// on request.
    pub(super) async fn load_everywhere(&self, entry: &AdapterEntry) {
        let _held = match self.fetch(entry).await {
            Ok(held) => held,
            Err(error) => {
                return tracing::warn!(name = %entry.record.name, %error, "a pinned adapter is missing");
            }
        };
        for home in self.in_use() {
            let _moving = home.moving.lock().await;
            if let Err(error) = self.make_resident(home, entry).await {
                tracing::warn!(name = %entry.record.name, executor = home.index, %error, "a pinned adapter is missing");
            }
        }
    }

    /// Fails if `id` and all pinned adapters exceed an executor's budget; every executor holds all of them.
    pub(super) fn check_pins(&self, name: &str, id: AdapterId, bytes: u64) -> Result<(), AdapterError> {
        let entries = self.entries();
        let pinned = entries.values().filter(|entry| entry.is_pinned() && entry.record.name != name);
        let pinned: HashMap<_, _> =
            pinned.map(|entry| (entry.id(), entry.record.bytes)).chain([(id, bytes)]).collect();
        let pinned_bytes = pinned.values().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        match self.homes.iter().filter_map(ExecutorAdapters::budget_bytes).min() {
            Some(budget_bytes) if pinned_bytes > budget_bytes => {
                Err(AdapterError::PinsExceedBudget { name: name.to_owned(), pinned_bytes, budget_bytes })
            }
            _ => Ok(()),
        }
    }
}
