//! Bytes that a tenant may have in slabs and messages, over all its sessions.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::Tenant;

/// What a tenant holds over all its sessions. Lives as long as anything of it.
#[derive(Debug)]
pub(super) struct Purse {
    pub(super) tenant: Tenant,
    bytes: AtomicU64,
    pub(super) most_bytes: u64,
}

impl Purse {
    /// An empty one, of at most `most_bytes`.
    pub(super) fn new(tenant: &Tenant, most_bytes: u64) -> Self {
        Self { tenant: tenant.clone(), bytes: AtomicU64::new(0), most_bytes }
    }
}

/// Bytes of a tenant's quota, given back when dropped.
#[derive(Debug)]
pub struct Held {
    purse: Arc<Purse>,
    pub(super) bytes: u64,
}

impl Held {
    /// Takes `bytes` of the same tenant's quota; `None` if there are not so many left.
    #[must_use]
    pub fn another(&self, bytes: u64) -> Option<Self> {
        Self::of(&self.purse, bytes)
    }

    pub(super) fn of(purse: &Arc<Purse>, bytes: u64) -> Option<Self> {
        let mut held = Self { purse: Arc::clone(purse), bytes: 0 };
        held.resize(bytes).then_some(held)
    }

    /// Holds `bytes` instead; false, and nothing changes, if there are not so many.
    pub(super) fn resize(&mut self, bytes: u64) -> bool {
        let change = |all: u64| {
            let changed = all.checked_sub(self.bytes)?.checked_add(bytes)?;
            (changed <= self.purse.most_bytes || bytes <= self.bytes).then_some(changed)
        };
        let changed = self.purse.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_ok();
        if changed {
            self.bytes = bytes;
        }
        changed
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.purse.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
