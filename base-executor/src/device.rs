//! The device tier: adapters on the device or in transit, and the decision whether a request waits for one.
//!
//! The device tier shares the block pool with the KV cache; on a CPU the pool is memory in huge pages. A
//! request starts a load (demand), and so does a new adapter in the host tier if there is capacity (preload).
//! Adapters in use stay; others are evicted by value.

mod blocks;
mod settings;

use std::{collections::HashSet, sync::Arc, time::Duration};

use kv_cache::{
    Cache,
    copy::{BytesPerSecond, CopyEnd, CopyEngine, CopyPriority, SubmitError, Ticket},
    residency::{AdapterSize, DeviceTransfer, Residency, TransferStatus},
};
use model::deltas::{
    device_copy::{DeviceCopy, DeviceMemory},
    prepared::PreparedAdapter,
};
use shmproto::message::{AdapterStats, ColdStart, Stats};
use types::{AdapterId, BlockId};

use self::blocks::Blocks;
pub use self::settings::{ArrivalNotifier, DeviceSettings, FreeBytes};
use crate::{
    cold_start_model::{ColdStartDecision, ColdStartModel},
    placement::{AdapterAvailability, LoadCompletion, Placement, PlacementError},
    workers::Workers,
};

/// An adapter's copy on the device, complete or in transit.
#[derive(Debug)]
struct DeviceAdapter {
    adapter: Arc<PreparedAdapter>,
    copy: Arc<DeviceCopy>,
    way: Ticket,
}

impl DeviceTransfer for DeviceAdapter {
    fn missing_bytes(&self) -> u64 {
        self.copy.bytes().saturating_sub(self.copy.arrived_bytes())
    }

    fn is_complete(&self) -> bool {
        self.copy.is_complete()
    }

    fn is_over(&self) -> bool {
        self.way.is_done()
    }

    fn raise(&self, class: CopyPriority) {
        self.way.raise(class);
    }

    fn discard(self) {
        self.way.cancel();
        self.adapter.set_device(None);
        self.copy.revoke();
        failpoint::pass("executor.adapter_evicted");
    }
}

/// The device tier of one executor.
#[derive(Debug)]
pub struct AdapterDeviceTier {
    cold_start: ColdStart,
    link: Option<BytesPerSecond>,
    /// Size of a block of the pool, in bytes.
    block_bytes: u64,
    residency: Residency<Arc<PreparedAdapter>, DeviceAdapter>,
    /// Adapters pinned until they are unloaded.
    kept: HashSet<AdapterId>,
    carrier: AdapterUploader,
    workers: Workers,
    free: FreeBytes,
    /// Cost model; without one no request waits.
    costs: Option<ColdStartModel>,
}

/// Copies adapters to the device.
#[derive(Debug)]
struct AdapterUploader {
    copies: CopyEngine,
    arrivals: ArrivalNotifier,
    memory: Arc<dyn DeviceMemory>,
}

impl AdapterUploader {
    /// Starts the copy of an adapter to `blocks`; fails if the copy queue is full.
    fn send(
        &self,
        id: AdapterId,
        adapter: &Arc<PreparedAdapter>,
        blocks: &[BlockId],
        class: CopyPriority,
    ) -> Result<DeviceAdapter, SubmitError> {
        let copy = Arc::new(self.memory.copy_of(adapter.host(), blocks));
        let memory = Arc::clone(&self.memory);
        let load = Blocks { adapter: Arc::clone(adapter), copy: Arc::clone(&copy), memory };
        let arrivals = self.arrivals.clone();
        let done = move |end| {
            if end == CopyEnd::Failed {
                tracing::error!(adapter = %id, "loading an adapter to the device failed by a fault");
            }
            (arrivals.0)(id);
        };
        let way = self.copies.submit(class, Box::new(load), Box::new(done))?;
        adapter.set_device(Some(Arc::clone(&copy)));
        Ok(DeviceAdapter { adapter: Arc::clone(adapter), copy, way })
    }
}

