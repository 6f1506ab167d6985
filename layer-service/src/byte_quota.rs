//! Bytes that a tenant may have in slabs and messages, over all its sessions.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use super::Tenant;

/// What a tenant holds over all its sessions. Lives as long as anything of it.
#[derive(Debug)]
pub(super) struct ByteQuota {
    pub(super) tenant: Tenant,
    bytes: AtomicU64,
    pub(super) max_bytes: u64,
}

impl ByteQuota {
    /// An empty one, of at most `max_bytes`.
    pub(super) fn new(tenant: &Tenant, max_bytes: u64) -> Self {
        Self { tenant: tenant.clone(), bytes: AtomicU64::new(0), max_bytes }
    }
}

/// Bytes of a tenant's quota, given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    byte_quota: Arc<ByteQuota>,
    pub(super) bytes: u64,
}

impl Reservation {
    /// Takes `bytes` of the same tenant's quota; `None` if there are not so many left.
    #[must_use]
    pub fn another(&self, bytes: u64) -> Option<Self> {
        Self::of(&self.byte_quota, bytes)
    }

    pub(super) fn of(byte_quota: &Arc<ByteQuota>, bytes: u64) -> Option<Self> {
        let mut held = Self { byte_quota: Arc::clone(byte_quota), bytes: 0 };
        held.resize(bytes).then_some(held)
    }

    /// Holds `bytes` instead; false, and nothing changes, if there are not so many.
    pub(super) fn resize(&mut self, bytes: u64) -> bool {
        let change = |all: u64| {
            let changed = all.checked_sub(self.bytes)?.checked_add(bytes)?;
            (changed <= self.byte_quota.max_bytes || bytes <= self.bytes).then_some(changed)
        };
        let changed =
            self.byte_quota.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_ok();
        if changed {
            self.bytes = bytes;
        }
        changed
    }
}

/// What a session holds for its channel, and each of its channels until its memory is given back.
#[derive(Debug, Clone)]
pub(super) struct SlabReservation(Arc<Mutex<Reservation>>);

impl SlabReservation {
    pub(super) fn new(held: Reservation) -> Self {
        Self(Arc::new(Mutex::new(held)))
    }

    /// How many bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// See [`Reservation::resize`].
    pub(super) fn resize(&self, bytes: u64) -> bool {
        self.lock().resize(bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Reservation> {
        // A number, whole at any time.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.byte_quota.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
