//! All that one executor reports.

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

/// The figures of one executor.
#[derive(Debug)]
pub(super) struct PerExecutorMetrics {
    label: Option<String>,
    pub(super) store: Arc<MetricStore>,
    executor: ExecutorMetrics,
    memory: MemoryMetrics,
    placement: PlacementMetrics,
    layers: LayerMetrics,
    latest: Mutex<LastStats>,
    /// Sequences it computes together: as many adapters may be in use at once.
    max_running: AtomicU32,
}

impl PerExecutorMetrics {
    /// All at zero, in `store`, of the executor at `index`; with a `label` none but its own may be there.
    pub(super) fn new(
        store: Arc<MetricStore>,
        label: Option<&str>,
        figures: &TelemetryConfig,
        index: usize,
    ) -> Self {
        Self {
            label: label.map(str::to_owned),
            executor: ExecutorMetrics::new(&store),
            memory: MemoryMetrics::new(&store),
            placement: PlacementMetrics::new(&store, figures.expected_workers(index)),
            layers: LayerMetrics::new(&store),
            latest: Mutex::default(),
            max_running: AtomicU32::new(0),
            store,
        }
    }

    /// The value of its label, if it has one.
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

    /// Takes over what was reported since `before`.
    pub(super) fn report(&self, stats: &Stats, before: Option<&Stats>) {
        self.executor.report(stats, before);
        self.memory.report(stats, before);
        self.placement.report(&self.store, stats, before);
        self.layers.report(&self.store, &stats.layers, before.map(|before| &before.layers));
    }

    /// Takes over what it says of itself once.
    pub(super) fn greeted(&self, welcome: &Welcome) {
        self.executor.greeted(welcome);
        self.placement.greeted(&self.store, welcome, &self.latest().stats);
        self.max_running.store(welcome.max_running, Relaxed);
    }

    /// Another process took its place: its counters begin at zero.
    pub(super) fn restarted(&self) {
        self.latest().forget();
        self.executor.restarted();
    }

    /// It is not there.
    pub(super) fn lost(&self) {
        self.executor.lost();
        self.placement.lost();
        self.layers.lost();
    }
}
