//! Metrics of the layer service, for all tenants together. `/v1/status` shows use by tenant to
//! administrators, because keys for metrics may not learn tenants' names.

use std::sync::Arc;

use shmproto::{layer::control::SessionStats, message::LayerStats};

use super::{
    executor::{float, grown},
    store::{MetricStore, MetricValue},
    table::Id,
};
use crate::layer_stats::CLASSES;

#[derive(Debug)]
pub(super) struct LayerMetrics {
    open: Arc<MetricValue>,
    waiting_rows: Arc<MetricValue>,
    refused: Arc<MetricValue>,
    broken: Arc<MetricValue>,
    batches: Arc<MetricValue>,
    joined_rows: Arc<MetricValue>,
}

impl LayerMetrics {
    pub(super) fn new(store: &MetricStore) -> Self {
        let number = |id| store.number(id, &[]);
        Self {
            open: number(Id::LayerSessions),
            waiting_rows: number(Id::LayerWaitingRows),
            refused: number(Id::LayerSessionsRefused),
            broken: number(Id::LayerSessionsBroken),
            batches: number(Id::LayerBatches),
            joined_rows: number(Id::LayerJoinedRows),
        }
    }

    pub(super) fn report(&self, store: &MetricStore, now: &LayerStats, before: Option<&LayerStats>) {
        self.open.set(f64::from(now.open));
        self.waiting_rows.set(now.tenants.iter().map(|tenant| f64::from(tenant.waiting_rows)).sum());
        for (counter, figure) in [
            (&self.refused, (|stats| stats.refused) as fn(&LayerStats) -> u64),
            (&self.broken, |stats| stats.broken),
            (&self.batches, |stats| stats.batches),
            (&self.joined_rows, |stats| stats.joined_rows),
        ] {
            counter.add(float(grown(figure(now), before.map(figure))));
        }
        count(store, &now.used, before.map(|before| &before.used));
    }

    pub(super) fn lost(&self) {
        self.open.set(0.0);
        self.waiting_rows.set(0.0);
    }
}

fn count(store: &MetricStore, now: &SessionStats, before: Option<&SessionStats>) {
    let add = |id, labels: &[&str], figure: fn(&SessionStats) -> u64, unit: f64| {
        let grown = float(grown(figure(now), before.map(figure)));
        store.number(id, labels).add(grown * unit);
    };
    add(Id::LayerCalls, &["done"], |used| used.calls, 1.0);
    add(Id::LayerCalls, &["refused"], |used| used.refused, 1.0);
    add(Id::LayerBytes, &["in"], |used| used.bytes_in, 1.0);
    add(Id::LayerBytes, &["out"], |used| used.bytes_out, 1.0);
    add(Id::LayerWait, &[], |used| used.wait_us, 1e-6);
    add(Id::LayerCompute, &[], |used| used.compute_us, 1e-6);
    for (class, name) in CLASSES.iter().enumerate() {
        let grown = grown(now.rows[class], before.map(|before| before.rows[class]));
        store.number(Id::LayerRows, &[name]).add(float(grown));
    }
}
