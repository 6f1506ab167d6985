//! What a board tells about itself. Figures order nothing, so they are no part of what loom looks at.

use crate::atomic::plain::{AtomicU64, Ordering::Relaxed};

use super::{SlotNumber, WorkerNumber};

/// A worker's figures, counted by the executor but for the heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotStats {
    /// Where it sits.
    pub seat: SlotNumber,
    /// Which worker it is.
    pub worker: WorkerNumber,
    /// What its heartbeat word says now. Nothing but a change of it means anything.
    pub heartbeat: u32,
    /// Slices whose sums were read.
    pub slices: u64,
    /// Rows x ranks of those.
    pub rank_rows: u64,
    /// Slices it had claimed that were taken back, or that it failed.
    pub taken_back: u64,
}

/// What happens at a board.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoardStats {
    /// Everybody who is seated, by seat.
    pub seats: Vec<SlotStats>,
    /// State words that no honest worker writes.
    pub violations: u64,
    /// State words of workers that had been fenced.
    pub late_words: u64,
}

/// A figure that one thread counts and others show.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    /// Counts `more`.
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    /// The figure so far.
    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What the executor saw of a worker.
#[derive(Debug, Default)]
pub(super) struct WorkerCounters {
    pub(super) slices: Counter,
    pub(super) rank_rows: Counter,
    pub(super) taken_back: Counter,
}
