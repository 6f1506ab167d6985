//! Which adapters are resident, who uses them, and the budget of bytes they share.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use model::generation::Generation;
use shmproto::message::{AdapterStats, ErrorCode, WireError};

use crate::engine::event::Caller;

/// Why bytes were not granted to an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The same weights are resident, or are about to be.
    #[error("adapter {0:.12} is resident already")]
    Known(Generation),
    /// The budget has too few bytes left.
    #[error(
        "the adapter takes {asked_bytes} bytes, but of the budget of {limit_bytes} bytes other adapters hold \
         {held_bytes}; unload an adapter or start the executor with a larger --adapter-bytes"
    )]
    Exceeded {
        /// Bytes that were asked for.
        asked_bytes: u64,
        /// Bytes other adapters hold.
        held_bytes: u64,
        /// Bytes of the budget.
        limit_bytes: u64,
    },
}

#[derive(Debug)]
struct Ledger {
    limit_bytes: u64,
    claims: Mutex<HashMap<Generation, u64>>,
}

/// The bytes all adapters together may take. Clones share one ledger.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Ledger>);

impl Budget {
    /// A budget of `limit_bytes` of which nothing is claimed.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self(Arc::new(Ledger { limit_bytes, claims: Mutex::default() }))
    }

    /// Bytes of the budget.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    /// Bytes that are claimed now.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.0.lock().values().sum()
    }

    /// Claims `bytes` for a generation until the claim is dropped.
    ///
    /// # Errors
    /// If the generation has a claim, or the budget has too few bytes left.
    pub fn claim(&self, generation: Generation, bytes: u64) -> Result<Claim, ClaimError> {
        let mut claims = self.0.lock();
        if claims.contains_key(&generation) {
            return Err(ClaimError::Known(generation));
        }
        self.0.check(claims.values().sum(), bytes)?;
        claims.insert(generation, bytes);
        Ok(Claim { ledger: Arc::clone(&self.0), generation, bytes })
    }
}

impl Ledger {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Generation, u64>> {
        // Every change of the map is one call, so it is whole even if a holder of the lock panicked.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, held_bytes: u64, asked_bytes: u64) -> Result<(), ClaimError> {
        match held_bytes.checked_add(asked_bytes) {
            Some(sum) if sum <= self.limit_bytes => Ok(()),
            _ => Err(ClaimError::Exceeded { asked_bytes, held_bytes, limit_bytes: self.limit_bytes }),
        }
    }
}

/// Bytes of the budget that one generation holds; dropping it gives them back.
#[derive(Debug)]
pub struct Claim {
    ledger: Arc<Ledger>,
    generation: Generation,
    bytes: u64,
}

impl Claim {
    /// Whose bytes they are.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// How many.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the claim to `bytes`, once the exact size is known.
    ///
    /// # Errors
    /// If the budget has too few bytes left; the claim stays as it was.
    pub fn resize(&mut self, bytes: u64) -> Result<(), ClaimError> {
        let mut claims = self.ledger.lock();
        let others: u64 = claims.values().sum::<u64>() - self.bytes;
        self.ledger.check(others, bytes)?;
        claims.insert(self.generation, bytes);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.ledger.lock().remove(&self.generation);
    }
}

/// An adapter that is ready to be used.
#[derive(Debug)]
pub struct Prepared<A> {
    /// What the forward pass takes.
    pub adapter: Arc<A>,
    /// Its generation and its bytes of the budget.
    pub claim: Claim,
    /// Largest rank of its modules.
    pub rank: u32,
    /// Linear layers it changes.
    pub modules: u32,
}

/// Why a generation cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AdapterError {
    /// It is not resident.
    #[error("adapter {0:.12} is not loaded; load it first")]
    NotLoaded(Generation),
    /// It is on its way out.
    #[error("adapter {0:.12} is being unloaded; wait until that has ended, then load it again")]
    Unloading(Generation),
}

impl From<AdapterError> for WireError {
    fn from(error: AdapterError) -> Self {
        Self { code: ErrorCode::AdapterNotFound, message: error.to_string() }
    }
}

/// An adapter that has been unloaded: nobody uses it, its bytes are free.
#[derive(Debug)]
pub struct Unloaded {
    /// What it was.
    pub generation: Generation,
    /// Bytes given back.
    pub freed_bytes: u64,
    /// Calls that wait for this.
    pub calls: Vec<Caller>,
}

#[derive(Debug)]
struct Entry<A> {
    prepared: Prepared<A>,
    users: u32,
    /// Unload calls that wait for the last user; none means that the adapter serves.
    unloads: Vec<Caller>,
}

/// Resident adapters by generation. Names are the gateway's business.
#[derive(Debug)]
pub struct AdapterTable<A> {
    entries: BTreeMap<Generation, Entry<A>>,
}

impl<A> Default for AdapterTable<A> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
    }
}

