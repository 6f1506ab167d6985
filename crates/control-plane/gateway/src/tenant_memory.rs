//! Memory that requests keep in this process, counted in bytes per tenant before it is allocated.
//!
//! Code that keeps data beyond the handler's own stack first takes a [`Reservation`] and stores it beside the
//! value. Dropping the value then gives the bytes back. Two limits hold: one per tenant, and one for all
//! tenants together.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use crate::lock::lock;

/// Memory limits for requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Maximum bytes per tenant.
    pub tenant_bytes: usize,
    /// Maximum bytes of all tenants together.
    pub total_bytes: usize,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { tenant_bytes: 256 << 20, total_bytes: 2 << 30 }
    }
}

/// Refusal of a reservation; a retry may succeed, since reserved bytes are given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryFull {
    /// The reservation would exceed the tenant's limit.
    #[error(
        "your requests use {used} of {limit} bytes of server memory (--tenant-memory-bytes), and {asked} \
         more do not fit; fetch results or wait for running requests"
    )]
    Tenant {
        /// Requested bytes in addition to `used`.
        asked: usize,
        /// Bytes that the tenant has reserved.
        used: usize,
        /// Maximum bytes per tenant.
        limit: usize,
    },
    /// The reservation would exceed the limit of all tenants together.
    #[error("requests use all server memory for requests (--memory-bytes); try again shortly")]
    Total,
}

/// Counter of the reserved bytes of all tenants.
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
    #[must_use]
    pub fn new(limits: MemoryLimits) -> Arc<Self> {
        Arc::new(Self { limits, used: Mutex::default() })
    }

    /// Reserves `bytes` for `tenant` until the reservation is dropped.
    ///
    /// # Errors
    /// If a limit would be exceeded; nothing is counted then.
    pub fn reserve(self: &Arc<Self>, tenant: &Arc<str>, bytes: usize) -> Result<Reservation, MemoryFull> {
        self.reserve_within(tenant, bytes, self.limits)
    }

    /// Reserves like [`reserve`](Self::reserve), for work that waits for a later request. A quarter of each
    /// limit stays free, so that the later request still fits.
    ///
    /// # Errors
    /// If three quarters of a limit would be exceeded; nothing is counted then.
    pub(crate) fn reserve_waiting(
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

    /// Bytes that `tenant` has reserved.
    #[must_use]
    pub fn used_by(&self, tenant: &str) -> usize {
        lock(&self.used).by_tenant.get(tenant).copied().unwrap_or(0)
    }

    /// Bytes that all tenants have reserved.
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

/// Reserved bytes of a tenant; dropping the reservation gives them back.
#[derive(Debug)]
pub struct Reservation {
    memory: Arc<TenantMemory>,
    tenant: Arc<str>,
    bytes: usize,
}

impl Reservation {
    #[must_use]
    pub fn tenant(&self) -> &Arc<str> {
        &self.tenant
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Changes the reservation to `bytes`.
    ///
    /// # Errors
    /// If growing would exceed a limit; the reservation is unchanged then.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), MemoryFull> {
        self.memory.exchange(&self.tenant, self.bytes, bytes, self.memory.limits)?;
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Shrinking never exceeds a limit.
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
