//! Metrics of adapter placement: where adapters are computed, how they reach the device, cost of waiting.

use std::{collections::HashMap, sync::Arc};

use shmproto::message::{AdapterIdBytes, AdapterStats, Stats, Welcome};

use super::{
    executor::{float, grown},
    labels::{AdapterLabels, OTHER},
    store::{MetricStore, MetricValue},
    table::Id,
};
use crate::{
    adapters::Registry,
    placement_stats::{kind, mode},
};

#[derive(Debug)]
pub(super) struct PlacementMetrics {
    expected_workers: u32,
    memory: Arc<MetricValue>,
    memory_free: Arc<MetricValue>,
    device_bytes: Arc<MetricValue>,
    device_budget: Arc<MetricValue>,
    cold_starts: Arc<MetricValue>,
    copied_bytes: Arc<MetricValue>,
    copy_time: Arc<MetricValue>,
    workers: Arc<MetricValue>,
    workers_lost: Arc<MetricValue>,
    worker_wait: Arc<MetricValue>,
}

impl PlacementMetrics {
    pub(super) fn new(store: &MetricStore, expected_workers: u32) -> Self {
        let number = |id| store.number(id, &[]);
        number(Id::WorkersExpected).set(f64::from(expected_workers));
        Self {
            expected_workers,
            memory: number(Id::DeviceMemory),
            memory_free: number(Id::DeviceMemoryFree),
            device_bytes: number(Id::DeviceBytes),
            device_budget: number(Id::DeviceBudget),
            cold_starts: number(Id::ColdStarts),
            copied_bytes: number(Id::CopiedBytes),
            copy_time: number(Id::CopyTime),
            workers: number(Id::Workers),
            workers_lost: number(Id::WorkersLost),
            worker_wait: number(Id::WorkerWait),
        }
    }

    pub(super) fn expected_workers(&self) -> u32 {
        self.expected_workers
    }

    /// Updates the metrics from the executor's welcome message; `latest` tells whether its link is emulated.
    pub(super) fn greeted(&self, store: &MetricStore, welcome: &Welcome, latest: &Stats) {
        self.device_budget.set(float(welcome.device_budget_bytes));
        self.memory.set(float(welcome.device.memory_bytes));
        let labels = [kind(welcome.device.kind), &welcome.device.name];
        store.retain(Id::Device, |shown| shown == labels);
        store.number(Id::Device, &labels).set(1.0);
        let weights = &welcome.device.group_weight_bytes;
        store.retain(Id::DeviceWeights, |shown| {
            shown[0].parse().is_ok_and(|device: usize| device < weights.len())
        });
        for (device, &bytes) in weights.iter().enumerate() {
            store.number(Id::DeviceWeights, &[&device.to_string()]).set(float(bytes));
        }
        let link = if latest.link_bytes_per_s > 0 { "emulated" } else { "real" };
        let labels = [mode(welcome.cold_start), link];
        store.retain(Id::ColdStart, |shown| shown == labels);
        store.number(Id::ColdStart, &labels).set(1.0);
    }

    pub(super) fn report(&self, store: &MetricStore, now: &Stats, before: Option<&Stats>) {
        self.memory_free.set(float(now.device_free_bytes));
        self.device_bytes.set(float(now.device_bytes));
        self.workers.set(f64::from(u32::try_from(now.workers.len()).unwrap_or(u32::MAX)));
        for (counter, figure, unit) in [
            (&self.cold_starts, (|stats| stats.cold_starts) as fn(&Stats) -> u64, 1.0),
            (&self.copied_bytes, |stats| stats.copied_bytes, 1.0),
            (&self.copy_time, |stats| stats.copy_us, 1e-6),
            (&self.workers_lost, |stats| stats.workers_lost, 1.0),
            (&self.worker_wait, |stats| stats.worker_wait_us, 1e-6),
        ] {
            counter.add(float(grown(figure(now), before.map(figure))) * unit);
        }
        count_workers(store, now, before);
    }

    pub(super) fn lost(&self) {
        self.memory_free.set(0.0);
        self.device_bytes.set(0.0);
        self.workers.set(0.0);
    }
}

/// Counts by core, because a restarted worker continues its predecessor's series.
fn count_workers(store: &MetricStore, now: &Stats, before: Option<&Stats>) {
    for worker in &now.workers {
        let old = before.and_then(|before| {
            before.workers.iter().find(|old| (old.core, old.pid) == (worker.core, worker.pid))
        });
        let core = worker.core.to_string();
        for (id, now, before) in [
            (Id::WorkerSlices, worker.slices, old.map(|old| old.slices)),
            (Id::WorkerTakenBack, worker.taken_back, old.map(|old| old.taken_back)),
        ] {
            store.number(id, &[&core]).add(float(grown(now, before)));
        }
    }
}

/// A counter of an adapter: metric, second label, and reported value.
type AdapterCounter = (Id, &'static str, fn(&AdapterStats) -> u64);

const BY_ADAPTER: [AdapterCounter; 5] = [
    (Id::AdapterRankRows, "device", |stats| stats.rank_rows_device),
    (Id::AdapterRankRows, "workers", |stats| stats.rank_rows_workers),
    (Id::AdapterRankRows, "executor", |stats| stats.rank_rows_executor),
    (Id::AdapterDraftedTokens, "accepted", |stats| stats.accepted),
    (Id::AdapterDraftedTokens, "rejected", |stats| stats.drafted.saturating_sub(stats.accepted)),
];

/// Counts work for adapters by name, within the limit on labels; adapters without work take no label.
pub(super) fn count_by_adapter(
    store: &MetricStore,
    adapters: &AdapterLabels,
    now: &Stats,
    before: Option<&Stats>,
    registry: &Registry,
) {
    let old = before.into_iter().flat_map(|before| &before.adapters);
    let old: HashMap<_, _> = old.map(|adapter| (adapter.adapter, adapter)).collect();
    let new = now.adapters.iter().map(|adapter| {
        let old = old.get(&adapter.adapter);
        (adapter, BY_ADAPTER.map(|(.., figure)| grown(figure(adapter), old.map(|old| figure(old)))))
    });
    let new: Vec<_> = new.filter(|(_, counts)| counts.iter().any(|count| *count > 0)).collect();
    if new.is_empty() {
        return;
    }
    let names = names(registry, adapters);
    for (adapter, counts) in new {
        let metrics = names.get(&adapter.adapter).map(|name| adapters.of(store, Some(name)));
        let label = metrics.as_ref().map_or(OTHER, |metrics| &metrics.label);
        for ((id, kind, _), count) in BY_ADAPTER.iter().zip(counts) {
            store.number(*id, &[label, kind]).add(float(count));
        }
        // Adapters share the label `other`, which therefore has no single confidence.
        if adapter.drafted > 0 && label != OTHER {
            let least = f64::from(adapter.least_confidence);
            store.number(Id::AdapterDraftLeastConfidence, &[label]).set(least);
        }
    }
}

/// Returns one name per adapter. A name with a label comes first, because requests used it, then the
/// alphabetically first. An unnamed adapter keeps its former name.
fn names(registry: &Registry, adapters: &AdapterLabels) -> HashMap<AdapterIdBytes, String> {
    let (draining, named) = (registry.draining(), registry.entries());
    let mut names = HashMap::<AdapterIdBytes, String>::new();
    for entry in draining.iter().chain(named.values().rev()) {
        let name = &entry.record.name;
        let known = names.entry(entry.id().0).or_insert_with(|| name.clone());
        if adapters.have(name) || !adapters.have(known) {
            known.clone_from(name);
        }
    }
    names
}
