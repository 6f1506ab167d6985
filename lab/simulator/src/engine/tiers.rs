//! The cache owner's tasks: copies, capacity of adapters, and the swapper's turn.

use std::time::Duration;

use kv_cache::{
    Cache, NodeId, Tier,
    copy::CopyPriority,
    manager::{CopyOutcome, PlacementOutcome, TierCopy},
};
use types::BlockId;

use super::links::{LinkPriority, TierLink};
use crate::{
    cost::CostModel,
    workload::{Workload, adapter_id, adapter_index},
};

/// Maximum number of blocks staged in memory for a slower tier.
const STAGED_BLOCKS: usize = 64;

/// Maximum numbers of history blocks that one turn of the swapper copies out ahead of need, and back.
const SPILLED_AT_ONCE: usize = 16;
const FETCHED_AT_ONCE: usize = 8;

/// Maximum number of adapters that one turn of the swapper loads.
const PRELOADED_AT_ONCE: usize = 2;

/// Number of blocks copied out, and back, at a time while an executor is idle.
const COPIED_WHILE_IDLE: usize = 8;

/// Fraction of the device's memory that preloads leave free.
const PRELOADS_LEAVE: f64 = 0.3;

#[derive(Debug)]
enum TierJob {
    In { node: NodeId, block: BlockId },
    Out { node: NodeId, tier: Tier },
    Adapter { index: usize, placed: u32 },
}

/// State of an adapter on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AdapterResidency {
    Absent,
    /// The missing blocks for which there is capacity are being copied.
    Loading,
    /// Only a part is present, without capacity for more.
    Partial,
    Resident,
}

#[derive(Debug, Clone, Copy)]
struct AdapterState {
    rank: u32,
    blocks: u32,
    at: AdapterResidency,
    /// Number of the adapter's blocks on the device.
    here: u32,
    /// Number of times that capacity was assigned; a copy to an earlier assignment is ignored.
    placed: u32,
}

/// Returns the number of blocks for which an adapter has capacity.
fn blocks_of(cache: &Cache, adapter: usize) -> u32 {
    cache.adapter_blocks(adapter_id(adapter)).len() as u32
}

#[derive(Debug)]
pub(super) struct Tiers {
    cost: CostModel,
    adapters: Vec<AdapterState>,
    to_device: TierLink<TierJob>,
    to_host: TierLink<TierJob>,
    disk: TierLink<TierJob>,
    /// Number of blocks copied to or from the device since the last reset.
    pub(super) carried: usize,
    /// Number of adapters loaded on demand.
    pub(super) loaded_adapters: u64,
}

impl Tiers {
    pub(super) fn new(cost: CostModel, workload: &Workload) -> Self {
        let state = |adapter: &crate::workload::WorkloadAdapter| AdapterState {
            rank: adapter.rank,
            blocks: cost.adapter_blocks(adapter.rank),
            at: AdapterResidency::Absent,
            here: 0,
            placed: 0,
        };
        Self {
            cost,
            adapters: workload.adapters.iter().map(state).collect(),
            to_device: TierLink::default(),
            to_host: TierLink::default(),
            disk: TierLink::default(),
            carried: 0,
            loaded_adapters: 0,
        }
    }

    pub(super) fn is_here(&self, adapter: usize) -> bool {
        self.adapters[adapter].at == AdapterResidency::Resident
    }

    /// Returns the missing part of an adapter.
    pub(super) fn missing(&self, adapter: usize) -> f64 {
        let AdapterState { blocks, here, .. } = self.adapters[adapter];
        1.0 - f64::from(here) / f64::from(blocks)
    }

    /// Returns the copy time of the missing part on an idle link; `None` if no more is coming.
    pub(super) fn arrives_in(&self, adapter: usize) -> Option<Duration> {
        let AdapterState { rank, at, .. } = self.adapters[adapter];
        let takes = self.cost.over_link(self.cost.adapter_bytes(rank)).mul_f64(self.missing(adapter));
        (at == AdapterResidency::Loading).then_some(takes)
    }

    pub(super) fn busy(&self) -> Duration {
        self.to_device.busy()
    }

    /// Returns the time at which the next copy ends.
    pub(super) fn next_end(&self) -> Option<Duration> {
        [&self.to_device, &self.to_host, &self.disk].into_iter().filter_map(TierLink::next_end).min()
    }

    /// Assigns capacity to an adapter if possible, pins it, and returns whether it has arrived.
    pub(super) fn pin_adapter(
        &mut self,
        cache: &mut Cache,
        now: Duration,
        adapter: usize,
        is_pinned: &mut bool,
    ) -> bool {
        self.note_evicted(cache);
        if matches!(self.adapters[adapter].at, AdapterResidency::Absent | AdapterResidency::Partial) {
            self.place(cache, now, adapter, CopyPriority::Demand);
        }
        if !*is_pinned {
            *is_pinned = cache.pin_adapter(adapter_id(adapter));
        }
        if self.adapters[adapter].at == AdapterResidency::Loading {
            let is_it = |job: &TierJob| matches!(job, TierJob::Adapter { index, .. } if *index == adapter);
            self.to_device.raise(CopyPriority::Demand, is_it);
        }
        *is_pinned && self.is_here(adapter)
    }

