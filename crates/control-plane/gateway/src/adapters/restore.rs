//! Prepares an executor that was just connected: records its adapters, and loads those that are needed.

use std::sync::{Arc, Weak};

use shmproto::message::AdapterIdBytes;
use types::AdapterId;

use super::{entry::AdapterEntry, errors::ResidencyError, registry::Registry, residency::ExecutorAdapters};
use crate::executor::CallError;

impl Registry {
    /// Prepares the executor at `index`, which was just connected and holds `resident`. Pinned adapters, and
    /// those that requests wait for, are loaded before this returns; others follow in the background while
    /// memory lasts. Returns false if the executor disconnected.
    pub async fn restore(
        self: &Arc<Self>,
        index: usize,
        resident: &[AdapterIdBytes],
        base_name: &str,
    ) -> bool {
        let home = &self.homes[index];
        let _moving = home.moving.lock().await;
        let entries = self.every_entry();
        let bytes = |id| entries.iter().find(|entry| entry.id() == id).map(|entry| entry.record.bytes);
        let known = resident.iter().map(|id| AdapterId(*id)).map(|id| (id, bytes(id).unwrap_or(0)));
        home.reset(known);
        for entry in &entries {
            let is_base = entry.record.name == base_name;
            entry.set_fault(is_base.then(|| "the base model now has the same name".to_owned()));
        }
        // Other resident adapters were loaded just before a crash and are in no registry.
        for id in resident {
            self.free(home, AdapterId(*id)).await;
        }
        failpoint::pass("gateway.restore");
        let mut needed: Vec<_> =
            entries.iter().filter(|entry| entry.is_used_at(index) || entry.is_pinned()).collect();
        needed.sort_by_key(|entry| (!entry.is_used_at(index), u64::MAX - entry.last_used_us()));
        for entry in needed {
            if !entry.sources().iter().all(|(record, _)| self.store.has(record.content)) {
                // A fetch from the bucket must not delay the other adapters.
                let (registry, entry) = (Arc::clone(self), Arc::clone(entry));
                tokio::spawn(async move { registry.load_everywhere(&entry).await });
                continue;
            }
            if !self.bring_back(home, entry).await {
                return false;
            }
        }
        tokio::spawn(preload(Arc::downgrade(self), index, home.epoch()));
        true
    }

    /// Loads a registered adapter, or records a fault. Returns false if the executor disconnected.
    async fn bring_back(&self, home: &ExecutorAdapters, entry: &AdapterEntry) -> bool {
        if entry.fault().is_some() {
            return true;
        }
        match self.make_resident(home, entry).await {
            Ok(()) => true,
            Err(ResidencyError::Call(CallError::Unavailable(_))) => false,
            Err(error) => {
                tracing::error!(name = %entry.record.name, %error, "cannot load a registered adapter");
                let can_be_fetched = entry.is_durable() && self.store.bucket_status().is_some();
                if matches!(error, ResidencyError::Unusable(_)) && can_be_fetched {
                    // The local copy may be corrupt, so the next request fetches the files again.
                    self.store.remove(entry.record.content);
                } else if matches!(error, ResidencyError::Unusable(_)) {
                    entry.set_fault(Some(error.to_string()));
                }
                true
            }
        }
    }
}

/// Loads adapters that no other executor holds, last used first, while memory and connection last.
async fn preload(registry: Weak<Registry>, index: usize, epoch: Option<u64>) {
    let Some(mut entries) = registry.upgrade().map(|registry| registry.every_entry()) else {
        return;
    };
    entries.sort_by_key(|entry| u64::MAX - entry.last_used_us());
    for entry in entries {
        let Some(registry) = registry.upgrade() else {
            return;
        };
        // The lock is taken anew for each adapter, so that requests and changes are not delayed.
        let home = &registry.homes[index];
        let _moving = home.moving.lock().await;
        let fits = home.resident().1.saturating_add(entry.record.bytes) <= home.budget_bytes().unwrap_or(0);
        let elsewhere =
            registry.in_use().into_iter().any(|other| other.index != index && other.holds(entry.id()));
        let is_registered =
            registry.entries().get(&entry.record.name).is_some_and(|now| Arc::ptr_eq(now, &entry));
        let is_here = registry.store.has(entry.record.content);
        if home.epoch() != epoch || !fits {
            return;
        }
        if is_registered && is_here && !elsewhere && !registry.bring_back(home, &entry).await {
            return;
        }
    }
}
