//! The device tier: which adapters are on the device or on their way there, and when a request waits for one.
//!
//! On a CPU the device tier is memory on huge pages beside the host tier's shared pages. A load is asked for when a
//! request wants the adapter (demand), or when an adapter joins the host tier and there is room (preload). Adapters of
//! requests under way stay; of the others the least recently used gives way.

mod blocks;
mod settings;

use std::{sync::Arc, time::Duration};

use cache::{
    copy::{BytesPerSecond, Class, CopyEngine, End, SubmitError, Ticket},
    residency::{Residency, Transit, Unsent, Way},
};
use ids::AdapterId;
use model::deltas::{
    cpu_copy::CpuMemory,
    device_copy::{DeviceCopy, DeviceMemory, NoRoom},
    prepared::PreparedAdapter,
};
use shmproto::message::{AdapterStats, ColdStart, Stats};

use self::blocks::Blocks;
pub use self::settings::{Arrivals, DeviceSettings, FreeBytes};
use crate::{
    costs::{Costs, Help},
    placement::{Arrival, Found, Placement, PlacementError},
    workers::Workers,
};

/// An adapter's copy on the device, or on its way.
#[derive(Debug)]
struct Resident {
    adapter: Arc<PreparedAdapter>,
    copy: Arc<DeviceCopy>,
    way: Ticket,
}

impl Transit for Resident {
    fn missing_bytes(&self) -> u64 {
        self.copy.bytes().saturating_sub(self.copy.arrived_bytes())
    }

    fn is_complete(&self) -> bool {
        self.copy.is_complete()
    }

    fn is_over(&self) -> bool {
        self.way.is_done()
    }

    fn raise(&self, class: Class) {
        self.way.raise(class);
    }

    fn discard(self) {
        self.way.cancel();
        self.adapter.set_device(None);
        failpoint::pass("executor.adapter_evicted");
    }
}

/// The device tier of one executor.
#[derive(Debug)]
pub struct Device {
    cold_start: ColdStart,
    link: Option<BytesPerSecond>,
    residency: Residency<AdapterId, Arc<PreparedAdapter>, Resident>,
    carrier: Carrier,
    workers: Workers,
    free: FreeBytes,
    /// `None`: nothing was measured, so nobody is told to wait.
    costs: Option<Costs>,
}

/// What brings adapters to the device.
#[derive(Debug)]
struct Carrier {
    copies: CopyEngine,
    arrivals: Arrivals,
    memory: Arc<dyn DeviceMemory>,
}

