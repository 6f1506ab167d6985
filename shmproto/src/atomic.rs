//! Every atomic of shared memory comes through here, so that loom can take their place.
//!
//! Under `cfg(loom)` the same code runs on loom's atomics, and the tests in `tests/loom.rs` try every interleaving and
//! every value that the memory model allows. Loom knows sequential consistency only as a fence: code that needs it
//! writes `fence(SeqCst)` between relaxed accesses, never `load(SeqCst)`.

#[cfg(not(loom))]
pub(crate) use core::hint::spin_loop;
#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(loom)]
pub(crate) use loom::hint::spin_loop;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};

/// Atomics that loom has no part in: the words of a mapping, which are bytes and no objects of a model, and figures, which
/// order nothing.
pub(crate) mod plain {
    pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}
