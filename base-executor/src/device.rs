//! The device tier: which adapters are on the device or on their way there, and when a request waits for one.
//!
//! On a CPU the device tier is memory on huge pages beside the host tier's shared pages. A load is asked for when a
//! request wants the adapter (demand), or when an adapter joins the host tier and there is room (preload). Adapters of
//! requests under way stay; of the others the least recently used gives way.

mod blocks;
mod settings;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use cache::{
    copy::{BytesPerSecond, Class, CopyEngine, End, Ticket},
    device::{DeviceTier, Placement as Place},
};
use model::{
    device_copy::{DeviceCopy, DeviceMemory},
    generation::AdapterId,
    prepared_adapter::PreparedAdapter,
};
use shmproto::message::{AdapterStats, ColdStart, Stats};

use self::blocks::{Blocks, settle};
pub use self::settings::{Arrivals, DeviceSettings, FreeBytes};
use crate::{
    costs::{Costs, Help},
    placement::{Arrival, Found, Placement, PlacementError},
    workers::Workers,
};

/// An adapter on the device, or on its way.
#[derive(Debug)]
struct Resident {
    adapter: Arc<PreparedAdapter>,
    copy: Arc<DeviceCopy>,
    way: Ticket,
}

/// The device tier of one executor.
#[derive(Debug)]
pub struct Device {
    cold_start: ColdStart,
    link: Option<BytesPerSecond>,
    tier: DeviceTier<AdapterId>,
    residents: HashMap<AdapterId, Resident>,
    /// Requests under way of each adapter.
    users: HashMap<AdapterId, u32>,
    /// Adapters on their way that a request waits for: they are pinned until they have arrived, or two requests that
    /// each wait for an adapter would take the room from each other for ever.
    awaited: HashSet<AdapterId>,
    /// Adapters with users for which there was no room.
    left_out: HashMap<AdapterId, Arc<PreparedAdapter>>,
    /// Adapters whose way to the device ended by a fault; they are computed from the host tier.
    failed: HashSet<AdapterId>,
    /// Adapters for which the tier had room and the device had not: each request that wants one tries again, and starts
    /// from the host tier meanwhile.
    short: HashSet<AdapterId>,
    copies: CopyEngine,
    arrivals: Arrivals,
    workers: Workers,
    memory: DeviceMemory,
    free: FreeBytes,
    /// `None`: nothing was measured, so nobody is told to wait.
    costs: Option<Costs>,
}

/// How far an adapter is on its way to the device.
enum Way {
    /// All of it is there.
    There,
    /// So much of it is not there yet.
    Missing { bytes: u64 },
    /// There is no room for it now, or it cannot come at all.
    NoRoom,
}

