//! Memory of a running request, charged to its tenant in bytes: its prompts, and outputs that the client has
//! not read yet.

use std::sync::{Arc, Mutex};

use crate::{
    lock::lock,
    tenant_memory::{MemoryFull, Reservation},
};

/// Granularity of charges to the tenant, so that the lock that all tenants share is not taken for each token.
const STEP_BYTES: usize = 16 << 10;

#[derive(Debug)]
pub struct Backlog(Mutex<BacklogMemory>);

#[derive(Debug)]
struct BacklogMemory {
    bytes: usize,
    memory: Reservation,
}

impl Backlog {
    /// Creates the backlog of a request whose prompts take the bytes of `memory` until it ends.
    #[must_use]
    pub fn new(memory: Reservation) -> Arc<Self> {
        Arc::new(Self(Mutex::new(BacklogMemory { bytes: memory.bytes(), memory })))
    }

    /// Adds the bytes of an unread output.
    pub(super) fn add(&self, bytes: usize) -> Result<(), MemoryFull> {
        let mut kept = lock(&self.0);
        let all = kept.bytes + bytes;
        if all > kept.memory.bytes() {
            kept.memory.resize(all.next_multiple_of(STEP_BYTES))?;
        }
        kept.bytes = all;
        Ok(())
    }

    pub(super) fn remove(&self, bytes: usize) {
        let mut kept = lock(&self.0);
        kept.bytes -= bytes;
        let needed = kept.bytes.next_multiple_of(STEP_BYTES);
        if kept.memory.bytes() > needed + STEP_BYTES {
            // A smaller reservation exceeds no limit.
            let _ = kept.memory.resize(needed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant_memory::{MemoryLimits, TenantMemory};

    #[test]
    fn what_is_not_read_is_counted_to_its_tenant_up_to_the_limit_and_given_back() {
        let limits = MemoryLimits { tenant_bytes: 10 * STEP_BYTES, total_bytes: 1 << 30 };
        let (memory, alice) = (TenantMemory::new(limits), "alice".into());
        let prompts = STEP_BYTES / 2;
        let backlog = Backlog::new(memory.reserve(&alice, prompts).unwrap());
        let outputs = (0..).take_while(|_| backlog.add(1000).is_ok()).count();
        assert!(outputs * 1000 + prompts > 9 * STEP_BYTES, "{outputs} outputs");
        assert!(memory.used_by("alice") <= 10 * STEP_BYTES);
        for _ in 0..outputs {
            backlog.remove(1000);
        }
        assert!(memory.used_by("alice") <= 2 * STEP_BYTES, "what was read is given back");
        backlog.add(1000).unwrap();
        drop(backlog);
        assert_eq!(memory.used(), 0);
    }
}
