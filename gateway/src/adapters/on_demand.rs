//! Adapters brought into the executor, and who makes room for whom.
//!
//! A request takes its lease first and looks here second; whoever evicts counts leases under the same lock. So either
//! the request sees that the adapter is leaving and waits for it to come back, or the evictor sees the lease and picks
//! another.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use ids::{AdapterId, TenantId};
use shmproto::message::{AdapterLoaded, ErrorCode};
use tokio::sync::watch;

use super::{
    entry::{Entry, Lease, lock},
    errors::{ResidencyError, Unusable},
    registry::Registry,
    residency::{PendingLoad, Residency, Tier},
    store::ContentId,
};
use crate::executor::{CallError, link::Link};

/// Adapters that requests may wait for at once.
const MAX_PENDING_LOADS: usize = 64;
/// Requests that may wait for adapters at once.
const MAX_WAITERS: usize = 1024;

/// How long a request waits for others to leave room for its adapter.
const ROOM_WAIT: Duration = Duration::from_secs(1);
/// How often it looks.
const ROOM_PAUSE: Duration = Duration::from_millis(20);

/// A request that waits; says so until it is dropped.
struct Waiting<'a>(&'a Registry);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.residency).waiters -= 1;
    }
}

impl Registry {
    /// Where an adapter is.
    #[must_use]
    pub fn tier(&self, entry: &Entry) -> Tier {
        if self.is_host(&lock(&self.residency), entry.id()) { Tier::Host } else { Tier::Disk }
    }

    /// An executor that has just connected holds what [`Registry::restore`] finds there, not what another one held.
    /// While there is none, what was true of the last one counts: its requests wait to be redone.
    fn is_host(&self, residency: &Residency, id: AdapterId) -> bool {
        let is_another = self.epoch().is_some_and(|epoch| residency.epoch != Some(epoch));
        !is_another && residency.host.contains_key(&id)
    }

    /// Whether requests wait for an adapter to arrive.
    #[must_use]
    pub fn is_loading(&self, entry: &Entry) -> bool {
        lock(&self.residency).pending_loads.contains_key(&entry.id())
    }

    /// Adapters in the executor, and the bytes they take.
    #[must_use]
    pub fn resident(&self) -> (usize, u64) {
        let residency = lock(&self.residency);
        (residency.host.len(), residency.host.values().sum())
    }

    /// Bytes of adapters the executor can hold; `None` as long as none is connected.
    #[must_use]
    pub fn budget_bytes(&self) -> Option<u64> {
        match &*self.executor.link().borrow() {
            Link::Up { welcome, .. } => Some(welcome.adapter_budget_bytes),
            _ => None,
        }
    }

