//! What sweeps over streamed weights cost, for whoever wants to know it while they go on.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Counters of a streamed base; they only grow, and may be read at any time by anybody.
#[derive(Debug, Default)]
pub struct SweepFigures {
    read_bytes: AtomicU64,
    read_ns: AtomicU64,
    waited_ns: AtomicU64,
    computed_ns: AtomicU64,
    is_waiting: AtomicBool,
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

    /// Whether a pass waits for the disk now.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.is_waiting.load(Relaxed)
    }

    pub(super) fn add_read(&self, bytes: u64, since: Instant) {
        self.read_bytes.fetch_add(bytes, Relaxed);
        add(&self.read_ns, since);
    }

    pub(super) fn add_computed(&self, since: Instant) {
        add(&self.computed_ns, since);
    }

    /// Runs `wait`, during which a pass waits.
    pub(super) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        self.is_waiting.store(true, Relaxed);
        let waited = wait();
        self.is_waiting.store(false, Relaxed);
        add(&self.waited_ns, begun);
        waited
    }
}

fn add(counter: &AtomicU64, since: Instant) {
    counter.fetch_add(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
}
