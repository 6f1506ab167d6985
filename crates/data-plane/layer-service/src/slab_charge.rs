//! What a session's channel takes of the memory that its tenant may have.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_cache::ledger::{MemoryReservation, OutOfBudget};

/// What a session holds for its channel, and each of its channels until its memory is given back.
#[derive(Debug, Clone)]
pub(super) struct SlabReservation(Arc<Mutex<MemoryReservation>>);

impl SlabReservation {
    pub(super) fn new(held: MemoryReservation) -> Self {
        Self(Arc::new(Mutex::new(held)))
    }

    /// How many bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes()
    }

    /// See [`MemoryReservation::resize`].
    pub(super) fn resize(&self, bytes: u64) -> Result<(), OutOfBudget> {
        self.lock().resize(bytes)
    }

    fn lock(&self) -> MutexGuard<'_, MemoryReservation> {
        // A number, whole at any time.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
