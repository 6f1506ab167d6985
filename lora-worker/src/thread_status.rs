//! What the threads show each other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the other threads show of themselves, and are asked. Nothing else depends on any of it: all of it is relaxed.
#[derive(Debug)]
pub(crate) struct ThreadStatus {
    /// Written by the thread that computes.
    turns: AtomicU64,
    /// Written by the thread that talks to the executor: adapters and one more, or 0 without a seat.
    seating: AtomicU64,
    /// Written by the thread that watches.
    leaving: AtomicBool,
}

/// Whether the worker has a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConsumerStatus {
    /// No executor has given it one.
    Waiting,
    /// It has one.
    Seated {
        /// The adapters it has mapped there.
        adapters: u64,
    },
}

impl ThreadStatus {
    pub(crate) const fn new() -> Self {
        Self { turns: AtomicU64::new(0), seating: AtomicU64::new(0), leaving: AtomicBool::new(false) }
    }

    /// Says that the thread that computes has turned.
    pub(crate) fn beat(&self) {
        self.turns.store(self.turns.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// How often the thread that computes has turned.
    pub(crate) fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Says whether there is a seat, and how many adapters.
    pub(crate) fn show(&self, seating: ConsumerStatus) {
        let number = match seating {
            ConsumerStatus::Waiting => 0,
            ConsumerStatus::Seated { adapters } => adapters.saturating_add(1),
        };
        self.seating.store(number, Ordering::Relaxed);
    }

    /// Says that the process is about to end.
    pub(crate) fn announce_exit(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Whether the process is about to end.
    pub(crate) fn leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// What was said of the seat last.
    pub(crate) fn seating(&self) -> ConsumerStatus {
        match self.seating.load(Ordering::Relaxed).checked_sub(1) {
            None => ConsumerStatus::Waiting,
            Some(adapters) => ConsumerStatus::Seated { adapters },
        }
    }
}
