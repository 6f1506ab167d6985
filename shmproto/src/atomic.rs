//! Atomics for shared memory, in one module that loom can replace.
//!
//! Under `cfg(loom)` the same code runs on loom's atomics, and `tests/loom.rs` tries every interleaving and
//! every value that the memory model allows. Loom models sequential consistency only as a fence. Code that
//! needs it therefore writes `fence(SeqCst)` between relaxed accesses, never `load(SeqCst)`.

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

/// Atomics that loom does not model: words of a mapping, which are bytes and no loom objects, and counters of
/// statistics, which order nothing.
pub(crate) mod plain {
    pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}
