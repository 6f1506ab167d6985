//! Metrics of the sleep of bases. The operator defines the bases, so their number is small.

use super::{GatewayMetrics, ReportedBase, table::Id};
use crate::served_base::SleepPhase;

impl GatewayMetrics {
    /// Updates the metrics of all bases that can sleep.
    pub(super) fn refresh_sleep(&self, bases: &[ReportedBase<'_>]) {
        for base in bases.iter().map(|reported| reported.base).filter(|base| base.can_sleep()) {
            #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
            let set = |id, count: u64| self.store.number(id, &[base.name()]).set(count as f64);
            let stats = base.stats();
            set(Id::BaseAsleep, u64::from(base.phase() == SleepPhase::Asleep));
            set(Id::BaseSleeps, stats.sleeps);
            set(Id::BaseWakes, stats.wakes);
            self.store.number(Id::BaseWakeTime, &[base.name()]).set(stats.wake_s);
        }
    }
}