impl AdapterDeviceTier {
    /// Creates an empty device tier, whose adapters are copied to `memory`.
    ///
    /// # Errors
    /// If the copy thread cannot be started.
    pub fn new(
        settings: DeviceSettings,
        memory: Arc<dyn DeviceMemory>,
        arrivals: ArrivalNotifier,
        workers: Workers,
        costs: Option<ColdStartModel>,
    ) -> std::io::Result<Self> {
        Ok(Self {
            cold_start: settings.cold_start,
            link: settings.link,
            block_bytes: settings.block_bytes,
            residency: Residency::default(),
            kept: HashSet::new(),
            carrier: AdapterUploader { copies: CopyEngine::start(settings.link)?, arrivals, memory },
            workers,
            free: FreeBytes::new(|| 0),
            costs,
        })
    }

    /// Sets the function for the free bytes of the device.
    #[must_use]
    pub(crate) fn with_free_bytes(self, free: FreeBytes) -> Self {
        Self { free, ..self }
    }

    /// Ensures that the adapter is on the device or in transit, if there is capacity.
    fn load(
        &mut self,
        pool: &mut Cache,
        id: AdapterId,
        adapter: &Arc<PreparedAdapter>,
        class: CopyPriority,
    ) -> TransferStatus {
        let size = self.size_of(adapter);
        // An adapter without matrices needs no copy.
        if size.blocks == 0 {
            return TransferStatus::There;
        }
        self.residency.load(pool, id, adapter, size, class)
    }

    /// Returns the adapter's size in the pool.
    fn size_of(&self, adapter: &PreparedAdapter) -> AdapterSize {
        let blocks = adapter.device_blocks(&*self.carrier.memory);
        AdapterSize { blocks, bytes: adapter.device_bytes() as u64 }
    }

    /// Whether waiting for the missing part of the adapter is better for a request.
    fn should_wait(&self, adapter: &PreparedAdapter, tokens: usize, missing_bytes: u64) -> bool {
        match self.cold_start {
            ColdStart::OnDemand | ColdStart::Cached => true,
            ColdStart::CpuAssist => match &self.costs {
                None => false,
                Some(costs) => {
                    let queued = self.residency.on_the_way_bytes().saturating_sub(missing_bytes);
                    let bytes = [missing_bytes, queued];
                    match costs.help(adapter, tokens, bytes, &self.workers.cores()) {
                        ColdStartDecision::Wait => true,
                        ColdStartDecision::Start { workers } => {
                            self.workers.want(workers);
                            false
                        }
                    }
                }
            },
        }
    }

    /// Whether a request waits for capacity for its adapter.
    fn waits_for_room(&self, id: AdapterId) -> bool {
        self.cold_start == ColdStart::OnDemand && !self.residency.has_failed(id)
    }

    /// Loads adapters computed from the host tier, now that there is capacity.
    fn bring_those_left_out(&mut self, pool: &mut Cache) {
        for (id, adapter) in self.residency.left_out() {
            self.load(pool, id, &adapter, CopyPriority::Demand);
        }
    }

    fn no_room(&self, pool: &Cache, asked_bytes: u64) -> PlacementError {
        let [held_bytes, limit_bytes] = [pool.counts().adapters, pool.max_adapter_blocks() as usize]
            .map(|blocks| blocks as u64 * self.block_bytes);
        PlacementError::TierFull { asked_bytes, held_bytes, limit_bytes }
    }
}

impl Placement<PreparedAdapter> for AdapterDeviceTier {
    fn apply_evictions(&mut self, pool: &mut Cache) {
        self.residency.apply_evictions(pool);
        // Eviction of KV blocks frees capacity for adapters too.
        for (id, adapter) in self.residency.left_out() {
            self.load(pool, id, &adapter, CopyPriority::Demand);
        }
    }

    fn start_copies(&mut self, pool: &Cache) {
        let Self { residency, carrier, .. } = self;
        residency
            .start_copies(pool, |id, adapter, blocks, class| carrier.send(id, adapter, blocks, class).ok());
    }

    fn blocks_of(&self, id: AdapterId, adapter: &PreparedAdapter) -> Option<u32> {
        let AdapterSize { blocks, .. } = self.size_of(adapter);
        (blocks > 0 && !self.residency.has_failed(id)).then_some(blocks)
    }

