//! Stats of streamed weights, readable during a pass, and the wait in which a pass lends its thread.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use scheduling::background_io::ForegroundIo;

/// Target of `trace` log events for finished loads and finished computations of layer chunks.
pub const PIPELINE: &str = "pipeline";

/// A pass that waits for weights from the disk; no other work uses its threads meanwhile.
pub trait PendingWeights {
    /// Whether the pass may go on.
    fn is_over(&self) -> bool;

    /// Returns for how long the thread may be borrowed before a disk idles or an answer is late, estimated
    /// from past reads. Zero while no estimate exists.
    fn left(&self) -> Duration;
}

/// Counters of streamed weights. The values only grow, and any thread may read them at any time.
#[derive(Debug, Default)]
pub struct WeightStreamStats {
    read_bytes: AtomicU64,
    read_ns: AtomicU64,
    /// Start of the read in progress. Finished reads are counted under this lock.
    reading: Mutex<Option<Instant>>,
    waited_ns: AtomicU64,
    computed_ns: AtomicU64,
}

impl WeightStreamStats {
    /// Returns the number of bytes read from the disk.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Relaxed)
    }

    /// Returns the time of all reads, checks included.
    #[must_use]
    pub fn read_time(&self) -> Duration {
        Duration::from_nanos(self.read_ns.load(Relaxed))
    }

    /// Returns the read time that passes waited for; computation hid the rest.
    #[must_use]
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Relaxed))
    }

    /// Returns the time that linear layers computed.
    #[must_use]
    pub fn computed(&self) -> Duration {
        Duration::from_nanos(self.computed_ns.load(Relaxed))
    }

    pub(super) fn begin_read(&self, since: Instant) {
        *self.read_now() = Some(since);
    }

    /// Records the end of a read of `bytes` bytes that began at `since`.
    pub(super) fn end_read(&self, bytes: u64, since: Instant) {
        let mut reading = self.read_now();
        *reading = None;
        self.add_read(bytes, since);
    }

    fn read_now(&self) -> MutexGuard<'_, Option<Instant>> {
        // A panic under the lock leaves a valid value, so poison is ignored.
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_read(&self, bytes: u64, since: Instant) {
        self.read_bytes.fetch_add(bytes, Relaxed);
        let took_ns = add(&self.read_ns, since);
        tracing::trace!(target: PIPELINE, bytes, took_ns, "load");
    }

    pub(super) fn add_computed(&self, chunk: usize, since: Instant) {
        let took_ns = add(&self.computed_ns, since);
        tracing::trace!(target: PIPELINE, floor = chunk, took_ns, "compute");
    }

    /// Runs `wait` and counts its duration as waiting time of a pass.
    pub(super) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let waited = wait();
        add(&self.waited_ns, begun);
        waited
    }
}

/// Weight reads have priority on a disk that also holds offloaded history, because a pass waits for them.
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

/// Adds the nanoseconds passed since `since` to `counter` and returns them.
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
        let (stats, since) = (WeightStreamStats::default(), Instant::now());
        let after = |ms| since + Duration::from_millis(ms);
        assert_eq!(stats.used(after(9)), Duration::ZERO);
        stats.begin_read(since);
        assert_eq!(stats.used(after(7)), Duration::from_millis(7));
        assert_eq!(stats.takes(1_000), Duration::ZERO, "nobody knows yet");
        stats.end_read(1_000, since);
        let used = stats.used(after(7_000));
        assert_eq!((used, stats.read_bytes()), (stats.read_time(), 1_000), "the disk idles by now");
        let half = stats.takes(500).as_secs_f64() / used.as_secs_f64();
        assert!((half - 0.5).abs() < 1e-3 || used < Duration::from_micros(1), "{half}");
    }
}
