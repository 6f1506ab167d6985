//! Loads adapters into an executor on demand, and evicts others to free memory.
//!
//! A request first takes its lease and then looks up the adapter here. An eviction counts leases under the
//! same lock. So either the request sees the eviction and waits until the adapter is loaded again, or the
//! eviction sees the lease and picks another adapter.

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

/// Maximum number of adapters per executor that requests wait for at once.
const MAX_PENDING_LOADS: usize = 64;
/// Maximum number of requests per executor that wait for adapters at once.
const MAX_WAITERS: usize = 1024;

/// How long a load retries while requests use the adapters that would have to be evicted.
const ROOM_WAIT: Duration = Duration::from_secs(1);
/// Pause between two retries of such a load.
const ROOM_PAUSE: Duration = Duration::from_millis(20);

/// Order of eviction, lowest first: merged before registered adapters, then by last use in microseconds.
type EvictionRank = (bool, u64);

/// Counts a waiting request until it is dropped.
struct WaitingRequest<'a>(&'a ExecutorAdapters);

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        lock(&self.0.residency).waiters -= 1;
    }
}

impl Registry {
    /// Loads the leased adapter into the executor at `index`, and keeps it there until the returned pin is
    /// dropped. Returns at once if the adapter is resident. All requests that wait for the same adapter share
    /// one load.
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

