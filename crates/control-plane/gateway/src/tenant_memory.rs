//! Memory that requests make this process keep, counted in bytes to its tenant before it is kept.
//!
//! Whoever keeps something beyond the handler's own stack first takes a [`Reservation`] and stores it beside the value, so
//! that dropping the value gives the bytes back. Two limits hold: one for each tenant, and one for all tenants together.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use crate::lock::lock;

/// Limits on what requests may keep in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Bytes of one tenant.
    pub tenant_bytes: usize,
    /// Bytes of all tenants together.
    pub total_bytes: usize,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { tenant_bytes: 256 << 20, total_bytes: 2 << 30 }
    }
}

/// Why no more bytes are kept; waiting helps, since kept bytes are given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryFull {
    /// The tenant has as much as a tenant may have.
    #[error(
        "your requests keep {used} of {limit} bytes in this server's memory (--tenant-memory-bytes) and {asked} more do not \
         fit; fetch results or wait for running requests before you send more"
    )]
    Tenant {
        /// Bytes that were asked for.
        asked: usize,
        /// Bytes that the tenant has.
        used: usize,
        /// Bytes that a tenant may have.
        limit: usize,
    },
    /// All tenants together have as much as there is.
    #[error("requests keep as much of this server's memory as they may (--memory-bytes); try again shortly")]
    Total,
}

/// Counts what all tenants keep; see the module's description.
#[derive(Debug)]
pub struct TenantMemory {
    limits: MemoryLimits,
    used: Mutex<MemoryUse>,
}

#[derive(Debug, Default)]
struct MemoryUse {
    by_tenant: HashMap<Arc<str>, usize>,
    total: usize,
}

impl TenantMemory {
    /// Nothing is kept yet.
    #[must_use]
    pub fn new(limits: MemoryLimits) -> Arc<Self> {
        Arc::new(Self { limits, used: Mutex::default() })
    }

    /// Counts `bytes` to `tenant` until the reservation is dropped.
    ///
    /// # Errors
    /// A limit would be passed; nothing is counted then.
    pub fn reserve(self: &Arc<Self>, tenant: &Arc<str>, bytes: usize) -> Result<Reservation, MemoryFull> {
        self.reserve_within(tenant, bytes, self.limits)
    }

    /// Counts like [`reserve`](Self::reserve) for work that waits for a request which is yet to come. A quarter of each limit
    /// stays free, so that the request which is waited for still finds room.
    ///
    /// # Errors
    /// Three quarters of a limit would be passed; nothing is counted then.
    pub fn reserve_waiting(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        bytes: usize,
    ) -> Result<Reservation, MemoryFull> {
        let MemoryLimits { tenant_bytes, total_bytes } = self.limits;
        let limits = MemoryLimits { tenant_bytes: tenant_bytes / 4 * 3, total_bytes: total_bytes / 4 * 3 };
        self.reserve_within(tenant, bytes, limits)
    }

    fn reserve_within(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        bytes: usize,
        limits: MemoryLimits,
    ) -> Result<Reservation, MemoryFull> {
        self.exchange(tenant, 0, bytes, limits)?;
        Ok(Reservation { memory: Arc::clone(self), tenant: Arc::clone(tenant), bytes })
    }

    /// Bytes that `tenant` keeps.
    #[must_use]
    pub fn used_by(&self, tenant: &str) -> usize {
        lock(&self.used).by_tenant.get(tenant).copied().unwrap_or(0)
    }

    /// Bytes that all tenants keep.
    #[must_use]
    pub fn used(&self) -> usize {
        lock(&self.used).total
    }

    /// Replaces `before` bytes of `tenant` by `after`, within `limits`.
    fn exchange(
        &self,
        tenant: &Arc<str>,
        before: usize,
        after: usize,
        limits: MemoryLimits,
    ) -> Result<(), MemoryFull> {
        let mut used = lock(&self.used);
        let own = used.by_tenant.get(tenant).copied().unwrap_or(0);
        let (rest, limit) = (own - before, limits.tenant_bytes);
        if after > before {
            if after > limit.saturating_sub(rest) {
                return Err(MemoryFull::Tenant { asked: after - before, used: own, limit });
            }
            if after > limits.total_bytes.saturating_sub(used.total - before) {
                return Err(MemoryFull::Total);
            }
        }
        used.total = used.total - before + after;
        if rest + after == 0 {
            used.by_tenant.remove(tenant);
        } else {
            used.by_tenant.insert(Arc::clone(tenant), rest + after);
        }
        Ok(())
    }
}

/// Bytes of a tenant; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    memory: Arc<TenantMemory>,
    tenant: Arc<str>,
    bytes: usize,
}

impl Reservation {
    /// Whose bytes they are.
    #[must_use]
    pub fn tenant(&self) -> &Arc<str> {
        &self.tenant
    }

    /// Bytes that are counted.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Counts `bytes` in the place of what was counted before.
    ///
    /// # Errors
    /// More was asked for and a limit would be passed; the reservation is as it was then.
    pub fn resize(&mut self, bytes: usize) -> Result<(), MemoryFull> {
        self.memory.exchange(&self.tenant, self.bytes, bytes, self.memory.limits)?;
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Giving back passes no limit.
        let _ = self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(tenant_bytes: usize, total_bytes: usize) -> Arc<TenantMemory> {
        TenantMemory::new(MemoryLimits { tenant_bytes, total_bytes })
    }

    #[test]
    fn a_tenant_at_its_limit_is_refused_and_others_are_not() {
        let (memory, alice, bob) = (memory(100, 150), "alice".into(), "bob".into());
        let kept = memory.reserve(&alice, 100).unwrap();
        let full = memory.reserve(&alice, 1).unwrap_err();
        assert_eq!(full, MemoryFull::Tenant { asked: 1, used: 100, limit: 100 });
        let other = memory.reserve(&bob, 50).unwrap();
        assert_eq!(memory.reserve(&bob, 1).unwrap_err(), MemoryFull::Total);
        drop((kept, other));
        assert_eq!((memory.used_by("alice"), memory.used()), (0, 0));
        assert!(lock(&memory.used).by_tenant.is_empty(), "tenants without bytes are forgotten");
    }

    #[test]
    fn work_that_waits_leaves_room_for_what_it_waits_for() {
        let (memory, alice, bob) = (memory(100, 160), "alice".into(), "bob".into());
        let waiting = memory.reserve_waiting(&alice, 75).unwrap();
        memory.reserve_waiting(&alice, 1).unwrap_err();
        let next = memory.reserve(&alice, 25).unwrap();
        assert_eq!(memory.reserve_waiting(&bob, 21).unwrap_err(), MemoryFull::Total);
        drop((waiting, next));
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn a_reservation_that_cannot_grow_is_as_it_was() {
        let (memory, alice) = (memory(100, 100), "alice".into());
        let mut kept = memory.reserve(&alice, 60).unwrap();
        kept.resize(101).unwrap_err();
        assert_eq!((kept.bytes(), memory.used()), (60, 60));
        kept.resize(100).unwrap();
        kept.resize(10).unwrap();
        assert_eq!((kept.bytes(), memory.used()), (10, 10));
        memory.reserve(&alice, usize::MAX).unwrap_err();
    }
}