/// Why an adapter has not set out.
#[derive(Debug, Clone, Copy)]
enum Unsent {
    /// There was no memory, and there may be later.
    NoMemory,
    /// Too much is on its way.
    Refused,
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
        Ok(Self {
            cold_start: settings.cold_start,
            link: settings.link,
            tier: DeviceTier::new(settings.bytes),
            residents: HashMap::new(),
            users: HashMap::new(),
            awaited: HashSet::new(),
            left_out: HashMap::new(),
            failed: HashSet::new(),
            short: HashSet::new(),
            copies: CopyEngine::start(settings.link)?,
            arrivals,
            workers,
            memory: DeviceMemory::Cpu,
            free: FreeBytes::new(|| 0),
            costs,
        })
    }

    /// Copies adapters to `memory`, of which `free` says how much nobody uses; without it the device is the CPU.
    #[must_use]
    pub fn with_memory(self, memory: DeviceMemory, free: FreeBytes) -> Self {
        Self { memory, free, ..self }
    }

    /// Sees to it that the adapter is there or comes, if there is room.
    fn bring(&mut self, id: AdapterId, adapter: &Arc<PreparedAdapter>, class: Class) -> Way {
        if self.failed.contains(&id) {
            return Way::NoRoom;
        }
        // What has no matrices is where it is computed.
        if adapter.device_bytes() == 0 {
            return Way::There;
        }
        match self.tier.place(id, adapter.device_bytes() as u64) {
            Place::AlreadyThere => {}
            Place::NoRoom | Place::TooLarge => return Way::NoRoom,
            Place::Placed { evicted } => {
                evicted.into_iter().for_each(|id| self.evict(id));
                if let Err(unsent) = self.send(id, adapter, class) {
                    self.tier.remove(id);
                    match unsent {
                        Unsent::NoMemory => self.short.insert(id),
                        Unsent::Refused => self.failed.insert(id),
                    };
                    return Way::NoRoom;
                }
                self.short.remove(&id);
                if self.users.contains_key(&id) {
                    let _ = self.tier.pin(id);
                }
            }
        }
        self.tier.touch(id);
        let Some(Resident { copy, way, .. }) = self.residents.get(&id) else { return Way::NoRoom };
        if copy.is_complete() {
            return Way::There;
        }
        way.raise(class);
        Way::Missing { bytes: copy.bytes().saturating_sub(copy.arrived_bytes()) }
    }

    /// Starts the adapter's way to the device.
    fn send(&mut self, id: AdapterId, adapter: &Arc<PreparedAdapter>, class: Class) -> Result<(), Unsent> {
        let copy = self.memory.copy_of(adapter).map(Arc::new).map_err(|error| {
            // Once: it is tried again with every request.
            if !self.short.contains(&id) {
                tracing::warn!(adapter = %id, %error, "no memory for an adapter on the device; it stays in the host tier");
            }
            Unsent::NoMemory
        })?;
        let memory = self.memory.clone();
        let load = Blocks { adapter: Arc::clone(adapter), copy: Arc::clone(&copy), memory };
        let arrivals = self.arrivals.clone();
        let done = move |end| {
            if end == End::Failed {
                tracing::error!(adapter = %id, "an adapter's way to the device ended by a fault");
            }
            (arrivals.0)(id);
        };
        let submitted = self.copies.submit(class, Box::new(load), Box::new(done));
        let way = submitted.map_err(|_| Unsent::Refused)?;
        adapter.set_device(Some(Arc::clone(&copy)));
        self.residents.insert(id, Resident { adapter: Arc::clone(adapter), copy, way });
        Ok(())
    }

    /// Nothing computes with it: evictions happen between two passes, and nobody uses it.
    fn evict(&mut self, id: AdapterId) {
        if let Some(Resident { adapter, way, .. }) = self.residents.remove(&id) {
            way.cancel();
            adapter.set_device(None);
            failpoint::pass("executor.adapter_evicted");
        }
    }

    /// Whether a request does better to wait for what is missing of its adapter.
    fn should_wait(&self, adapter: &PreparedAdapter, tokens: usize, missing_bytes: u64) -> bool {
        match self.cold_start {
            ColdStart::OnDemand | ColdStart::Cached => true,
            ColdStart::CpuAssist => match &self.costs {
                None => false,
                Some(costs) => {
                    let queued = self.on_the_way_bytes().saturating_sub(missing_bytes);
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

    /// Bytes that have not arrived of all that is on its way.
    fn on_the_way_bytes(&self) -> u64 {
        let missing =
            |resident: &Resident| resident.copy.bytes().saturating_sub(resident.copy.arrived_bytes());
        self.residents.values().filter(|resident| !resident.way.is_done()).map(missing).sum()
    }

    /// Whether room for an adapter comes when others leave: nobody knows when a device without memory will have some.
    fn can_wait_for_room(&self, id: AdapterId) -> bool {
        !self.failed.contains(&id) && !self.short.contains(&id)
    }

    /// Counts a user. An adapter with users stays where it is.
    fn hold(&mut self, id: AdapterId) {
        let users = self.users.entry(id).or_insert(0);
        *users += 1;
        if *users == 1 {
            // One that is not there runs from the host tier; it is pinned if it comes.
            let _ = self.tier.pin(id);
        }
    }

    /// Keeps an adapter on its way in its place until it has arrived.
    fn keep_awaited(&mut self, id: AdapterId) {
        if !self.awaited.contains(&id) && self.tier.pin(id) {
            self.awaited.insert(id);
        }
    }

    fn no_longer_awaited(&mut self, id: AdapterId) {
        if self.awaited.remove(&id) {
            self.tier.unpin(id);
        }
    }

    /// Gives adapters that are computed from the host tier alone the room that others have left.
    fn bring_those_left_out(&mut self) {
        for (id, adapter) in std::mem::take(&mut self.left_out) {
            if let Way::NoRoom = self.bring(id, &adapter, Class::Demand) {
                self.left_out.insert(id, adapter);
            }
        }
    }

    /// Whether there is room without anybody giving way.
    fn has_room(&self, bytes: u64) -> bool {
        self.tier.held_bytes().saturating_add(bytes) <= self.tier.limit_bytes()
    }

    fn no_room(&self, asked_bytes: u64) -> PlacementError {
        let (held_bytes, limit_bytes) = (self.tier.held_bytes(), self.tier.limit_bytes());
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
        if self.cold_start == ColdStart::OnDemand && bytes > self.tier.limit_bytes() {
            let limit_bytes = self.tier.limit_bytes();
            return Err(PlacementError::TierFull { asked_bytes: bytes, held_bytes: 0, limit_bytes });
        }
        if self.failed.contains(&id) {
            return Ok(Arrival::Now);
        }
        if !self.tier.contains(id) && !self.has_room(bytes) {
            return if must_fit { Err(self.no_room(bytes)) } else { Ok(Arrival::Now) };
        }
        match self.bring(id, adapter, class) {
            Way::Missing { .. } if must_fit => Ok(Arrival::Later),
            Way::NoRoom if must_fit => {
                // It is refused, and may be loaded again.
                self.failed.remove(&id);
                let is_short = self.short.remove(&id);
                Err(if is_short { self.device_full(bytes) } else { self.no_room(bytes) })
            }
            _ => Ok(Arrival::Now),
        }
    }

    fn unloaded(&mut self, id: AdapterId) {
        self.no_longer_awaited(id);
        self.evict(id);
        self.tier.remove(id);
        self.left_out.remove(&id);
        self.failed.remove(&id);
        self.short.remove(&id);
        self.bring_those_left_out();
    }

    fn arrived(&mut self, id: AdapterId) {
        if let Some(costs) = &mut self.costs {
            costs.link(self.copies.stats());
        }
        // This may be news of a copy that was given up; the adapter may have set out again since.
        let Some(resident) = self.residents.get(&id).filter(|resident| resident.way.is_done()) else {
            return;
        };
        if !resident.copy.is_complete() {
            self.failed.insert(id);
        }
        self.no_longer_awaited(id);
    }

    fn enter(&mut self, id: AdapterId, adapter: &Arc<PreparedAdapter>, tokens: usize) -> Found {
        let found = match self.bring(id, adapter, Class::Demand) {
            Way::There => Found::OnDevice,
            Way::Missing { bytes } if self.should_wait(adapter, tokens, bytes) => {
                self.keep_awaited(id);
                Found::MustWait
            }
            Way::NoRoom if self.cold_start == ColdStart::OnDemand && self.can_wait_for_room(id) => {
                Found::MustWait
            }
            Way::Missing { .. } => Found::Missing,
            Way::NoRoom => {
                self.left_out.insert(id, Arc::clone(adapter));
                Found::Missing
            }
        };
        if found != Found::MustWait {
            self.hold(id);
        }
        found
    }

    fn leave(&mut self, id: AdapterId) {
        let Some(users) = self.users.get_mut(&id) else { return };
        *users -= 1;
        if *users == 0 {
            self.users.remove(&id);
            self.left_out.remove(&id);
            if self.tier.contains(id) {
                self.tier.unpin(id);
                self.bring_those_left_out();
            }
        }
    }

    fn observe(&mut self, rows: usize, took: Duration) {
        settle(&self.memory);
        if let Some(costs) = &mut self.costs {
            costs.pass(rows, took);
        }
    }

    fn stats(&self, stats: &mut Stats) {
        let copies = self.copies.stats();
        stats.device_free_bytes = (self.free.0)();
        stats.device_bytes = self.tier.held_bytes();
        stats.copied_bytes = copies.copied_bytes;
        stats.copy_us = copies.copy_us;
        stats.link_bytes_per_s = self.link.map_or(0, BytesPerSecond::get);
        self.workers.stats(stats);
    }

    fn adapter_stats(&self, id: AdapterId, adapter: &PreparedAdapter, line: &mut AdapterStats) {
        line.device_bytes = self.residents.get(&id).map_or(0, |resident| resident.copy.arrived_bytes());
        [line.rank_rows_device, line.rank_rows_workers, line.rank_rows_executor] = adapter.tally().read();
    }
}

#[cfg(test)]
mod tests;