    fn place(&mut self, cache: &mut Cache, now: Duration, adapter: usize, class: CopyPriority) {
        let state = self.adapters[adapter];
        if cache.place_adapter(adapter_id(adapter), state.blocks) != PlacementOutcome::Placed {
            return;
        }
        self.note_evicted(cache);
        let has = blocks_of(cache, adapter);
        let state = &mut self.adapters[adapter];
        state.at = AdapterResidency::Loading;
        state.placed += 1;
        self.loaded_adapters += 1;
        let bytes =
            self.cost.adapter_bytes(state.rank) * u64::from(has - state.here) / u64::from(state.blocks);
        let takes = self.cost.over_link(bytes);
        let job = TierJob::Adapter { index: adapter, placed: state.placed };
        self.to_device.submit(now, LinkPriority::Of(class), job, takes);
    }

    fn note_evicted(&mut self, cache: &mut Cache) {
        for index in cache.take_shrunk_adapters().into_iter().map(adapter_index) {
            let state = &mut self.adapters[index];
            state.here = state.here.min(blocks_of(cache, index));
            if state.at == AdapterResidency::Resident {
                state.at = AdapterResidency::Partial;
            }
        }
        for id in cache.take_evicted_adapters() {
            let state = &mut self.adapters[adapter_index(id)];
            (state.at, state.here) = (AdapterResidency::Absent, 0);
        }
    }

    /// Starts the copies that the cache requests.
    pub(super) fn begin_copies(&mut self, cache: &mut Cache, now: Duration) {
        self.note_evicted(cache);
        let copies: Vec<TierCopy> = cache.take_copies();
        let bytes = self.cost.block_bytes;
        for copy in copies {
            match copy {
                TierCopy::In { node, block, tier, class, .. } => {
                    let (link, takes) = match tier {
                        Tier::Disk => (&mut self.disk, self.cost.over_disk(bytes)),
                        Tier::Device | Tier::Host => (&mut self.to_device, self.cost.over_link(bytes)),
                    };
                    link.submit(now, LinkPriority::Of(class), TierJob::In { node, block }, takes);
                }
                TierCopy::Hasten { node: wanted } => {
                    let is_it = |job: &TierJob| matches!(job, TierJob::In { node, .. } if *node == wanted);
                    for link in [&mut self.disk, &mut self.to_device] {
                        link.raise(CopyPriority::Demand, is_it);
                    }
                }
                TierCopy::Out { node, slots, .. } => {
                    self.carried += 1;
                    let [host, disk] = slots.map(|slot| slot.is_some());
                    if host {
                        let job = TierJob::Out { node, tier: Tier::Host };
                        self.to_host.submit(now, LinkPriority::Spill, job, self.cost.over_link(bytes));
                    }
                    if disk {
                        let job = TierJob::Out { node, tier: Tier::Disk };
                        self.disk.submit(now, LinkPriority::Spill, job, self.cost.over_disk(bytes));
                    }
                }
            }
        }
        cache.set_spill_capacity(STAGED_BLOCKS.saturating_sub(self.to_host.len() + self.disk.len()));
    }

    pub(super) fn end_copies(&mut self, cache: &mut Cache, now: Duration) {
        for link in [&mut self.to_device, &mut self.to_host, &mut self.disk] {
            while let Some(job) = link.end_next(now) {
                match job {
                    TierJob::In { node, block } => {
                        self.carried += 1;
                        cache.copied_in(node, block, CopyOutcome::Done);
                    }
                    TierJob::Out { node, tier } => cache.copied_out(node, tier, CopyOutcome::Done),
                    TierJob::Adapter { index, placed } => {
                        let state = &mut self.adapters[index];
                        if state.placed == placed && state.at == AdapterResidency::Loading {
                            state.here = blocks_of(cache, index);
                            let is_whole = state.here == state.blocks;
                            state.at =
                                if is_whole { AdapterResidency::Resident } else { AdapterResidency::Partial };
                        }
                    }
                }
            }
        }
    }

    /// Runs the swapper's turn (E-07).
    pub(super) fn swap(&mut self, cache: &mut Cache, now: Duration) {
        cache.spill(SPILLED_AT_ONCE);
        cache.prefetch(FETCHED_AT_ONCE);
        for _ in 0..PRELOADED_AT_ONCE {
            // The paper's swapper waits for capacity for the most valuable adapter, even if others would fit.
            let Some(adapter) = cache.wanted_adapter(|_| Some(0)).map(adapter_index) else { break };
            if self.adapters[adapter].blocks as usize > cache.counts().free {
                return;
            }
            self.place(cache, now, adapter, CopyPriority::SwapIn);
        }
        self.preload(cache, now);
    }

    /// Copies ahead of need while the executor is idle.
    pub(super) fn idle(&mut self, cache: &mut Cache, now: Duration) {
        cache.spill(COPIED_WHILE_IDLE);
        cache.prefetch(COPIED_WHILE_IDLE);
        // As in the executor, a preload evicts nothing.
        let wanted = cache.wanted_adapter(|id| Some(self.adapters[adapter_index(id)].blocks));
        if let Some(adapter) = wanted.map(adapter_index) {
            self.place(cache, now, adapter, CopyPriority::Preload);
        }
        self.begin_copies(cache, now);
    }

    /// Preloads adapters without requests while much of the device is free.
    fn preload(&mut self, cache: &mut Cache, now: Duration) {
        let away = self.adapters.iter().position(|adapter| adapter.at == AdapterResidency::Absent);
        let (Some(adapter), counts) = (away, cache.counts()) else { return };
        let left = counts.free.saturating_sub(self.adapters[adapter].blocks as usize);
        if left as f64 >= counts.total as f64 * PRELOADS_LEAVE {
            self.place(cache, now, adapter, CopyPriority::Preload);
        }
    }
}
