//! How long a slice should take.

use std::time::Duration;

/// How long the first slice of a process may take.
pub(super) const FIRST_PATIENCE: Duration = Duration::from_micros(200);

/// A slice that takes so many times as long as others of its size is taken back.
const PATIENCE: u32 = 4;

/// How long this process takes for a multiply-add: what is to be expected of workers on cores like its own.
#[derive(Debug, Default)]
pub(super) struct WorkerSpeed {
    work: u64,
    taken: Duration,
}

impl WorkerSpeed {
    pub(super) fn note(&mut self, work: u64, taken: Duration) {
        // Old figures fade: a machine has good and bad minutes.
        if self.work > 1 << 32 {
            self.work /= 2;
            self.taken /= 2;
        }
        self.work += work;
        self.taken += taken;
    }

    /// How long to wait for a slice of so much work.
    pub(super) fn patience(&self, work: u64) -> Duration {
        if self.work == 0 {
            return FIRST_PATIENCE;
        }
        let expected = self.taken.mul_f64(work as f64 / self.work as f64);
        expected.saturating_mul(PATIENCE).max(FIRST_PATIENCE / 4)
    }
}
