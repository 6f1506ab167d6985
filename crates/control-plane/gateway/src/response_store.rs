//! Responses that a client may continue with `previous_response_id`, in memory.
//!
//! The responses of each tenant are limited by number and bytes, and all responses together by bytes. Above a
//! limit, the oldest response of that tenant, or of the tenant with the most bytes, is evicted. So a tenant
//! that keeps less than others loses nothing to them. Kept bytes count to the tenant's memory; when that is
//! full, the tenant's oldest responses are evicted.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use crate::{
    lock::lock,
    tenant_memory::{Reservation, TenantMemory},
};

/// Maximum number of responses per tenant.
pub(crate) const MAX_RESPONSES: usize = 1024;
/// Maximum bytes of a tenant's responses, as JSON.
pub(crate) const MAX_TENANT_BYTES: usize = 16 << 20;
/// Maximum bytes of all responses.
pub(crate) const MAX_BYTES: usize = 64 << 20;
/// Estimated bytes of an entry besides its texts.
const ENTRY_BYTES: usize = 256;

/// A response, kept as JSON texts because their length is their memory.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredResponse {
    /// Response as it was sent.
    pub response: Box<str>,
    /// JSON array of the input items that the response answers.
    pub input: Box<str>,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.response.len() + self.input.len()
    }
}

#[derive(Debug)]
struct RetainedResponse {
    entry: Arc<StoredResponse>,
    _memory: Reservation,
}

#[derive(Debug, Default)]
struct TenantResponses {
    entries: HashMap<Box<str>, RetainedResponse>,
    /// Response ids, the oldest first; one per entry.
    order: VecDeque<Box<str>>,
    bytes: usize,
}

impl TenantResponses {
    /// Removes an entry and returns its bytes. The search in `order` visits at most [`MAX_RESPONSES`] ids.
    fn remove(&mut self, id: &str) -> Option<usize> {
        let bytes = self.entries.remove(id)?.entry.bytes();
        self.order.retain(|other| **other != *id);
        self.bytes -= bytes;
        Some(bytes)
    }

    /// Removes the oldest entry and returns its bytes.
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

#[derive(Debug)]
pub struct ResponseStore {
    memory: Arc<TenantMemory>,
    shelves: Mutex<ResponseTable>,
}

impl ResponseStore {
    /// Creates an empty store that counts its bytes in `memory`.
    #[must_use]
    pub fn new(memory: Arc<TenantMemory>) -> Self {
        Self { memory, shelves: Mutex::default() }
    }

    /// Keeps a response of `tenant`, unless it would not fit even if the tenant kept no other.
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

    /// Returns the response `id` of `tenant`; responses of other tenants are never found.
    #[must_use]
    pub fn get(&self, tenant: &str, id: &str) -> Option<Arc<StoredResponse>> {
        lock(&self.shelves).of.get(tenant)?.entries.get(id).map(|held| Arc::clone(&held.entry))
    }

    /// Removes a response; false if there is none.
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
