//! Metrics of an executor's memory tiers.

use std::sync::Arc;

use shmproto::message::{MemoryAccountStats, MemoryStats, Stats};

use super::{
    executor::{float, grown},
    store::{MetricStore, MetricValue},
    table::Id,
};

/// A label value and the value that it counts.
type LabelledStat<S> = (&'static str, fn(&S) -> u64);

/// Labels and values of the counters of moved KV blocks.
const MOVES: [LabelledStat<MemoryStats>; 7] = [
    ("fetched_host", |memory| memory.fetched_host_blocks),
    ("fetched_disk", |memory| memory.fetched_disk_blocks),
    ("prefetched", |memory| memory.prefetched_blocks),
    ("spilled", |memory| memory.spilled_blocks),
    ("evicted", |memory| memory.evicted_blocks),
    ("lost", |memory| memory.lost_blocks),
    ("failed", |memory| memory.failed_copies),
];

/// Labels and values of the gauges of host memory.
const HELD: [LabelledStat<MemoryAccountStats>; 7] = [
    ("weights", |held| held.weights_bytes),
    ("blocks", |held| held.blocks_bytes),
    ("adapters", |held| held.adapters_bytes),
    ("history", |held| held.history_bytes),
    ("workers", |held| held.workers_bytes),
    ("clients", |held| held.clients_bytes),
    ("drafts", |held| held.drafts_bytes),
];

const MICROS: f64 = 1e6;

/// A counter, the reported units per unit of the metric, and the reported value.
type MemoryCounter = (Id, f64, fn(&MemoryStats) -> u64);

/// The counters of weight reads.
const WEIGHTS: [MemoryCounter; 3] = [
    (Id::WeightReadBytes, 1.0, |memory| memory.weights.read_bytes),
    (Id::WeightRead, MICROS, |memory| memory.weights.read_us),
    (Id::WeightWait, MICROS, |memory| memory.weights.waited_us),
];

#[derive(Debug)]
struct TierSlotGauges {
    total: Arc<MetricValue>,
    used: Arc<MetricValue>,
}

#[derive(Debug)]
pub(super) struct MemoryMetrics {
    host: TierSlotGauges,
    disk: TierSlotGauges,
    adapters: Arc<MetricValue>,
    required: Arc<MetricValue>,
    moves: Vec<Arc<MetricValue>>,
    held: Vec<Arc<MetricValue>>,
    limit: Arc<MetricValue>,
    weights: Vec<Arc<MetricValue>>,
}

impl MemoryMetrics {
    pub(super) fn new(store: &MetricStore) -> Self {
        let slots = |tier| TierSlotGauges {
            total: store.number(Id::TierBlocks, &[tier, "total"]),
            used: store.number(Id::TierBlocks, &[tier, "used"]),
        };
        Self {
            host: slots("host"),
            disk: slots("disk"),
            adapters: store.number(Id::KvBlocks, &["adapters"]),
            required: store.number(Id::AdaptersRequired, &[]),
            moves: MOVES.iter().map(|(way, _)| store.number(Id::MovedBlocks, &[way])).collect(),
            held: HELD.iter().map(|(what, _)| store.number(Id::HeldBytes, &[what])).collect(),
            limit: store.number(Id::MemoryLimit, &[]),
            weights: WEIGHTS.iter().map(|(id, ..)| store.number(*id, &[])).collect(),
        }
    }

    pub(super) fn report(&self, now: &Stats, before: Option<&Stats>) {
        let now = &now.memory;
        self.host.total.set(f64::from(now.host_blocks_total));
        self.host.used.set(f64::from(now.host_blocks_used));
        self.disk.total.set(f64::from(now.disk_blocks_total));
        self.disk.used.set(f64::from(now.disk_blocks_used));
        self.adapters.set(f64::from(now.adapter_blocks));
        self.required.set(f64::from(now.adapters_required));
        self.limit.set(float(now.held.limit_bytes));
        for (gauge, (_, figure)) in self.held.iter().zip(HELD) {
            gauge.set(float(figure(&now.held)));
        }
        for (counter, (_, units, figure)) in self.weights.iter().zip(WEIGHTS) {
            let more = grown(figure(now), before.map(|before| figure(&before.memory)));
            counter.add(float(more) / units);
        }
        for (counter, (_, figure)) in self.moves.iter().zip(MOVES) {
            counter.add(float(grown(figure(now), before.map(|before| figure(&before.memory)))));
        }
    }
}