/// Why an adapter has not set out.
#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error(transparent)]
    NoMemory(#[from] NoRoom),
    #[error(transparent)]
    Queue(#[from] SubmitError),
}

impl SendError {
    fn unsent(&self) -> Unsent {
        match self {
            Self::NoMemory(_) => Unsent::NoMemory,
            Self::Queue(SubmitError::Full { .. }) => Unsent::QueueFull,
        }
    }
}

impl Carrier {
    /// Starts an adapter's way.
    fn send(
        &self,
        id: AdapterId,
        adapter: &Arc<PreparedAdapter>,
        class: Class,
    ) -> Result<Resident, SendError> {
        let copy = Arc::new(self.memory.copy_of(adapter.host())?);
        let memory = Arc::clone(&self.memory);
        let load = Blocks { adapter: Arc::clone(adapter), copy: Arc::clone(&copy), memory };
        let arrivals = self.arrivals.clone();
        let done = move |end| {
            if end == End::Failed {
                tracing::error!(adapter = %id, "an adapter's way to the device ended by a fault");
            }
            (arrivals.0)(id);
        };
        let way = self.copies.submit(class, Box::new(load), Box::new(done))?;
        adapter.set_device(Some(Arc::clone(&copy)));
        Ok(Resident { adapter: Arc::clone(adapter), copy, way })
    }
}

impl Device {
    /// An empty device tier.
    ///
    /// # Errors
    /// If the thread that copies cannot be started.
    pub fn new(
        settings: DeviceSettings,
        arrivals: Arrivals,
        workers: Workers,
        costs: Option<Costs>,
    ) -> std::io::Result<Self> {
        let memory = Arc::new(CpuMemory);
        Ok(Self {
            cold_start: settings.cold_start,
            link: settings.link,
            residency: Residency::new(settings.bytes),
            carrier: Carrier { copies: CopyEngine::start(settings.link)?, arrivals, memory },
            workers,
            free: FreeBytes::new(|| 0),
            costs,
        })
    }

    /// Copies adapters to `memory`, of which `free` says how much nobody uses; without it the device is the CPU.
    #[must_use]
    pub fn with_memory(mut self, memory: Arc<dyn DeviceMemory>, free: FreeBytes) -> Self {
        (self.carrier.memory, self.free) = (memory, free);
        self
    }

    /// Sees to it that the adapter is there or comes, if there is room.
    fn bring(&mut self, id: AdapterId, adapter: &Arc<PreparedAdapter>, class: Class) -> Way {
        let bytes = adapter.device_bytes() as u64;
        // What has no matrices is where it is computed.
        if bytes == 0 {
            return Way::There;
        }
        let was_short = self.residency.is_short(id);
        let send = || {
            self.carrier.send(id, adapter, class).map_err(|error| {
                // Once: it is tried again with every request.
                if !was_short && matches!(error, SendError::NoMemory(_)) {
                    tracing::warn!(adapter = %id, %error, "no memory for an adapter on the device; it stays in the host tier");
                }
                error.unsent()
            })
        };
        self.residency.bring(id, bytes, class, send)
    }

    /// Whether a request does better to wait for what is missing of its adapter.
    fn should_wait(&self, adapter: &PreparedAdapter, tokens: usize, missing_bytes: u64) -> bool {
        match self.cold_start {
            ColdStart::OnDemand | ColdStart::Cached => true,
            ColdStart::CpuAssist => match &self.costs {
                None => false,
                Some(costs) => {
                    let queued = self.residency.on_the_way_bytes().saturating_sub(missing_bytes);
                    let bytes = [missing_bytes, queued];
                    match costs.help(adapter, tokens, bytes, &self.workers.cores()) {
                        Help::Wait => true,
                        Help::Start { workers } => {
                            self.workers.want(workers);
                            false
                        }
                    }
                }
            },
        }
    }

    /// Whether a request waits until others leave room for its adapter.
    fn waits_for_room(&self, id: AdapterId) -> bool {
        self.cold_start == ColdStart::OnDemand && self.residency.can_wait_for_room(id)
    }

    /// Gives adapters that are computed from the host tier alone the room that others have left.
    fn bring_those_left_out(&mut self) {
        for (id, adapter) in self.residency.left_out() {
            self.bring(id, &adapter, Class::Demand);
        }
    }

    fn no_room(&self, asked_bytes: u64) -> PlacementError {
        let tier = self.residency.tier();
        let (held_bytes, limit_bytes) = (tier.held_bytes(), tier.limit_bytes());
        PlacementError::TierFull { asked_bytes, held_bytes, limit_bytes }
    }

    fn device_full(&self, asked_bytes: u64) -> PlacementError {
        PlacementError::DeviceFull { asked_bytes, free_bytes: (self.free.0)() }
    }
}

impl Placement<PreparedAdapter> for Device {
    fn loaded(&mut self, id: AdapterId, adapter: &Arc<PreparedAdapter>) -> Result<Arrival, PlacementError> {
        let bytes = adapter.device_bytes() as u64;
        let (class, must_fit) = match self.cold_start {
            ColdStart::Cached => (Class::Demand, true),
            ColdStart::OnDemand | ColdStart::CpuAssist => (Class::Preload, false),
        };
        // On demand it has to fit some day; otherwise it can be computed from the host tier for ever.
        let limit_bytes = self.residency.tier().limit_bytes();
        if self.cold_start == ColdStart::OnDemand && bytes > limit_bytes {
            return Err(PlacementError::TierFull { asked_bytes: bytes, held_bytes: 0, limit_bytes });
        }
        if self.residency.has_failed(id) {
            return Ok(Arrival::Now);
        }
        if !self.residency.has_room(id, bytes) {
            return if must_fit { Err(self.no_room(bytes)) } else { Ok(Arrival::Now) };
        }
        match self.bring(id, adapter, class) {
            Way::Missing { .. } if must_fit => Ok(Arrival::Later),
            Way::NoRoom if must_fit => {
                // It is refused, and may be loaded again.
                let is_short = self.residency.forget_shortage(id);
                Err(if is_short { self.device_full(bytes) } else { self.no_room(bytes) })
            }
            _ => Ok(Arrival::Now),
        }
    }

    fn unloaded(&mut self, id: AdapterId) {
        self.residency.remove(id);
        self.bring_those_left_out();
    }

    fn arrived(&mut self, id: AdapterId) {
        if let Some(costs) = &mut self.costs {
            costs.link(self.carrier.copies.stats());
        }
        self.residency.arrived(id);
    }

    fn enter(&mut self, id: AdapterId, adapter: &Arc<PreparedAdapter>, tokens: usize) -> Found {
        let found = match self.bring(id, adapter, Class::Demand) {
            Way::There => Found::OnDevice,
            Way::Missing { bytes } if self.should_wait(adapter, tokens, bytes) => {
                self.residency.await_arrival(id);
                Found::MustWait
            }
            Way::NoRoom if self.waits_for_room(id) => Found::MustWait,
            Way::Missing { .. } => Found::Missing,
            Way::NoRoom => {
                self.residency.leave_out(id, adapter);
                Found::Missing
            }
        };
        if found != Found::MustWait {
            self.residency.hold(id);
        }
        found
    }

    fn leave(&mut self, id: AdapterId) {
        if self.residency.release(id) {
            self.bring_those_left_out();
        }
    }

    fn observe(&mut self, rows: usize, took: Duration) {
        self.carrier.memory.settle();
        if let Some(costs) = &mut self.costs {
            costs.pass(rows, took);
        }
    }

    fn stats(&self, stats: &mut Stats) {
        let copies = self.carrier.copies.stats();
        stats.device_free_bytes = (self.free.0)();
        stats.device_bytes = self.residency.tier().held_bytes();
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
