//! Adapters brought into the executor, and who makes room for whom.
//!
//! A request takes its lease first and looks here second; whoever evicts counts leases under the same lock. So either
//! the request sees that the adapter is leaving and waits for it to come back, or the evictor sees the lease and picks
//! another.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use shmproto::message::{AdapterLoaded, ErrorCode};
use tokio::sync::watch;
use types::{AdapterId, TenantId};

use super::{
    database::Record,
    entry::{AdapterEntry, ExecutorPin, Lease},
    errors::{FetchFailure, ResidencyError, UnusableAdapter, WeightedMergeError},
    registry::Registry,
    residency::{ExecutorAdapters, PendingLoad, Residency},
    store::{CacheHold, ContentId},
};
use crate::{executor::CallError, lock::lock, thread};

/// Adapters that requests may wait for at once.
const MAX_PENDING_LOADS: usize = 64;
/// Requests that may wait for adapters at once.
const MAX_WAITERS: usize = 1024;

/// How long a request waits for others to leave room for its adapter.
const ROOM_WAIT: Duration = Duration::from_secs(1);
/// How often it looks.
const ROOM_PAUSE: Duration = Duration::from_millis(20);

/// Whether an adapter was registered itself, and when it was last used, in microseconds.
type EvictionRank = (bool, u64);

/// A request that waits; says so until it is dropped.
struct WaitingRequest<'a>(&'a ExecutorAdapters);

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        lock(&self.0.residency).waiters -= 1;
    }
}

impl Registry {
    /// Returns when the leased adapter is in the executor at `index`, where it stays as long as the place lives. At once if
    /// it is there; otherwise it is loaded, and all who wait for it share that load.
    ///
    /// # Errors
    /// See [`ResidencyError`].
    pub async fn load_on(
        self: &Arc<Self>,
        lease: &Lease,
        index: usize,
    ) -> Result<ExecutorPin, ResidencyError> {
        let place = lease.place(index);
        self.ensure_resident(&place).await?;
        Ok(place)
    }

    /// The same for a request that lost its executor, where it keeps its place meanwhile.
    ///
    /// # Errors
    /// See [`ResidencyError`].
    pub async fn reload_on(
        self: &Arc<Self>,
        place: &ExecutorPin,
        index: usize,
    ) -> Result<ExecutorPin, ResidencyError> {
        let place = place.beside(index);
        self.ensure_resident(&place).await?;
        Ok(place)
    }

