//! The resident adapters, their users, and their common memory budget.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kv_cache::ledger::{MemoryAccount, MemoryReservation, OutOfBudget};
use model::adapter::{ClassificationHead, Invocation};
use shmproto::message::{AdapterLoaded, AdapterStats, ErrorCode, RequestId, WireError};
use types::{AdapterId, AdapterVersion};

use crate::{drafter::DrafterFactory, request_key::RequestKey};

/// The reason why the budget refuses bytes for an adapter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The adapter is resident, or is being loaded.
    #[error("adapter {0:.12} is resident already")]
    Known(AdapterId),
    #[error(
        "the adapter does not fit: {0}; unload an adapter, or raise --adapter-bytes or the executor's memory"
    )]
    Exceeded(#[from] OutOfBudget),
}

/// Budget of all adapters in bytes, with the ids of its holders. Clones share the same budget.
#[derive(Debug, Clone)]
pub struct Budget {
    account: MemoryAccount,
    ids: Arc<Mutex<BTreeSet<AdapterId>>>,
}

impl Budget {
    #[must_use]
    pub fn new(account: MemoryAccount) -> Self {
        Self { account, ids: Arc::default() }
    }

    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.account.held_bytes()
    }

    /// Checks whether `bytes` could be claimed if no other adapter were resident.
    ///
    /// # Errors
    /// If `bytes` exceed the whole budget.
    pub(crate) fn could_hold(&self, bytes: u64) -> Result<(), ClaimError> {
        Ok(self.account.could_hold(bytes)?)
    }

    /// Claims `bytes` for an adapter until the claim is dropped.
    ///
    /// # Errors
    /// If the adapter has a claim, or the budget has too few bytes left.
    pub fn claim(&self, id: AdapterId, bytes: u64) -> Result<AdapterClaim, ClaimError> {
        let mut ids = lock(&self.ids);
        if ids.contains(&id) {
            return Err(ClaimError::Known(id));
        }
        let held = self.account.charge(bytes)?;
        ids.insert(id);
        Ok(AdapterClaim { id, held, ids: Arc::clone(&self.ids) })
    }
}

fn lock(ids: &Mutex<BTreeSet<AdapterId>>) -> MutexGuard<'_, BTreeSet<AdapterId>> {
    // Each change of the set is one call, so the set is consistent even after a panic of a lock holder.
    ids.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of the budget that one adapter holds, until the claim is dropped.
#[derive(Debug)]
pub struct AdapterClaim {
    id: AdapterId,
    held: MemoryReservation,
    ids: Arc<Mutex<BTreeSet<AdapterId>>>,
}

impl AdapterClaim {
    #[must_use]
    pub fn id(&self) -> AdapterId {
        self.id
    }

    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Changes the claim to `bytes`, once the exact size is known.
    ///
    /// # Errors
    /// If the budget has too few bytes left; the claim stays unchanged.
    pub(crate) fn resize(&mut self, bytes: u64) -> Result<(), ClaimError> {
        Ok(self.held.resize(bytes)?)
    }
}

impl Drop for AdapterClaim {
    fn drop(&mut self) {
        lock(&self.ids).remove(&self.id);
    }
}

#[derive(Debug)]
pub enum AdapterRole {
    /// The adapter answers requests.
    Answers,
    /// The adapter answers requests for the labels of this head.
    Classifies(Arc<ClassificationHead>),
    /// The adapter turns the base's first layers into a drafter.
    Drafts {
        /// Number of the base's first layers that it uses.
        layers: u32,
        /// Drafter factory, until the engine takes it over; `None` if drafting with it is off.
        factory: Option<DrafterFactory>,
    },
}

/// An adapter that is ready for use.
#[derive(Debug)]
pub struct ResidentAdapter<A> {
    pub adapter: Arc<A>,
    /// Id of the adapter, and its bytes of the budget.
    pub claim: AdapterClaim,
    /// Adapter version, which does not depend on the owner.
    pub generation: AdapterVersion,
    /// Largest rank of its modules; 0 if it has none.
    pub rank: u32,
    /// Number of linear layers that the adapter changes.
    pub modules: u32,
    /// Number of virtual tokens before every prompt (prefix tuning).
    pub virtual_tokens: usize,
    /// Invocation sequence of an activated adapter.
    pub invocation: Option<Invocation>,
    pub role: AdapterRole,
    /// Warnings about the files, which the answer of a load carries.
    pub warnings: Vec<String>,
}

impl<A> ResidentAdapter<A> {
    /// Returns the reply to the load call `request`.
    pub(crate) fn reply(&self, request: RequestId) -> AdapterLoaded {
        AdapterLoaded {
            request,
            generation: self.generation.0,
            adapter: self.claim.id().0,
            rank: self.rank,
            bytes: self.claim.bytes(),
            modules: self.modules,
            draft_layers: self.draft_layers(),
            labels: self.labels().to_vec(),
            warnings: self.warnings.clone(),
        }
    }

