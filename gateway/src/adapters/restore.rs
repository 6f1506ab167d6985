//! An executor that was just connected made ready: what it holds is taken over, what is needed is brought back.

use std::sync::{Arc, Weak};

use ids::AdapterId;
use shmproto::message::AdapterIdBytes;

use super::{entry::Entry, errors::ResidencyError, registry::Registry};
use crate::executor::CallError;

impl Registry {
    /// Makes an executor that was just connected, and that holds `resident`, ready: adapters that requests wait for
    /// and pinned ones are loaded before this returns, others in the background as long as there is room. False if
    /// the executor went away.
    pub async fn restore(self: &Arc<Self>, resident: &[AdapterIdBytes], base_name: &str) -> bool {
        let _changing = self.changing.lock().await;
        let entries = self.every_entry();
        let bytes = |id| entries.iter().find(|entry| entry.id() == id).map(|entry| entry.record.bytes);
        let known = resident.iter().map(|id| AdapterId(*id)).map(|id| (id, bytes(id).unwrap_or(0)));
        self.reset_residency(known);
        for entry in &entries {
            let is_base = entry.record.name == base_name;
            entry.set_fault(is_base.then(|| "the base model has the same name now".to_owned()));
        }
        // Whatever else is resident was loaded just before a crash and is in nobody's registry.
        for id in resident {
            self.free(AdapterId(*id)).await;
        }
        failpoint::pass("gateway.restore");
        let mut needed: Vec<_> =
            entries.iter().filter(|entry| entry.requests() > 0 || entry.is_pinned()).collect();
        needed.sort_by_key(|entry| (entry.requests() == 0, u64::MAX - entry.last_used_us()));
        for entry in needed {
            if !self.bring_back(entry).await {
                return false;
            }
        }
        tokio::spawn(warm_up(Arc::downgrade(self), self.epoch()));
        true
    }

    /// Brings a registered adapter into the executor, and notes if that cannot be. False if the executor is gone.
    async fn bring_back(&self, entry: &Entry) -> bool {
        if entry.fault().is_some() {
            return true;
        }
        match self.make_resident(entry).await {
            Ok(()) => true,
            Err(ResidencyError::Call(CallError::Unavailable(_))) => false,
            Err(error) => {
                tracing::error!(name = %entry.record.name, %error, "an adapter could not be brought back");
                if matches!(error, ResidencyError::Unusable(_)) {
                    entry.set_fault(Some(error.to_string()));
                }
                true
            }
        }
    }
}

/// Brings adapters in as long as there is room, those used last first, while the same connection lasts.
async fn warm_up(registry: Weak<Registry>, epoch: Option<u64>) {
    let Some(mut entries) = registry.upgrade().map(|registry| registry.every_entry()) else {
        return;
    };
    entries.sort_by_key(|entry| u64::MAX - entry.last_used_us());
    for entry in entries {
        let Some(registry) = registry.upgrade() else {
            return;
        };
        // Taken for each anew, so that requests and changes get their turn.
        let _changing = registry.changing.lock().await;
        let fits =
            registry.resident().1.saturating_add(entry.record.bytes) <= registry.budget_bytes().unwrap_or(0);
        let is_registered =
            registry.entries().get(&entry.record.name).is_some_and(|now| Arc::ptr_eq(now, &entry));
        if registry.epoch() != epoch || !fits {
            return;
        }
        if is_registered && !registry.bring_back(&entry).await {
            return;
        }
    }
}