    /// Returns when the leased adapter is in the executor, where it stays as long as the lease lives. At once if it
    /// is there; otherwise it is loaded, and all who wait for it share that load.
    ///
    /// # Errors
    /// See [`ResidencyError`].
    pub async fn ensure_resident(self: &Arc<Self>, lease: &Lease) -> Result<(), ResidencyError> {
        let (mut pending, _waiting) = {
            let mut residency = lock(&self.residency);
            if self.is_host(&residency, lease.id) {
                self.counters.hits.fetch_add(1, Relaxed);
                return Ok(());
            }
            self.counters.misses.fetch_add(1, Relaxed);
            if residency.waiters >= MAX_WAITERS {
                return Err(ResidencyError::Busy(format!(
                    "{MAX_WAITERS} requests wait for adapters already"
                )));
            }
            let pending = match residency.pending_loads.get(&lease.id) {
                Some(pending) => pending.clone(),
                None if residency.pending_loads.len() >= MAX_PENDING_LOADS => {
                    return Err(ResidencyError::Busy(format!(
                        "{MAX_PENDING_LOADS} adapters are being loaded already"
                    )));
                }
                None => self.start_load(&mut residency, &lease.entry),
            };
            residency.waiters += 1;
            (pending, Waiting(self))
        };
        match pending.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
            // Its task is gone without a word.
            Err(_) => Err(CallError::Unavailable("the gateway is shutting down".to_owned()).into()),
        }
    }

    /// Starts the load that waiters share; it goes on if they leave.
    fn start_load(self: &Arc<Self>, residency: &mut Residency, entry: &Arc<Entry>) -> PendingLoad {
        let (done, pending) = watch::channel(None);
        residency.pending_loads.insert(entry.id(), pending.clone());
        let (registry, lease) = (Arc::clone(self), entry.lease());
        tokio::spawn(async move {
            let outcome = registry.load_when_there_is_room(&lease.entry).await;
            lock(&registry.residency).pending_loads.remove(&lease.id);
            done.send_replace(Some(outcome));
        });
        pending
    }

    /// Loads a registered adapter as soon as requests that use others leave room for it, within [`ROOM_WAIT`].
    async fn load_when_there_is_room(&self, entry: &Entry) -> Result<(), ResidencyError> {
        let until = Instant::now() + ROOM_WAIT;
        loop {
            let changing = self.changing.lock().await;
            let outcome = self.make_resident(entry).await;
            drop(changing);
            match outcome {
                Err(ResidencyError::Busy(_)) if Instant::now() < until => {
                    tokio::time::sleep(ROOM_PAUSE).await
                }
                Err(ResidencyError::Unusable(unusable)) => {
                    entry.set_fault(Some(unusable.reason.clone()));
                    return Err(unusable.into());
                }
                other => return other,
            }
        }
    }

    /// Loads a registered adapter, evicting others if it must. Call it with `changing` held.
    pub(super) async fn make_resident(&self, entry: &Entry) -> Result<(), ResidencyError> {
        if self.tier(entry) == Tier::Host {
            return Ok(());
        }
        self.make_room(entry.record.bytes).await?;
        let loaded = self.load_content(entry.record.content, entry.record.tenant.as_deref()).await;
        let loaded = loaded.map_err(|error| match error {
            ResidencyError::Call(CallError::Refused(wire)) if wire.code == ErrorCode::InvalidAdapter => {
                unusable(entry, &wire.message).into()
            }
            other => other,
        })?;
        if loaded.generation == entry.record.generation.0 {
            return Ok(());
        }
        let found = ids::Generation(loaded.generation);
        let stranger = AdapterId(loaded.adapter);
        self.free(stranger).await;
        Err(unusable(entry, &format!("its files are {found}, not {}", entry.record.generation)).into())
    }

    /// Loads files of the store, evicting one adapter after the other until they fit. Call it with `changing` held.
    pub(super) async fn load_content(
        &self,
        content: ContentId,
        tenant: Option<&str>,
    ) -> Result<AdapterLoaded, ResidencyError> {
        let (path, owner) = (self.store.path(content), TenantId::of(tenant));
        loop {
            let started = Instant::now();
            match self.executor.load_adapter(&path, owner).await {
                Ok(loaded) => {
                    self.counters.loaded(started.elapsed());
                    lock(&self.residency).host.insert(AdapterId(loaded.adapter), loaded.bytes);
                    return Ok(loaded);
                }
                Err(CallError::Refused(wire)) if wire.code == ErrorCode::AdapterBudgetExceeded => {
                    if !self.evict_one().await? {
                        self.counters.failed();
                        return Err(self.no_room(&wire.message));
                    }
                }
                Err(error) => {
                    self.counters.failed();
                    return Err(error.into());
                }
            }
        }
    }

    /// Evicts until `bytes` are free, or nothing at all if that cannot be had.
    async fn make_room(&self, bytes: u64) -> Result<(), ResidencyError> {
        let Some(budget) = self.budget_bytes() else {
            // The load itself says why.
            return Ok(());
        };
        let (held, evictable) = {
            let residency = lock(&self.residency);
            let evictable = self.evictable(&residency).iter().map(|(_, id)| residency.host[id]).sum::<u64>();
            (residency.host.values().sum::<u64>(), evictable)
        };
        let needed = held.saturating_add(bytes).saturating_sub(budget);
        if needed > evictable {
            return Err(self.no_room(&format!(
                "the adapter takes {bytes} bytes, but of the executor's {budget} bytes {} are in use or pinned",
                held - evictable
            )));
        }
        while self.resident().1.saturating_add(bytes) > budget {
            if !self.evict_one().await? {
                break;
            }
        }
        Ok(())
    }

    /// Whether waiting helps depends on why the rest cannot go.
    fn no_room(&self, reason: &str) -> ResidencyError {
        let residency = lock(&self.residency);
        let is_resident = |entry: &Entry| residency.host.contains_key(&entry.id());
        let in_use = |entry: &Arc<Entry>| is_resident(entry) && entry.requests() > 0 && !entry.is_pinned();
        if self.every_entry().iter().any(in_use) {
            ResidencyError::Busy(reason.to_owned())
        } else {
            ResidencyError::NeverFits(reason.to_owned())
        }
    }

    /// Unloads the adapter that was used least recently; false if none can go.
    async fn evict_one(&self) -> Result<bool, ResidencyError> {
        let victim = {
            let mut residency = lock(&self.residency);
            let victim = self.evictable(&residency).into_iter().min();
            victim.and_then(|(_, id)| residency.host.remove(&id).map(|bytes| (id, bytes)))
        };
        let Some((id, bytes)) = victim else {
            return Ok(false);
        };
        failpoint::pass("gateway.evict");
        tracing::info!(adapter = %id, bytes, "evicting an adapter to make room");
        self.counters.evictions.fetch_add(1, Relaxed);
        self.unload_from_host(id, bytes).await?;
        Ok(true)
    }

    /// Frees an adapter that was just taken out of `host`, or puts it back; returns the bytes freed.
    async fn unload_from_host(&self, id: AdapterId, bytes: u64) -> Result<u64, CallError> {
        match self.executor.unload_adapter(id.0).await {
            Ok(unloaded) => Ok(unloaded.freed_bytes),
            // It does not know it: so it holds nothing.
            Err(CallError::Refused(wire)) if wire.code == ErrorCode::AdapterNotFound => Ok(0),
            Err(error) => {
                lock(&self.residency).host.insert(id, bytes);
                Err(error)
            }
        }
    }

    /// What may go, with when it was last used. What is in the executor and nobody's is first.
    fn evictable(&self, residency: &Residency) -> Vec<(u64, AdapterId)> {
        let mut uses: HashMap<AdapterId, Option<u64>> =
            residency.host.keys().map(|id| (*id, Some(0))).collect();
        for entry in self.every_entry() {
            if let Some(used) = uses.get_mut(&entry.id()) {
                let free = entry.requests() == 0 && !entry.is_pinned();
                *used = used.filter(|_| free).map(|at_us| at_us.max(entry.last_used_us()));
            }
        }
        uses.into_iter().filter_map(|(id, used)| used.map(|at_us| (at_us, id))).collect()
    }

    /// Frees an adapter in the executor unless a name or a request needs it; returns the bytes freed. Call it with
    /// `changing` held.
    pub(super) async fn free(&self, id: AdapterId) -> u64 {
        if self.every_entry().iter().any(|entry| entry.id() == id) {
            return 0;
        }
        let Some(bytes) = lock(&self.residency).host.remove(&id) else {
            return 0;
        };
        self.unload_from_host(id, bytes).await.unwrap_or_else(|error| {
            // It is the first to be evicted, and an executor that is gone holds nothing.
            tracing::warn!(adapter = %id, %error, "an adapter could not be freed");
            0
        })
    }

    /// Forgets what was resident and takes over what a newly connected executor says it holds.
    pub(super) fn reset_residency(&self, resident: impl Iterator<Item = (AdapterId, u64)>) {
        let mut residency = lock(&self.residency);
        residency.epoch = self.epoch();
        residency.host = resident.collect();
    }
}

fn unusable(entry: &Entry, reason: &str) -> Unusable {
    Unusable { name: entry.record.name.clone(), reason: reason.to_owned() }
}
