//! Metrics of service classes. The operator defines the classes, so their number is small and callers cannot
//! add labels.

use super::{GatewayMetrics, ReportedBase, table::Id};
use crate::service_classes::{Objective, ServiceClasses, SloOutcome};

impl GatewayMetrics {
    /// Updates the metrics from the counters of the classes and from the admission queue.
    pub(super) fn refresh_classes(&self, classes: &ServiceClasses, bases: &[ReportedBase<'_>]) {
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let set = |id, labels: &[&str], count: u64| self.store.number(id, labels).set(count as f64);
        let tenants: Vec<_> = bases.iter().flat_map(|base| base.admission.stats()).collect();
        for (id, class) in classes.all() {
            let name = class.settings.name.as_str();
            let [requests, throttled, tokens] = class.tally.counts();
            let own = tenants.iter().filter(|tenant| tenant.principal.class == id);
            let waiting: usize = own.map(|tenant| tenant.waiting).sum();
            set(Id::ClassWaiting, &[name], waiting as u64);
            set(Id::ClassRequests, &[name], requests);
            set(Id::ClassThrottled, &[name], throttled);
            set(Id::ClassTokens, &[name], tokens);
            for objective in Objective::ALL {
                for outcome in SloOutcome::ALL {
                    let count = class.tally.promises(objective, outcome);
                    set(Id::Promises, &[name, objective.name(), outcome.name()], count);
                }
            }
        }
        let queued = bases.iter().map(|base| base.admission.queued() as u64).sum::<u64>();
        let reported = match &*self.executors {
            [only] if only.label().is_none() => u64::from(only.latest().stats.waiting),
            // With several executors, each reports its own value with its label.
            _ => 0,
        };
        set(Id::Waiting, &[], queued + reported);
    }
}