    /// Like [`Registry::load_on`], for a running request, which keeps the pin `place` meanwhile.
    ///
    /// # Errors
    /// See [`ResidencyError`].
    pub(crate) async fn reload_on(
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
            // The task of the load ended without a result.
            Err(_) => Err(CallError::Unavailable("the gateway is shutting down".to_owned()).into()),
        }
    }

    /// Starts the load that waiting requests share; the load continues if they leave.
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

    /// Loads a registered adapter, and retries for [`ROOM_WAIT`] while other requests use the memory.
    async fn load_when_there_is_room(
        &self,
        home: &ExecutorAdapters,
        entry: &AdapterEntry,
    ) -> Result<(), ResidencyError> {
        // The lock is not held here, so other adapters can be loaded while this one is fetched.
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
                // A cached file may be corrupt, so the load fetches the files from the bucket once more.
                Err(ResidencyError::Unusable(_) | ResidencyError::Sum(_))
                    if held.iter().any(CacheHold::is_of_bucket) && !is_fetched_again =>
                {
                    let of_bucket =
                        entry.sources().into_iter().zip(&held).filter(|(_, held)| held.is_of_bucket());
                    of_bucket.for_each(|((record, _), _)| self.store.remove(record.content));
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

    pub(super) async fn fetch(&self, entry: &AdapterEntry) -> Result<Vec<CacheHold>, ResidencyError> {
        let mut held = Vec::new();
        for (record, _) in entry.sources() {
            held.push(self.fetch_files(record).await?);
        }
        Ok(held)
    }

    /// Fetches the files of one record, if this host lacks them.
    pub(super) async fn fetch_files(&self, record: &Record) -> Result<CacheHold, ResidencyError> {
        let fetched = self.store.fetch(record.content, TenantId::of(record.tenant.as_deref())).await;
        self.trim().await;
        fetched.map_err(|error| FetchFailure { name: record.name.clone(), reason: error.to_string() }.into())
    }

    /// Deletes cached files beyond the cache's limit, except those of pinned adapters and of adapters in use.
    pub(super) async fn trim(&self) {
        if self.bucket_status().is_none() {
            return;
        }
        let needed = |entry: &&Arc<AdapterEntry>| entry.is_pinned() || entry.requests() > 0;
        let keep = self.every_entry().iter().filter(needed).map(|entry| entry.record.content).collect();
        let store = self.store.clone();
        // If no thread can be started, a later call trims the cache.
        let _ = thread::run("adapter-trim", move || store.trim(&keep)).await;
    }

    /// Loads an adapter with files on this host, evicting others if necessary. The caller holds
    /// `home.moving`.
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
            display_path: self.display_source(&record.name, &record.source),
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
        let found = types::AdapterVersion(loaded.generation);
        let stranger = AdapterId(loaded.adapter);
        self.free(home, stranger).await;
        Err(unusable(entry, &format!("its files have the generation {found}, not {expected}")))
    }

    /// Loads store files of one adapter, or of several with their weights, and evicts adapters until the
    /// files fit. The caller holds `home.moving`.
    pub(super) async fn load_files(
        &self,
        home: &ExecutorAdapters,
        files: &[LoadFiles<'_>],
        tenant: Option<&str>,
    ) -> Result<AdapterLoaded, ResidencyError> {
        let owner = TenantId::of(tenant);
        let mut started = Instant::now();
        // The staged files last while other adapters are evicted.
        let mut lent = Vec::with_capacity(files.len());
        for LoadFiles { content, display_path, weight } in files {
            let part = home.executor.stage_files(&self.store.path(*content)).await;
            lent.push((part.inspect_err(|_| self.counters.failed())?.displayed_as(display_path), *weight));
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

    /// Evicts adapters until `bytes` are free, or none if evictions cannot free enough.
    async fn make_room(&self, home: &ExecutorAdapters, bytes: u64) -> Result<(), ResidencyError> {
        let Some(budget) = home.budget_bytes() else {
            // The load itself reports the error.
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

    /// Returns `Busy` if the end of running requests can free memory, and `NeverFits` otherwise.
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

    /// Unloads the least recently used adapter; returns false if none can be evicted.
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

    /// Unloads an adapter just removed from `host`, or reinserts it on an error. Returns the bytes freed.
    async fn unload_from_host(
        &self,
        home: &ExecutorAdapters,
        id: AdapterId,
        bytes: u64,
    ) -> Result<u64, CallError> {
        match home.executor.unload_adapter(id.0).await {
            Ok(unloaded) => Ok(unloaded.freed_bytes),
            // The executor does not know the adapter, so it holds no memory for it.
            Err(CallError::Refused(wire)) if wire.code == ErrorCode::AdapterNotFound => Ok(0),
            Err(error) => {
                lock(&home.residency).host.insert(id, bytes);
                Err(error)
            }
        }
    }

    /// Returns the adapters that may be evicted, with rank: first those without an entry, then merged
    /// adapters, of which clients can create any number, then registered ones; each group by last use.
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

    /// Unloads an adapter from all executors, unless an entry needs it. Returns the bytes freed.
    pub(super) async fn free_everywhere(&self, entry: &AdapterEntry) -> u64 {
        let mut freed = 0;
        for home in &self.homes {
            let _moving = home.moving.lock().await;
            freed += self.free(home, entry.id()).await;
        }
        freed
    }

    /// Like [`Registry::free_everywhere`], for one executor. The caller holds `home.moving`.
    pub(super) async fn free(&self, home: &ExecutorAdapters, id: AdapterId) -> u64 {
        let taken = {
            // Evictions hold the same lock, because a merged adapter may be requested again at any time.
            let mut residency = lock(&home.residency);
            let is_needed = self.every_entry().iter().any(|entry| entry.id() == id);
            if is_needed { None } else { residency.host.remove(&id) }
        };
        let Some(bytes) = taken else { return 0 };
        self.unload_from_host(home, id, bytes).await.unwrap_or_else(|error| {
            // The adapter is the next to be evicted, and an executor that has ended holds nothing.
            tracing::warn!(adapter = %id, %error, "cannot unload an adapter from the executor");
            0
        })
    }
}

#[derive(Debug)]
pub(super) struct LoadFiles<'a> {
    pub(super) content: ContentId,
    /// Path of the files in errors.
    pub(super) display_path: &'a Path,
    /// Weight of the adapter in the merged adapter.
    pub(super) weight: f32,
}

fn unusable(entry: &AdapterEntry, reason: &str) -> ResidencyError {
    let (name, reason) = (entry.record.name.clone(), reason.to_owned());
    match entry.parts() {
        [] => UnusableAdapter { name, reason }.into(),
        _ => WeightedMergeError::Refused { name, reason }.into(),
    }
}
