//! Responses that somebody may go on with (`previous_response_id`), in memory.
//!
//! Each tenant has a shelf of their own, bounded by number and bytes, and all shelves together are bounded by bytes: the oldest leaves
//! first, of a full shelf or of the fullest one. So nobody pushes out what others keep as long as they keep less. What is kept counts
//! to its tenant's memory; where that is full, the tenant's oldest responses leave.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use crate::{
    lock::lock,
    tenant_memory::{Reservation, TenantMemory},
};

/// Most responses of a tenant.
pub const MAX_RESPONSES: usize = 1024;
/// Most bytes of a tenant's responses, as JSON.
pub const MAX_TENANT_BYTES: usize = 16 << 20;
/// Most bytes of all responses.
pub const MAX_BYTES: usize = 64 << 20;
/// What an entry takes beside its texts, about.
const ENTRY_BYTES: usize = 256;

/// A response, as JSON texts: they are what they weigh.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredResponse {
    /// The response as it was answered.
    pub response: Box<str>,
    /// An array of all that it answers.
    pub input: Box<str>,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.response.len() + self.input.len()
    }
}

/// An entry on its shelf.
#[derive(Debug)]
struct RetainedResponse {
    entry: Arc<StoredResponse>,
    _memory: Reservation,
}

/// What a tenant keeps.
#[derive(Debug, Default)]
struct TenantResponses {
    entries: HashMap<Box<str>, RetainedResponse>,
    /// The oldest first; as many as there are entries.
    order: VecDeque<Box<str>>,
    bytes: usize,
}

impl TenantResponses {
    /// Takes an entry out; returns its bytes. Its place in the order is looked for among [`MAX_RESPONSES`] at most.
    fn remove(&mut self, id: &str) -> Option<usize> {
        let bytes = self.entries.remove(id)?.entry.bytes();
        self.order.retain(|other| **other != *id);
        self.bytes -= bytes;
        Some(bytes)
    }

    /// Takes the oldest out; returns its bytes.
    fn shrink(&mut self) -> usize {
        let oldest = self.order.pop_front();
        oldest.and_then(|oldest| self.remove(&oldest)).unwrap_or(0)
    }
}

#[derive(Debug, Default)]
struct ResponseTable {
    of: HashMap<Arc<str>, TenantResponses>,
    bytes: usize,
}

/// See the module's description.
#[derive(Debug)]
pub struct ResponseStore {
    memory: Arc<TenantMemory>,
    shelves: Mutex<ResponseTable>,
}

impl ResponseStore {
    /// Nothing is kept yet; what will be counts in `memory`.
    #[must_use]
    pub fn new(memory: Arc<TenantMemory>) -> Self {
        Self { memory, shelves: Mutex::default() }
    }

    /// Keeps a response of `tenant`, unless there is no room for it even if the tenant keeps no other.
    pub fn put(&self, tenant: &Arc<str>, id: &str, entry: StoredResponse) {
        let bytes = entry.bytes();
        if bytes > MAX_TENANT_BYTES {
            return;
        }
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.of.entry(Arc::clone(tenant)).or_default();
        let mut gone = 0;
        let reserved = loop {
            match self.memory.reserve(tenant, bytes) {
                Ok(reserved) => break Some(reserved),
                Err(_) if shelf.order.is_empty() => break None,
                Err(_) => gone += shelf.shrink(),
            }
        };
        let Some(memory) = reserved else {
            shelves.bytes -= gone;
            return;
        };
        shelf.entries.insert(id.into(), RetainedResponse { entry: Arc::new(entry), _memory: memory });
        shelf.order.push_back(id.into());
        shelf.bytes += bytes;
        while shelf.order.len() > MAX_RESPONSES || shelf.bytes > MAX_TENANT_BYTES {
            gone += shelf.shrink();
        }
        shelves.bytes = shelves.bytes + bytes - gone;
        while shelves.bytes > MAX_BYTES {
            let fullest = shelves.of.values_mut().max_by_key(|shelf| shelf.bytes);
            shelves.bytes -= fullest.map_or(MAX_BYTES, TenantResponses::shrink);
        }
    }

