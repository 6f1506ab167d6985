//! Locks of values that are always whole, also if a holder panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The value, as soon as nobody else has it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
