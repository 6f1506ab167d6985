//! Memory of a session's channel in the tenant's quota.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_cache::ledger::{MemoryReservation, OutOfBudget};

/// Reservation for a channel, shared by the session and each of its channels until their memory is freed.
#[derive(Debug, Clone)]
pub(super) struct SlabReservation(Arc<Mutex<MemoryReservation>>);

impl SlabReservation {
    pub(super) fn new(held: MemoryReservation) -> Self {
        Self(Arc::new(Mutex::new(held)))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes()
    }

    /// Resizes the reservation, as [`MemoryReservation::resize`] does.
    pub(super) fn resize(&self, bytes: u64) -> Result<(), OutOfBudget> {
        self.lock().resize(bytes)
    }

    fn lock(&self) -> MutexGuard<'_, MemoryReservation> {
        // A number is consistent at any time, so a poisoned lock is usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
