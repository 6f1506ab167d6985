//! Which adapters are resident, who uses them, and the budget of bytes they share.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kv_cache::ledger::{MemoryAccount, MemoryReservation, OutOfBudget};
use model::adapter::Invocation;
use shmproto::message::{AdapterStats, ErrorCode, WireError};
use types::{AdapterId, Generation};

use crate::{drafter::DrafterFactory, request_key::RequestKey};

/// Why bytes were not granted to an adapter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The adapter is resident, or is about to be.
    #[error("adapter {0:.12} is resident already")]
    Known(AdapterId),
    /// There are too few bytes left.
    #[error("the adapter does not fit: {0}; unload one, or give the executor more --adapter-bytes or memory")]
    Exceeded(#[from] OutOfBudget),
}

/// The bytes all adapters together may take, and who takes them. Clones are the same.
#[derive(Debug, Clone)]
pub struct Budget {
    account: MemoryAccount,
    ids: Arc<Mutex<BTreeSet<AdapterId>>>,
}

impl Budget {
    /// Of this account; nothing is claimed.
    #[must_use]
    pub fn new(account: MemoryAccount) -> Self {
        Self { account, ids: Arc::default() }
    }

    /// Bytes that are claimed now.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.account.held_bytes()
    }

    /// Says whether `bytes` could be claimed if nothing else were.
    ///
    /// # Errors
    /// If they are more than the whole budget.
    pub fn could_hold(&self, bytes: u64) -> Result<(), ClaimError> {
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
    // Every change of the set is one call, so it is whole even if a holder of the lock panicked.
    ids.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of the budget that one adapter holds; dropping it gives them back.
#[derive(Debug)]
pub struct AdapterClaim {
    id: AdapterId,
    held: MemoryReservation,
    ids: Arc<Mutex<BTreeSet<AdapterId>>>,
}

impl AdapterClaim {
    /// Whose bytes they are.
    #[must_use]
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// Bytes of the budget that it holds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Changes the claim to `bytes`, once the exact size is known.
    ///
    /// # Errors
    /// If the budget has too few bytes left; the claim stays as it was.
    pub fn resize(&mut self, bytes: u64) -> Result<(), ClaimError> {
        Ok(self.held.resize(bytes)?)
    }
}

impl Drop for AdapterClaim {
    fn drop(&mut self) {
        lock(&self.ids).remove(&self.id);
    }
}

/// What an adapter is for.
#[derive(Debug)]
pub enum AdapterRole {
    /// Requests are answered by it.
    Answers,
    /// The base guesses by it.
    Drafts {
        /// The first layers of the base that it computes.
        layers: u32,
        /// Who does so, until the engine has taken it over; `None` where nobody does.
        agency: Option<DrafterFactory>,
    },
}

/// An adapter that is ready to be used.
#[derive(Debug)]
pub struct ResidentAdapter<A> {
    /// What the forward pass takes.
    pub adapter: Arc<A>,
    /// What it is called here, and its bytes of the budget.
    pub claim: AdapterClaim,
    /// What it is, whoever owns it.
    pub generation: Generation,
    /// Largest rank of its modules; 0 if it has none.
    pub rank: u32,
    /// Linear layers it changes.
    pub modules: u32,
    /// Tokens that stand before every prompt (prefix tuning).
    pub virtual_tokens: usize,
    /// What invokes it, if it is an activated adapter.
    pub invocation: Option<Invocation>,
    /// What it is for.
    pub role: AdapterRole,
}

impl<A> ResidentAdapter<A> {
    /// Layers of the base that it computes, if it is a draft; 0 if it answers.
    #[must_use]
    pub fn draft_layers(&self) -> u32 {
        match self.role {
            AdapterRole::Answers => 0,
            AdapterRole::Drafts { layers, .. } => layers,
        }
    }
}

/// What became of a load call.
#[derive(Debug)]
pub enum AdapterLoadOutcome<A> {
    /// A new adapter.
    New(ResidentAdapter<A>),
    /// Its owner has loaded it before.
    Known(AdapterId),
    /// It did not work.
    Failed(WireError),
}

/// Why an adapter cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AdapterUseError {
    /// It is not resident.
    #[error("adapter {0:.12} is not loaded; load it first")]
    NotLoaded(AdapterId),
    /// It is on its way out.
    #[error("adapter {0:.12} is being unloaded; wait until that has ended, then load it again")]
    Unloading(AdapterId),
    /// It guesses for the base.
    #[error("adapter {0:.12} is a draft: it answers nobody; ask the base, or an adapter that is none")]
    Draft(AdapterId),
}

