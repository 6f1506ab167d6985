//! Statistics of a board. Counters order nothing, so loom does not model them.

use crate::atomic::plain::{AtomicU64, Ordering::Relaxed};

use super::{SlotNumber, WorkerNumber};

/// Statistics of a worker, counted by the executor except for the heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotStats {
    /// Worker slot of the worker.
    pub seat: SlotNumber,
    /// Number of the worker.
    pub worker: WorkerNumber,
    /// Current value of the heartbeat word; only a change of it has a meaning.
    pub heartbeat: u32,
    /// Number of slices whose sums were read.
    pub slices: u64,
    /// Sum of rows x ranks over these slices.
    pub rank_rows: u64,
    /// Number of claimed slices that were taken back or that the worker failed.
    pub taken_back: u64,
}

/// Statistics of a board since its creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoardStats {
    /// Statistics of the admitted workers, by slot.
    pub seats: Vec<SlotStats>,
    /// Number of state words that no honest worker writes.
    pub violations: u64,
    /// Number of state words of workers that had been fenced.
    pub late_words: u64,
}

/// Counter that one thread increments and others read.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct WorkerCounters {
    pub(super) slices: Counter,
    pub(super) rank_rows: Counter,
    pub(super) taken_back: Counter,
}