    async fn ensure_resident(self: &Arc<Self>, place: &ExecutorPin) -> Result<(), ResidencyError> {
        let (home, id) = (&self.homes[place.index()], place.entry.id());
        let (mut pending, _waiting) = {
            let mut residency = lock(&home.residency);
            if home.is_host(&residency, id) {
                self.counters.hits.fetch_add(1, Relaxed);
                return Ok(());
            }
            self.counters.misses.fetch_add(1, Relaxed);
            if residency.waiters >= MAX_WAITERS {
                return Err(ResidencyError::Busy(format!(
                    "{MAX_WAITERS} requests wait for adapters already"
                )));
            }
            let pending = match residency.pending_loads.get(&id) {
                Some(pending) => pending.clone(),
                None if residency.pending_loads.len() >= MAX_PENDING_LOADS => {
                    return Err(ResidencyError::Busy(format!(
                        "{MAX_PENDING_LOADS} adapters are being loaded already"
                    )));
                }
                None => self.start_load(home, &mut residency, &place.entry),
            };
            residency.waiters += 1;
            (pending, WaitingRequest(home))
        };
        match pending.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
            // Its task is gone without a word.
            Err(_) => Err(CallError::Unavailable("the gateway is shutting down".to_owned()).into()),
        }
    }

    /// Starts the load that waiters share; it goes on if they leave.
    fn start_load(
        self: &Arc<Self>,
        home: &ExecutorAdapters,
        residency: &mut Residency,
        entry: &Arc<AdapterEntry>,
    ) -> PendingLoad {
        let (done, pending) = watch::channel(None);
        residency.pending_loads.insert(entry.id(), pending.clone());
        let (registry, lease, index) = (Arc::clone(self), entry.lease(), home.index);
        let place = lease.place(index);
        tokio::spawn(async move {
            let home = &registry.homes[index];
            let outcome = registry.load_when_there_is_room(home, &place.entry).await;
            lock(&home.residency).pending_loads.remove(&lease.id);
            done.send_replace(Some(outcome));
        });
        pending
    }

    /// Loads a registered adapter as soon as requests that use others leave room for it, within [`ROOM_WAIT`].
    async fn load_when_there_is_room(
        &self,
        home: &ExecutorAdapters,
        entry: &AdapterEntry,
    ) -> Result<(), ResidencyError> {
        // Without the lock: other adapters go their ways while this one comes from elsewhere.
        let mut held = self.fetch(entry).await?;
        let mut is_fetched_again = false;
        let mut until = Instant::now() + ROOM_WAIT;
        loop {
            let moving = home.moving.lock().await;
            let outcome = self.make_resident(home, entry).await;
            drop(moving);
            match outcome {
                Err(ResidencyError::Busy(_)) if Instant::now() < until => {
                    tokio::time::sleep(ROOM_PAUSE).await
                }
                // What lies here may have rotted: what lies in the bucket has not.
                Err(ResidencyError::Unusable(_) | ResidencyError::Sum(_))
                    if held.iter().any(CacheHold::is_of_bucket) && !is_fetched_again =>
                {
                    entry.sources().iter().for_each(|(record, _)| self.store.remove(record.content));
                    held = self.fetch(entry).await?;
                    (is_fetched_again, until) = (true, Instant::now() + ROOM_WAIT);
                }
                Err(ResidencyError::Unusable(unusable)) => {
                    entry.set_fault(Some(unusable.reason.clone()));
                    return Err(unusable.into());
                }
                Err(ResidencyError::Sum(WeightedMergeError::Refused { name, reason })) => {
                    entry.set_fault(Some(reason.clone()));
                    return Err(WeightedMergeError::Refused { name, reason }.into());
                }
                other => return other,
            }
        }
    }

    /// Brings all files that an adapter is made of to this host, if they lie elsewhere.
    pub(super) async fn fetch(&self, entry: &AdapterEntry) -> Result<Vec<CacheHold>, ResidencyError> {
        let mut held = Vec::new();
        for (record, _) in entry.sources() {
            held.push(self.fetch_files(record).await?);
        }
        Ok(held)
    }

    /// Brings the files of a registered adapter to this host, if they lie elsewhere.
    pub(super) async fn fetch_files(&self, record: &Record) -> Result<CacheHold, ResidencyError> {
        let fetched = self.store.fetch(record.content, TenantId::of(record.tenant.as_deref())).await;
        self.trim().await;
        fetched.map_err(|error| FetchFailure { name: record.name.clone(), reason: error.to_string() }.into())
    }

    /// Lets files go that the cache has no room for, but for those of adapters in use or kept resident.
    pub(super) async fn trim(&self) {
        if self.fetch_figures().is_none() {
            return;
        }
        let needed = |entry: &&Arc<AdapterEntry>| entry.is_pinned() || entry.requests() > 0;
        let keep = self.every_entry().iter().filter(needed).map(|entry| entry.record.content).collect();
        let store = self.store.clone();
        // Without a thread there is time for it later.
        let _ = thread::run("adapter-trim", move || store.trim(&keep)).await;
    }

    /// Loads an adapter whose files lie here, evicting others if it must. Call it with the home's `moving` held.
    pub(super) async fn make_resident(
        &self,
        home: &ExecutorAdapters,
        entry: &AdapterEntry,
    ) -> Result<(), ResidencyError> {
        if home.holds(entry.id()) {
            return Ok(());
        }
        self.make_room(home, entry.record.bytes).await?;
        let sources = entry.sources();
        let files = sources.iter().map(|(record, weight)| LoadFiles {
            content: record.content,
            told: self.display_source(&record.name, &record.source),
            weight: *weight,
        });
        let files: Vec<_> = files.collect();
        let loaded = self.load_files(home, &files, entry.record.tenant.as_deref()).await;
        let loaded = loaded.map_err(|error| match error {
            ResidencyError::Call(CallError::Refused(wire)) if wire.code == ErrorCode::InvalidAdapter => {
                unusable(entry, &wire.message)
            }
            other => other,
        })?;
        let expected = entry.record.weights();
        if loaded.generation == expected.0 {
            return Ok(());
        }
        let found = types::Generation(loaded.generation);
        let stranger = AdapterId(loaded.adapter);
        self.free(home, stranger).await;
        Err(unusable(entry, &format!("its files are {found}, not {expected}")))
    }

    /// Loads files of the store, of one adapter or of several with their weights, evicting one adapter after the other until they
    /// fit. Call it with the home's `moving` held.
    pub(super) async fn load_files(
        &self,
        home: &ExecutorAdapters,
        files: &[LoadFiles<'_>],
        tenant: Option<&str>,
    ) -> Result<AdapterLoaded, ResidencyError> {
        let owner = TenantId::of(tenant);
        let mut started = Instant::now();
        // For as long as others make room.
        let mut lent = Vec::with_capacity(files.len());
        for LoadFiles { content, told, weight } in files {
            let part = home.executor.stage_files(&self.store.path(*content)).await;
            lent.push((part.inspect_err(|_| self.counters.failed())?.told_as(told), *weight));
        }
        loop {
            match home.executor.load_adapter(&lent, owner).await {
                Ok(loaded) => {
                    self.counters.loaded(started.elapsed());
                    self.executors.member(home.index).books().arrived(loaded.bytes, started.elapsed());
                    lock(&home.residency).host.insert(AdapterId(loaded.adapter), loaded.bytes);
                    return Ok(loaded);
                }
                Err(CallError::Refused(wire)) if wire.code == ErrorCode::AdapterBudgetExceeded => {
                    if !self.evict_one(home).await? {
                        self.counters.failed();
                        return Err(self.no_room(home, &wire.message));
                    }
                    started = Instant::now();
                }
                Err(error) => {
                    self.counters.failed();
                    return Err(error.into());
                }
            }
        }
    }

    /// Evicts until `bytes` are free, or nothing at all if that cannot be had.
    async fn make_room(&self, home: &ExecutorAdapters, bytes: u64) -> Result<(), ResidencyError> {
        let Some(budget) = home.budget_bytes() else {
            // The load itself says why.
            return Ok(());
        };
        let (held, evictable) = {
            let residency = lock(&home.residency);
            let evictable =
                self.evictable(home, &residency).iter().map(|(_, id)| residency.host[id]).sum::<u64>();
            (residency.host.values().sum::<u64>(), evictable)
        };
        let needed = held.saturating_add(bytes).saturating_sub(budget);
        if needed > evictable {
            return Err(self.no_room(home, &format!(
                "the adapter takes {bytes} bytes, but of the executor's {budget} bytes {} are in use or pinned",
                held - evictable
            )));
        }
        while home.resident().1.saturating_add(bytes) > budget {
            if !self.evict_one(home).await? {
                break;
            }
        }
        Ok(())
    }

    /// Whether waiting helps depends on why the rest cannot go.
    fn no_room(&self, home: &ExecutorAdapters, reason: &str) -> ResidencyError {
        let residency = lock(&home.residency);
        let is_resident = |entry: &AdapterEntry| residency.host.contains_key(&entry.id());
        let in_use = |entry: &Arc<AdapterEntry>| {
            is_resident(entry) && entry.is_used_at(home.index) && !entry.is_pinned()
        };
        if self.every_entry().iter().any(in_use) {
            ResidencyError::Busy(reason.to_owned())
        } else {
            ResidencyError::NeverFits(reason.to_owned())
        }
    }

    /// Unloads the adapter that was used least recently; false if none can go.
    async fn evict_one(&self, home: &ExecutorAdapters) -> Result<bool, ResidencyError> {
        let victim = {
            let mut residency = lock(&home.residency);
            let victim = self.evictable(home, &residency).into_iter().min();
            victim.and_then(|(_, id)| residency.host.remove(&id).map(|bytes| (id, bytes)))
        };
        let Some((id, bytes)) = victim else {
            return Ok(false);
        };
        failpoint::pass("gateway.evict");
        tracing::info!(adapter = %id, bytes, "evicting an adapter to make room");
        self.counters.evictions.fetch_add(1, Relaxed);
        self.unload_from_host(home, id, bytes).await?;
        Ok(true)
    }

    /// Frees an adapter that was just taken out of `host`, or puts it back; returns the bytes freed.
    async fn unload_from_host(
        &self,
        home: &ExecutorAdapters,
        id: AdapterId,
        bytes: u64,
    ) -> Result<u64, CallError> {
        match home.executor.unload_adapter(id.0).await {
            Ok(unloaded) => Ok(unloaded.freed_bytes),
            // It does not know it: so it holds nothing.
            Err(CallError::Refused(wire)) if wire.code == ErrorCode::AdapterNotFound => Ok(0),
            Err(error) => {
                lock(&home.residency).host.insert(id, bytes);
                Err(error)
            }
        }
    }

    /// What may go, with its worth. What is in the executor and nobody's is first; then what is made of others, of which whoever may
    /// ask makes as much as they like; each of them by when it was last used.
    fn evictable(&self, home: &ExecutorAdapters, residency: &Residency) -> Vec<(EvictionRank, AdapterId)> {
        let mut uses: HashMap<AdapterId, Option<EvictionRank>> =
            residency.host.keys().map(|id| (*id, Some((false, 0)))).collect();
        for entry in self.every_entry() {
            if let Some(used) = uses.get_mut(&entry.id()) {
                let free = !entry.is_used_at(home.index) && !entry.is_pinned();
                let worth = (entry.parts().is_empty(), entry.last_used_us());
                *used = used.filter(|_| free).map(|other| other.max(worth));
            }
        }
        uses.into_iter().filter_map(|(id, worth)| Some((worth?, id))).collect()
    }

    /// Frees an adapter in all executors, unless a name or a request needs it; returns the bytes freed.
    pub(super) async fn free_everywhere(&self, entry: &AdapterEntry) -> u64 {
        let mut freed = 0;
        for home in &self.homes {
            let _moving = home.moving.lock().await;
            freed += self.free(home, entry.id()).await;
        }
        freed
    }

    /// Frees an adapter in the executor unless a name or a request needs it; returns the bytes freed. Call it with
    /// the home's `moving` held.
    pub(super) async fn free(&self, home: &ExecutorAdapters, id: AdapterId) -> u64 {
        let taken = {
            // As those do who evict: a sum may be asked for again at any time.
            let mut residency = lock(&home.residency);
            let is_needed = self.every_entry().iter().any(|entry| entry.id() == id);
            if is_needed { None } else { residency.host.remove(&id) }
        };
        let Some(bytes) = taken else { return 0 };
        self.unload_from_host(home, id, bytes).await.unwrap_or_else(|error| {
            // It is the first to be evicted, and an executor that is gone holds nothing.
            tracing::warn!(adapter = %id, %error, "an adapter could not be freed");
            0
        })
    }
}

/// Files of the store that an executor is to load.
#[derive(Debug)]
pub(super) struct LoadFiles<'a> {
    pub(super) content: ContentId,
    /// What errors call them.
    pub(super) told: &'a Path,
    /// What the adapter is multiplied with.
    pub(super) weight: f32,
}

fn unusable(entry: &AdapterEntry, reason: &str) -> ResidencyError {
    let (name, reason) = (entry.record.name.clone(), reason.to_owned());
    match entry.parts() {
        [] => UnusableAdapter { name, reason }.into(),
        _ => WeightedMergeError::Refused { name, reason }.into(),
    }
}