impl AdapterUseError {
    /// What it is for a program.
    #[must_use]
    pub fn code(self) -> ErrorCode {
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

/// An adapter that has been unloaded: nobody uses it, its bytes are free.
#[derive(Debug)]
pub struct Unloaded {
    /// What it was called.
    pub id: AdapterId,
    /// Bytes given back.
    pub freed_bytes: u64,
    /// Calls that wait for this.
    pub calls: Vec<RequestKey>,
}

#[derive(Debug)]
struct AdapterTableEntry<A> {
    prepared: ResidentAdapter<A>,
    users: u32,
    /// Unload calls that wait for the last user; none means that the adapter serves.
    unloads: Vec<RequestKey>,
    /// Requests that did not find it on the device.
    cold_starts: u64,
    /// Microseconds they waited until it was.
    load_wait_us: u64,
    drafted: u64,
    accepted: u64,
    least_confidence: f32,
}

/// Resident adapters by id. Names are the gateway's business, and owners are hidden in the ids.
#[derive(Debug)]
pub struct AdapterTable<A> {
    entries: BTreeMap<AdapterId, AdapterTableEntry<A>>,
}

impl<A> Default for AdapterTable<A> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
    }
}

impl<A> AdapterTable<A> {
    /// Adds an adapter. Its claim says that its id is not taken.
    pub fn insert(&mut self, prepared: ResidentAdapter<A>) {
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

    /// A resident adapter that is not being unloaded.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, id: AdapterId) -> Result<&ResidentAdapter<A>, AdapterUseError> {
        match self.entries.get(&id) {
            None => Err(AdapterUseError::NotLoaded(id)),
            Some(entry) if !entry.unloads.is_empty() => Err(AdapterUseError::Unloading(id)),
            Some(entry) => Ok(&entry.prepared),
        }
    }

    /// Tokens that an adapter puts before every prompt; none if it is not there.
    #[must_use]
    pub fn virtual_tokens(&self, id: AdapterId) -> usize {
        self.entries.get(&id).map_or(0, |entry| entry.prepared.virtual_tokens)
    }

    /// What invokes an adapter, if it is there and activated.
    #[must_use]
    pub fn invocation(&self, id: AdapterId) -> Option<&Invocation> {
        self.entries.get(&id)?.prepared.invocation.as_ref()
    }

    /// Like [`get`](Self::get), and counts a user until [`release`](Self::release).
    ///
    /// # Errors
    /// If there is none, or it is a draft.
    pub fn acquire(&mut self, id: AdapterId) -> Result<Arc<A>, AdapterUseError> {
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

    /// An adapter, whether it serves or not.
    #[must_use]
    pub fn peek(&self, id: AdapterId) -> Option<&A> {
        self.entries.get(&id).map(|entry| &*entry.prepared.adapter)
    }

    /// Counts a request that did not find the adapter on the device, and what it waited.
    pub fn note_cold_start(&mut self, id: AdapterId, load_wait_us: u64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.cold_starts += 1;
            entry.load_wait_us += load_wait_us;
        }
    }

    /// Counts a verification of `drafted` tokens for a request of the adapter.
    pub fn note_verified(&mut self, id: AdapterId, drafted: usize, accepted: usize) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.drafted += drafted as u64;
            entry.accepted += accepted as u64;
        }
    }

    /// The confidence that one more token drafted for it would have to have.
    pub fn note_least_confidence(&mut self, id: AdapterId, confidence: f64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.least_confidence = confidence as f32;
        }
    }

    /// Takes out an adapter that nobody uses.
    pub fn remove_unused(&mut self, id: AdapterId) {
        if self.entries.get(&id).is_some_and(|entry| entry.users == 0) {
            self.entries.remove(&id);
        }
    }

    /// A user is done; the last user of an adapter that is being unloaded ends it.
    pub fn release(&mut self, id: AdapterId) -> Option<Unloaded> {
        let entry = self.entries.get_mut(&id)?;
        entry.users -= 1;
        self.remove_if_drained(id)
    }

    /// Stops new uses; answers at once if there is no user, else at the last release.
    ///
    /// # Errors
    /// If the adapter is not resident.
    pub fn unload(&mut self, id: AdapterId, call: RequestKey) -> Result<Option<Unloaded>, AdapterUseError> {
        let entry = self.entries.get_mut(&id).ok_or(AdapterUseError::NotLoaded(id))?;
        entry.unloads.push(call);
        Ok(self.remove_if_drained(id))
    }

    /// Adapters that serve.
    pub fn ids(&self) -> impl Iterator<Item = AdapterId> {
        self.entries.iter().filter(|(_, entry)| entry.unloads.is_empty()).map(|(id, _)| *id)
    }

    /// One line for each resident adapter; whether its users run or wait is for the engine to say.
    pub fn stats(&self) -> Vec<AdapterStats> {
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

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of all resident adapters.
    pub fn bytes(&self) -> u64 {
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
