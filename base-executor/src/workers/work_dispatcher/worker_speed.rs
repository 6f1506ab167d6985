//! The expected time of a slice.

use std::time::Duration;

/// Maximum time of the first slice of a process.
pub(super) const FIRST_PATIENCE: Duration = Duration::from_micros(200);

/// Factor on the expected time after which a slice is taken back.
const PATIENCE: u32 = 4;

/// Measured time of this process per multiply-add, which predicts workers on similar cores.
#[derive(Debug, Default)]
pub(super) struct WorkerSpeed {
    work: u64,
    taken: Duration,
}

impl WorkerSpeed {
    pub(super) fn note(&mut self, work: u64, taken: Duration) {
        // Old measurements fade, because the machine's speed varies.
        if self.work > 1 << 32 {
            self.work /= 2;
            self.taken /= 2;
        }
        self.work += work;
        self.taken += taken;
    }

    /// Returns the time to wait for a slice of `work` multiply-adds.
    pub(super) fn patience(&self, work: u64) -> Duration {
        if self.work == 0 {
            return FIRST_PATIENCE;
        }
        let expected = self.taken.mul_f64(work as f64 / self.work as f64);
        expected.saturating_mul(PATIENCE).max(FIRST_PATIENCE / 4)
    }
}
