//! Counters of batches for metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{
    Batches,
    records::{BatchStatus, LineCounts},
};

/// Counts since the process started.
#[derive(Debug, Default)]
pub(super) struct BatchCounters {
    completed: AtomicU64,
    failed: AtomicU64,
    expired: AtomicU64,
    cancelled: AtomicU64,
    lines_completed: AtomicU64,
    lines_failed: AtomicU64,
    preempted: AtomicU64,
}

/// Counters at one moment, and the number of unfinished batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BatchStats {
    /// Unfinished batches by status.
    pub(crate) unfinished: [(&'static str, u64); 3],
    /// Ended batches by final status.
    pub(crate) ended: [(&'static str, u64); 4],
    /// Lines with a result, by outcome.
    pub(crate) lines: [(&'static str, u64); 2],
    pub(crate) lines_running: u64,
    /// Lines that stopped for online requests, and are computed again.
    pub(crate) lines_preempted: u64,
}

impl BatchCounters {
    /// Counts a batch whose status has just become final.
    pub(super) fn ended(&self, status: BatchStatus) {
        let counter = match status {
            BatchStatus::Completed => &self.completed,
            BatchStatus::Failed => &self.failed,
            BatchStatus::Expired => &self.expired,
            BatchStatus::Cancelled => &self.cancelled,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Counts the lines by which `now` exceeds `before`.
    pub(super) fn lines(&self, before: LineCounts, now: LineCounts) {
        self.lines_completed.fetch_add(now.completed - before.completed, Relaxed);
        self.lines_failed.fetch_add(now.failed - before.failed, Relaxed);
    }

    /// Counts a line that stopped for online requests.
    pub(super) fn preempt(&self) {
        self.preempted.fetch_add(1, Relaxed);
    }
}

impl Batches {
    /// Returns the counters and the current number of unfinished batches.
    #[must_use]
    pub(crate) fn stats(&self) -> BatchStats {
        let statuses = self.statuses();
        let count =
            |wanted: &[BatchStatus]| statuses.iter().filter(|status| wanted.contains(status)).count() as u64;
        let [counters, load] = [&self.counters; 2];
        let load = |counter: fn(&BatchCounters) -> &AtomicU64| counter(load).load(Relaxed);
        BatchStats {
            unfinished: [
                ("validating", count(&[BatchStatus::Validating])),
                ("in_progress", count(&[BatchStatus::InProgress])),
                ("finalizing", count(&[BatchStatus::Finalizing, BatchStatus::Cancelling])),
            ],
            ended: [
                ("completed", load(|counters| &counters.completed)),
                ("failed", load(|counters| &counters.failed)),
                ("expired", load(|counters| &counters.expired)),
                ("cancelled", load(|counters| &counters.cancelled)),
            ],
            lines: [
                ("completed", load(|counters| &counters.lines_completed)),
                ("failed", load(|counters| &counters.lines_failed)),
            ],
            lines_running: self.slots.held() as u64,
            lines_preempted: counters.preempted.load(Relaxed),
        }
    }
}
