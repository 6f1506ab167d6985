//! What sweeps over streamed weights cost, for whoever wants to know it while they go on, and what may be done while they wait.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use scheduling::background_io::ForegroundIo;

/// Under this name the log has, at level `trace`, what was loaded and what was computed, each when it was done (CHECKLIST L-27).
pub const PIPELINE: &str = "pipeline";

/// A pass that waits for weights on their way from the disk: nothing else uses its threads meanwhile.
pub trait PendingWeights {
    /// The pass may go on.
    fn is_over(&self) -> bool;

    /// How much longer it may be kept, by what reads took so far, before a disk idles or an answer is late; nothing while that is
    /// not known.
    fn left(&self) -> Duration;
}

/// Counters of a streamed base; they only grow, and may be read at any time by anybody.
#[derive(Debug, Default)]
pub struct WeightStreamStats {
    read_bytes: AtomicU64,
    read_ns: AtomicU64,
    /// Since when the reader reads what it reads now. Under its lock what was read is counted.
    reading: Mutex<Option<Instant>>,
    waited_ns: AtomicU64,
    computed_ns: AtomicU64,
}

impl WeightStreamStats {
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

    /// The reader begins to read.
    pub(super) fn begin_read(&self, since: Instant) {
        *self.read_now() = Some(since);
    }

    /// It has read so many bytes.
    pub(super) fn end_read(&self, bytes: u64, since: Instant) {
        let mut reading = self.read_now();
        *reading = None;
        self.add_read(bytes, since);
    }

    fn read_now(&self) -> MutexGuard<'_, Option<Instant>> {
        // It is whole whoever panics.
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Sweeps come first at the disk that history is kept on, too: a pass waits for them.
impl ForegroundIo for WeightStreamStats {
    fn used(&self, now: Instant) -> Duration {
        let reading = self.read_now();
        self.read_time() + reading.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    fn takes(&self, bytes: usize) -> Duration {
        let byte_s = self.read_time().as_secs_f64() / (self.read_bytes().max(1) as f64);
        Duration::try_from_secs_f64(bytes as f64 * byte_s).unwrap_or_default()
    }
}

/// Adds what has passed `since` then, and says what that was.
fn add(counter: &AtomicU64, since: Instant) -> u64 {
    let passed = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    counter.fetch_add(passed, Relaxed);
    passed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_read_counts_as_used_before_it_is_there() {
        let (figures, since) = (WeightStreamStats::default(), Instant::now());
        let after = |ms| since + Duration::from_millis(ms);
        assert_eq!(figures.used(after(9)), Duration::ZERO);
        figures.begin_read(since);
        assert_eq!(figures.used(after(7)), Duration::from_millis(7));
        assert_eq!(figures.takes(1_000), Duration::ZERO, "nobody knows yet");
        figures.end_read(1_000, since);
        let used = figures.used(after(7_000));
        assert_eq!((used, figures.read_bytes()), (figures.read_time(), 1_000), "the disk idles by now");
        let half = figures.takes(500).as_secs_f64() / used.as_secs_f64();
        assert!((half - 0.5).abs() < 1e-3 || used < Duration::from_micros(1), "{half}");
    }
}
