//! All metrics of one executor.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use shmproto::message::{Stats, Welcome};

use super::{
    executor::{ExecutorMetrics, LastStats},
    layers::LayerMetrics,
    memory::MemoryMetrics,
    placement::PlacementMetrics,
    store::MetricStore,
};
use crate::{config::TelemetryConfig, lock::lock};

#[derive(Debug)]
pub(super) struct PerExecutorMetrics {
    label: Option<String>,
    pub(super) store: Arc<MetricStore>,
    executor: ExecutorMetrics,
    memory: MemoryMetrics,
    placement: PlacementMetrics,
    layers: LayerMetrics,
    latest: Mutex<LastStats>,
    /// Maximum number of running sequences, hence of adapters in use.
    max_running: AtomicU32,
}

impl PerExecutorMetrics {
    /// Creates the metrics at zero in `store`; a labelled executor needs a store of its own.
    pub(super) fn new(
        store: Arc<MetricStore>,
        label: Option<&str>,
        telemetry: &TelemetryConfig,
        index: usize,
    ) -> Self {
        Self {
            label: label.map(str::to_owned),
            executor: ExecutorMetrics::new(&store),
            memory: MemoryMetrics::new(&store),
            placement: PlacementMetrics::new(&store, telemetry.expected_workers(index)),
            layers: LayerMetrics::new(&store),
            latest: Mutex::default(),
            max_running: AtomicU32::new(0),
            store,
        }
    }

    /// Returns the value of the label `executor`, if there are several executors.
    pub(super) fn label(&self) -> Option<&str> {
        self.label.as_deref()
    }

    pub(super) fn expected_workers(&self) -> u32 {
        self.placement.expected_workers()
    }

    pub(super) fn max_running(&self) -> u32 {
        self.max_running.load(Relaxed)
    }

    pub(super) fn latest(&self) -> MutexGuard<'_, LastStats> {
        lock(&self.latest)
    }

    pub(super) fn report(&self, stats: &Stats, before: Option<&Stats>) {
        self.executor.report(stats, before);
        self.memory.report(stats, before);
        self.placement.report(&self.store, stats, before);
        self.layers.report(&self.store, &stats.layers, before.map(|before| &before.layers));
    }

    pub(super) fn greeted(&self, welcome: &Welcome) {
        self.executor.greeted(welcome);
        self.placement.greeted(&self.store, welcome, &self.latest().stats);
        self.max_running.store(welcome.max_running, Relaxed);
    }

    /// Handles a replaced executor process, whose counters begin at zero.
    pub(super) fn restarted(&self) {
        self.latest().forget();
        self.executor.restarted();
    }

    pub(super) fn lost(&self) {
        self.executor.lost();
        self.placement.lost();
        self.layers.lost();
    }
}
