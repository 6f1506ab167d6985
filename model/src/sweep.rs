//! What sweeps over streamed weights cost, for whoever wants to know it while they go on, and what may be done while they wait.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Under this name the log has, at level `trace`, what was loaded and what was computed, each when it was done (CHECKLIST L-27).
pub const PIPELINE: &str = "pipeline";

/// A pass that waits for weights on their way from the disk: nothing else uses its threads meanwhile.
pub trait Waiting {
    /// The pass may go on.
    fn is_over(&self) -> bool;

    /// How much longer it may be kept, by what reads took so far, before a disk idles or an answer is late; nothing while that is
    /// not known.
    fn left(&self) -> Duration;
}

/// Counters of a streamed base; they only grow, and may be read at any time by anybody.
#[derive(Debug, Default)]
pub struct SweepFigures {
    read_bytes: AtomicU64,
    read_ns: AtomicU64,
    waited_ns: AtomicU64,
    computed_ns: AtomicU64,
}

impl SweepFigures {
    /// Bytes that were read from the disk.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Relaxed)
    }

    /// Time that reading them took, checks included.
    #[must_use]
    pub fn read_time(&self) -> Duration {
        Duration::from_nanos(self.read_ns.load(Relaxed))
    }

    /// Time of it that a pass waited; the rest was hidden behind its computing.
    #[must_use]
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Relaxed))
    }

    /// Time that the linear layers took to compute.
    #[must_use]
    pub fn computed(&self) -> Duration {
        Duration::from_nanos(self.computed_ns.load(Relaxed))
    }

    pub(super) fn add_read(&self, bytes: u64, since: Instant) {
        self.read_bytes.fetch_add(bytes, Relaxed);
        let took_ns = add(&self.read_ns, since);
        tracing::trace!(target: PIPELINE, bytes, took_ns, "load");
    }

    pub(super) fn add_computed(&self, floor: usize, since: Instant) {
        let took_ns = add(&self.computed_ns, since);
        tracing::trace!(target: PIPELINE, floor, took_ns, "compute");
    }

    /// Runs `wait`, during which a pass waits.
    pub(super) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let waited = wait();
        add(&self.waited_ns, begun);
        waited
    }
}

/// Adds what has passed `since` then, and says what that was.
fn add(counter: &AtomicU64, since: Instant) -> u64 {
    let passed = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    counter.fetch_add(passed, Relaxed);
    passed
}