    /// Returns the number of the base's layers that a draft adapter uses; 0 for other adapters.
    #[must_use]
    pub fn draft_layers(&self) -> u32 {
        match self.role {
            AdapterRole::Answers | AdapterRole::Classifies(_) => 0,
            AdapterRole::Drafts { layers, .. } => layers,
        }
    }

    /// Returns the names of the labels of an adapter that classifies; none for other adapters.
    #[must_use]
    pub fn labels(&self) -> &[String] {
        if let AdapterRole::Classifies(head) = &self.role { head.labels() } else { &[] }
    }
}

#[derive(Debug)]
pub enum AdapterLoadOutcome<A> {
    New(ResidentAdapter<A>),
    /// The owner has loaded the adapter before.
    Known(AdapterId),
    Failed(WireError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdapterUseError {
    #[error("adapter {0:.12} is not loaded; load it first")]
    NotLoaded(AdapterId),
    #[error("adapter {0:.12} is being unloaded; wait for the end, then load it again")]
    Unloading(AdapterId),
    /// The adapter only drafts.
    #[error("adapter {0:.12} is a draft adapter and answers no requests; use the base or another adapter")]
    Draft(AdapterId),
}

impl AdapterUseError {
    #[must_use]
    pub(crate) fn code(self) -> ErrorCode {
        match self {
            Self::NotLoaded(_) | Self::Unloading(_) => ErrorCode::AdapterNotFound,
            Self::Draft(_) => ErrorCode::InvalidRequest,
        }
    }
}

impl From<AdapterUseError> for WireError {
    fn from(error: AdapterUseError) -> Self {
        Self { code: error.code(), message: error.to_string() }
    }
}

/// An unloaded adapter, which has no users and whose bytes are free.
#[derive(Debug)]
pub(crate) struct Unloaded {
    pub id: AdapterId,
    pub freed_bytes: u64,
    /// Unload calls that wait for a reply.
    pub calls: Vec<RequestKey>,
}

#[derive(Debug)]
struct AdapterTableEntry<A> {
    prepared: ResidentAdapter<A>,
    users: u32,
    /// Unload calls that wait for the last user; empty while the adapter serves.
    unloads: Vec<RequestKey>,
    /// Number of requests that did not find the adapter on the device.
    cold_starts: u64,
    /// Time those requests waited for it, in microseconds.
    load_wait_us: u64,
    drafted: u64,
    accepted: u64,
    least_confidence: f32,
}

/// Resident adapters by id. The gateway knows their names, and the ids contain their owners.
#[derive(Debug)]
pub(crate) struct AdapterTable<A> {
    entries: BTreeMap<AdapterId, AdapterTableEntry<A>>,
}

impl<A> Default for AdapterTable<A> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
    }
}

impl<A> AdapterTable<A> {
    /// Adds an adapter, whose claim ensures that its id is new.
    pub(crate) fn insert(&mut self, prepared: ResidentAdapter<A>) {
        let entry = AdapterTableEntry {
            prepared,
            users: 0,
            unloads: Vec::new(),
            cold_starts: 0,
            load_wait_us: 0,
            drafted: 0,
            accepted: 0,
            least_confidence: 0.0,
        };
        self.entries.insert(entry.prepared.claim.id(), entry);
    }