    /// The response of `tenant` with this id; those of others do not exist.
    #[must_use]
    pub fn get(&self, tenant: &str, id: &str) -> Option<Arc<StoredResponse>> {
        lock(&self.shelves).of.get(tenant)?.entries.get(id).map(|held| Arc::clone(&held.entry))
    }

    /// Takes it out; false if it is not there.
    pub fn delete(&self, tenant: &str, id: &str) -> bool {
        let mut shelves = lock(&self.shelves);
        let gone = shelves.of.get_mut(tenant).and_then(|shelf| shelf.remove(id));
        shelves.bytes -= gone.unwrap_or(0);
        gone.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant_memory::MemoryLimits;

    fn entry(bytes: usize) -> StoredResponse {
        StoredResponse { response: "x".repeat(bytes).into(), input: "[]".into() }
    }

    #[test]
    fn the_oldest_leaves_when_there_are_too_many() {
        let (kept, alice) =
            (ResponseStore::new(TenantMemory::new(MemoryLimits::default())), Arc::from("alice"));
        for number in 0..=MAX_RESPONSES {
            kept.put(&alice, &number.to_string(), entry(1));
        }
        assert!(kept.get("alice", "0").is_none());
        assert!((1..=MAX_RESPONSES).all(|number| kept.get("alice", &number.to_string()).is_some()));
        for number in 0..3 * MAX_RESPONSES {
            let id = format!("deleted {number}");
            kept.put(&alice, &id, entry(1));
            assert!(kept.delete("alice", &id) && !kept.delete("alice", &id));
        }
        let shelves = lock(&kept.shelves);
        assert_eq!(shelves.of["alice"].order.len(), shelves.of["alice"].entries.len());
    }

    #[test]
    fn bytes_are_bounded_for_each_and_for_all_and_the_fullest_gives_way() {
        let (kept, bob) = (ResponseStore::new(TenantMemory::new(MemoryLimits::default())), Arc::from("bob"));
        kept.put(&bob, "small", entry(1000));
        kept.put(&bob, "too large", entry(MAX_TENANT_BYTES));
        assert!(kept.get("bob", "too large").is_none() && kept.get("bob", "small").is_some());
        for tenant in 0..20 {
            let tenant = Arc::from(format!("tenant {tenant}"));
            for number in 0..20 {
                kept.put(&tenant, &number.to_string(), entry(1 << 20));
                let shelves = lock(&kept.shelves);
                assert!(shelves.of[&tenant].bytes <= MAX_TENANT_BYTES && shelves.bytes <= MAX_BYTES);
                assert_eq!(shelves.bytes, shelves.of.values().map(|shelf| shelf.bytes).sum::<usize>());
            }
        }
        assert!(kept.get("bob", "small").is_some(), "others' floods push nothing out");
        assert!(kept.get("tenant 0", "small").is_none(), "nobody sees what is another's");
    }

    #[test]
    fn what_is_kept_counts_to_its_tenants_memory_and_gives_way_where_that_is_full() {
        let limits = MemoryLimits { tenant_bytes: 10_000, total_bytes: 1 << 30 };
        let (memory, alice) = (TenantMemory::new(limits), Arc::from("alice"));
        let kept = ResponseStore::new(Arc::clone(&memory));
        for id in ["1", "2", "3"] {
            kept.put(&alice, id, entry(4000));
        }
        assert!(kept.get("alice", "1").is_none(), "the oldest has left");
        assert!(kept.get("alice", "2").is_some() && kept.get("alice", "3").is_some());
        assert_eq!(memory.used_by("alice"), lock(&kept.shelves).of["alice"].bytes);
        let running = memory.reserve(&alice, 10_000 - memory.used_by("alice")).unwrap();
        assert!(kept.delete("alice", "3") && kept.delete("alice", "2"));
        drop(running);
        assert_eq!((memory.used(), lock(&kept.shelves).bytes), (0, 0));
        kept.put(&alice, "too large", entry(10_000));
        assert!(kept.get("alice", "too large").is_none());
    }
}