impl<A> AdapterTable<A> {
    /// Adds an adapter. Its claim says that its generation is not here yet.
    pub fn insert(&mut self, prepared: Prepared<A>) {
        let entry = Entry { prepared, users: 0, unloads: Vec::new() };
        self.entries.insert(entry.prepared.claim.generation(), entry);
    }

    /// A resident adapter that is not being unloaded.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, generation: Generation) -> Result<&Prepared<A>, AdapterError> {
        match self.entries.get(&generation) {
            None => Err(AdapterError::NotLoaded(generation)),
            Some(entry) if !entry.unloads.is_empty() => Err(AdapterError::Unloading(generation)),
            Some(entry) => Ok(&entry.prepared),
        }
    }

    /// Like [`get`](Self::get), and counts a user until [`release`](Self::release).
    ///
    /// # Errors
    /// If there is none.
    pub fn acquire(&mut self, generation: Generation) -> Result<Arc<A>, AdapterError> {
        let adapter = Arc::clone(&self.get(generation)?.adapter);
        if let Some(entry) = self.entries.get_mut(&generation) {
            entry.users += 1;
        }
        Ok(adapter)
    }

    /// A user is done; the last user of an adapter that is being unloaded ends it.
    pub fn release(&mut self, generation: Generation) -> Option<Unloaded> {
        let entry = self.entries.get_mut(&generation)?;
        entry.users -= 1;
        self.remove_if_drained(generation)
    }

    /// Stops new uses; answers at once if there is no user, else at the last release.
    ///
    /// # Errors
    /// If the generation is not resident.
    pub fn unload(&mut self, generation: Generation, call: Caller) -> Result<Option<Unloaded>, AdapterError> {
        let entry = self.entries.get_mut(&generation).ok_or(AdapterError::NotLoaded(generation))?;
        entry.unloads.push(call);
        Ok(self.remove_if_drained(generation))
    }

    /// Generations that serve.
    pub fn generations(&self) -> impl Iterator<Item = Generation> {
        self.entries.iter().filter(|(_, entry)| entry.unloads.is_empty()).map(|(generation, _)| *generation)
    }

    /// One line for each resident adapter.
    pub fn stats(&self) -> Vec<AdapterStats> {
        let line = |(generation, entry): (&Generation, &Entry<A>)| AdapterStats {
            generation: generation.0,
            rank: entry.prepared.rank,
            bytes: entry.prepared.claim.bytes(),
            requests: entry.users,
        };
        self.entries.iter().map(line).collect()
    }

    /// Bytes of all resident adapters.
    pub fn bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.prepared.claim.bytes()).sum()
    }

    fn remove_if_drained(&mut self, generation: Generation) -> Option<Unloaded> {
        let entry = self.entries.get(&generation)?;
        if entry.users > 0 || entry.unloads.is_empty() {
            return None;
        }
        let entry = self.entries.remove(&generation)?;
        Some(Unloaded { generation, freed_bytes: entry.prepared.claim.bytes(), calls: entry.unloads })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::event::ConnectionId;

    const A: Generation = Generation([1; 32]);
    const B: Generation = Generation([2; 32]);
    const CALL: Caller = Caller { connection: ConnectionId(1), request: 9 };

    fn prepared(budget: &Budget, generation: Generation, bytes: u64) -> Prepared<()> {
        Prepared {
            adapter: Arc::new(()),
            claim: budget.claim(generation, bytes).unwrap(),
            rank: 1,
            modules: 1,
        }
    }

    #[test]
    fn claims_never_exceed_the_budget_and_are_given_back_when_dropped() {
        let budget = Budget::new(100);
        let mut claim = budget.claim(A, 60).unwrap();
        let refused = ClaimError::Exceeded { asked_bytes: 41, held_bytes: 60, limit_bytes: 100 };
        assert_eq!(budget.claim(B, 41).unwrap_err(), refused);
        assert!(budget.claim(B, u64::MAX).is_err());
        assert_eq!(budget.claim(A, 1).unwrap_err(), ClaimError::Known(A));
        assert!(claim.resize(101).is_err());
        claim.resize(100).unwrap();
        assert_eq!(budget.held_bytes(), 100);
        drop(claim);
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn an_unload_waits_for_the_last_user_and_frees_the_bytes() {
        let budget = Budget::new(100);
        let mut table = AdapterTable::default();
        table.insert(prepared(&budget, A, 10));
        table.acquire(A).unwrap();
        assert!(table.unload(A, CALL).unwrap().is_none());
        assert_eq!(table.acquire(A).unwrap_err(), AdapterError::Unloading(A));
        assert!(table.unload(A, CALL).unwrap().is_none(), "a second call waits with the first");
        let unloaded = table.release(A).unwrap();
        assert_eq!((unloaded.freed_bytes, unloaded.calls.len()), (10, 2));
        assert_eq!(budget.held_bytes(), 0);
        assert_eq!(table.unload(A, CALL).unwrap_err(), AdapterError::NotLoaded(A));
    }
}