    /// Returns a resident adapter that is not being unloaded.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn get(&self, id: AdapterId) -> Result<&ResidentAdapter<A>, AdapterUseError> {
        match self.entries.get(&id) {
            None => Err(AdapterUseError::NotLoaded(id)),
            Some(entry) if !entry.unloads.is_empty() => Err(AdapterUseError::Unloading(id)),
            Some(entry) => Ok(&entry.prepared),
        }
    }

    /// Returns the number of virtual tokens of an adapter; 0 if it is not resident.
    #[must_use]
    pub(crate) fn virtual_tokens(&self, id: AdapterId) -> usize {
        self.entries.get(&id).map_or(0, |entry| entry.prepared.virtual_tokens)
    }

    /// Returns the invocation sequence of an adapter, if it is resident and activated.
    #[must_use]
    pub(crate) fn invocation(&self, id: AdapterId) -> Option<&Invocation> {
        self.entries.get(&id)?.prepared.invocation.as_ref()
    }

    /// Whether the prompt's tokens alone determine the adapter's KV blocks. An activated adapter begins
    /// within a prompt, and a prefix begins with virtual tokens.
    #[must_use]
    pub(crate) fn has_plain_blocks(&self, id: AdapterId) -> bool {
        self.get(id).is_ok_and(|adapter| adapter.invocation.is_none() && adapter.virtual_tokens == 0)
    }

    /// Returns the head of an adapter, if it is resident and classifies.
    #[must_use]
    pub(crate) fn classification_head(&self, id: AdapterId) -> Option<&Arc<ClassificationHead>> {
        match &self.entries.get(&id)?.prepared.role {
            AdapterRole::Classifies(head) => Some(head),
            AdapterRole::Answers | AdapterRole::Drafts { .. } => None,
        }
    }

    /// Returns an adapter like [`get`](Self::get), and counts a user until [`release`](Self::release).
    ///
    /// # Errors
    /// If there is none, or it only drafts.
    pub(crate) fn acquire(&mut self, id: AdapterId) -> Result<Arc<A>, AdapterUseError> {
        let prepared = self.get(id)?;
        if matches!(prepared.role, AdapterRole::Drafts { .. }) {
            return Err(AdapterUseError::Draft(id));
        }
        let adapter = Arc::clone(&prepared.adapter);
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.users += 1;
        }
        Ok(adapter)
    }

    /// Returns an adapter, even during its unloading.
    #[must_use]
    pub(crate) fn peek(&self, id: AdapterId) -> Option<&A> {
        self.entries.get(&id).map(|entry| &*entry.prepared.adapter)
    }

    /// Counts a cold start of the adapter and its waiting time.
    pub(crate) fn note_cold_start(&mut self, id: AdapterId, load_wait_us: u64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.cold_starts += 1;
            entry.load_wait_us += load_wait_us;
        }
    }

    /// Counts a verification of `drafted` tokens for a request of the adapter.
    pub(crate) fn note_verified(&mut self, id: AdapterId, drafted: usize, accepted: usize) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.drafted += drafted as u64;
            entry.accepted += accepted as u64;
        }
    }

    /// Stores the least confidence that one more draft token for the adapter needs.
    pub(crate) fn note_least_confidence(&mut self, id: AdapterId, confidence: f64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.least_confidence = confidence as f32;
        }
    }

    /// Removes an adapter that has no users.
    pub(crate) fn remove_unused(&mut self, id: AdapterId) {
        if self.entries.get(&id).is_some_and(|entry| entry.users == 0) {
            self.entries.remove(&id);
        }
    }

    /// Ends one use. The last user of an adapter that is being unloaded completes the unloading.
    pub(crate) fn release(&mut self, id: AdapterId) -> Option<Unloaded> {
        let entry = self.entries.get_mut(&id)?;
        entry.users -= 1;
        self.remove_if_drained(id)
    }

    /// Stops new uses. Returns the result at once if there is no user, otherwise the last `release` does.
    ///
    /// # Errors
    /// If the adapter is not resident.
    pub(crate) fn unload(
        &mut self,
        id: AdapterId,
        call: RequestKey,
    ) -> Result<Option<Unloaded>, AdapterUseError> {
        let entry = self.entries.get_mut(&id).ok_or(AdapterUseError::NotLoaded(id))?;
        entry.unloads.push(call);
        Ok(self.remove_if_drained(id))
    }

    /// Iterates over the adapters that are not being unloaded.
    pub(crate) fn ids(&self) -> impl Iterator<Item = AdapterId> {
        self.entries.iter().filter(|(_, entry)| entry.unloads.is_empty()).map(|(id, _)| *id)
    }

    /// Returns stats of each resident adapter; the engine fills in the counts of its requests.
    pub(crate) fn stats(&self) -> Vec<AdapterStats> {
        let line = |(id, entry): (&AdapterId, &AdapterTableEntry<A>)| AdapterStats {
            adapter: id.0,
            rank: entry.prepared.rank,
            bytes: entry.prepared.claim.bytes(),
            running: 0,
            waiting: 0,
            device_bytes: 0,
            cold_starts: entry.cold_starts,
            load_wait_us: entry.load_wait_us,
            rank_rows_device: 0,
            rank_rows_workers: 0,
            rank_rows_executor: 0,
            drafted: entry.drafted,
            accepted: entry.accepted,
            least_confidence: entry.least_confidence,
        };
        self.entries.iter().map(line).collect()
    }

    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the bytes of all resident adapters.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.prepared.claim.bytes()).sum()
    }

    fn remove_if_drained(&mut self, id: AdapterId) -> Option<Unloaded> {
        let entry = self.entries.get(&id)?;
        if entry.users > 0 || entry.unloads.is_empty() {
            return None;
        }
        let entry = self.entries.remove(&id)?;
        Some(Unloaded { id, freed_bytes: entry.prepared.claim.bytes(), calls: entry.unloads })
    }
}

#[cfg(test)]
mod tests;
