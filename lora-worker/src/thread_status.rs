//! Status that the threads share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Status of each thread. No other data depends on it, so all accesses are relaxed.
#[derive(Debug)]
pub(crate) struct ThreadStatus {
    /// Loop count, written by the compute thread.
    turns: AtomicU64,
    /// Number of adapters plus one, or 0 without a worker slot; written by the control thread.
    seating: AtomicU64,
    /// Written by the watch thread.
    leaving: AtomicBool,
}

/// Whether the worker has a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConsumerStatus {
    Waiting,
    Seated { adapters: u64 },
}

impl ThreadStatus {
    pub(crate) const fn new() -> Self {
        Self { turns: AtomicU64::new(0), seating: AtomicU64::new(0), leaving: AtomicBool::new(false) }
    }

    /// Counts one loop of the compute thread.
    pub(crate) fn beat(&self) {
        self.turns.store(self.turns.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    pub(crate) fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    pub(crate) fn show(&self, seating: ConsumerStatus) {
        let number = match seating {
            ConsumerStatus::Waiting => 0,
            ConsumerStatus::Seated { adapters } => adapters.saturating_add(1),
        };
        self.seating.store(number, Ordering::Relaxed);
    }

    pub(crate) fn announce_exit(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    pub(crate) fn leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    pub(crate) fn seating(&self) -> ConsumerStatus {
        match self.seating.load(Ordering::Relaxed).checked_sub(1) {
            None => ConsumerStatus::Waiting,
            Some(adapters) => ConsumerStatus::Seated { adapters },
        }
    }
}