    fn loaded(
        &mut self,
        pool: &mut Cache,
        id: AdapterId,
        adapter: &Arc<PreparedAdapter>,
    ) -> Result<LoadCompletion, PlacementError> {
        let AdapterSize { bytes, blocks } = self.size_of(adapter);
        let (class, must_fit) = match self.cold_start {
            ColdStart::Cached => (CopyPriority::Demand, true),
            ColdStart::OnDemand | ColdStart::CpuAssist => (CopyPriority::Preload, false),
        };
        // On-demand adapters must fit eventually; others can always be computed from the host tier.
        if self.cold_start == ColdStart::OnDemand && blocks > pool.max_adapter_blocks() {
            let limit_bytes = u64::from(pool.max_adapter_blocks()) * self.block_bytes;
            return Err(PlacementError::TierFull { asked_bytes: bytes, held_bytes: 0, limit_bytes });
        }
        if self.residency.has_failed(id) {
            return Ok(LoadCompletion::Now);
        }
        // A required adapter may evict cached KV blocks; an optional one takes only free blocks.
        let [free, idle] = pool.free_adapter_blocks();
        let available = if must_fit { idle } else { free };
        if !pool.has_adapter_place(id) && blocks as usize > available {
            return if must_fit { Err(self.no_room(pool, bytes)) } else { Ok(LoadCompletion::Now) };
        }
        let way = self.load(pool, id, adapter, class);
        if must_fit && way != TransferStatus::NoRoom && self.kept.insert(id) {
            self.residency.add_user(pool, id);
        }
        match way {
            TransferStatus::Missing { .. } if must_fit => Ok(LoadCompletion::Later),
            TransferStatus::NoRoom if must_fit => Err(self.no_room(pool, bytes)),
            _ => Ok(LoadCompletion::Now),
        }
    }

    fn unloaded(&mut self, pool: &mut Cache, id: AdapterId) {
        if self.kept.remove(&id) {
            self.residency.release(pool, id);
        }
        self.residency.remove(pool, id);
        self.bring_those_left_out(pool);
    }

    fn arrived(&mut self, pool: &mut Cache, id: AdapterId) {
        if let Some(costs) = &mut self.costs {
            costs.link(self.carrier.copies.stats());
        }
        self.residency.arrived(pool, id);
    }

    fn begin_use(
        &mut self,
        pool: &mut Cache,
        id: AdapterId,
        adapter: &Arc<PreparedAdapter>,
        tokens: usize,
    ) -> AdapterAvailability {
        let found = match self.load(pool, id, adapter, CopyPriority::Demand) {
            TransferStatus::There => AdapterAvailability::OnDevice,
            TransferStatus::Missing { bytes } if self.should_wait(adapter, tokens, bytes) => {
                self.residency.await_arrival(pool, id);
                AdapterAvailability::MustWait
            }
            TransferStatus::NoRoom if self.waits_for_room(id) => AdapterAvailability::MustWait,
            TransferStatus::Missing { .. } => AdapterAvailability::Missing,
            TransferStatus::NoRoom => {
                self.residency.leave_out(id, adapter);
                AdapterAvailability::Missing
            }
        };
        if found != AdapterAvailability::MustWait {
            self.residency.add_user(pool, id);
        }
        found
    }

    fn end_use(&mut self, pool: &mut Cache, id: AdapterId) {
        if self.residency.release(pool, id) {
            self.bring_those_left_out(pool);
        }
    }

    fn observe(&mut self, rows: usize, took: Duration) {
        self.carrier.memory.poll_arrivals();
        if let Some(costs) = &mut self.costs {
            costs.pass(rows, took);
        }
    }

    fn stats(&self, pool: &Cache, stats: &mut Stats) {
        let copies = self.carrier.copies.stats();
        stats.device_free_bytes = (self.free.0)();
        stats.device_bytes = pool.counts().adapters as u64 * self.block_bytes;
        stats.copied_bytes = copies.copied_bytes;
        stats.copy_us = copies.copy_us;
        stats.link_bytes_per_s = self.link.map_or(0, BytesPerSecond::get);
        self.workers.stats(stats);
    }

    fn adapter_stats(&self, id: AdapterId, adapter: &PreparedAdapter, line: &mut AdapterStats) {
        line.device_bytes = self.residency.copy(id).map_or(0, |resident| resident.copy.arrived_bytes());
        [line.rank_rows_device, line.rank_rows_workers, line.rank_rows_executor] = adapter.tally().read();
    }
}

#[cfg(test)]
mod tests;
