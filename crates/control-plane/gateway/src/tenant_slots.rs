//! Limits on concurrent slow operations such as uploads, downloads and copies.
//!
//! One limit holds for all tenants together and a smaller one for each tenant, so that one tenant cannot take
//! every slot.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::lock::lock;

/// Slots for one kind of operation.
#[derive(Debug)]
pub(crate) struct TenantSlots {
    all: Arc<Semaphore>,
    per_tenant: usize,
    /// Semaphores of tenants that have a slot or wait for one.
    by_tenant: Mutex<HashMap<Arc<str>, Arc<Semaphore>>>,
}

impl TenantSlots {
    /// Creates `total` slots, of which one tenant may have `per_tenant`.
    #[must_use]
    pub(crate) fn new(total: usize, per_tenant: usize) -> Arc<Self> {
        Arc::new(Self { all: Arc::new(Semaphore::new(total)), per_tenant, by_tenant: Mutex::default() })
    }

    /// Waits at most `patience` for a slot of `tenant`; `None` after that.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        patience: Duration,
    ) -> Option<TenantSlot> {
        let member = self.member(tenant);
        let permits = async {
            // Neither semaphore is ever closed.
            let own = Arc::clone(&member.semaphore).acquire_owned().await.ok()?;
            Some((own, Arc::clone(&self.all).acquire_owned().await.ok()?))
        };
        let (own, shared) = timeout(patience, permits).await.ok()??;
        Some(TenantSlot { _own: own, _shared: shared, _member: member })
    }

    fn member(self: &Arc<Self>, tenant: &Arc<str>) -> SlotTenant {
        let mut by_tenant = lock(&self.by_tenant);
        let own = by_tenant.entry(Arc::clone(tenant));
        let semaphore = Arc::clone(own.or_insert_with(|| Arc::new(Semaphore::new(self.per_tenant))));
        SlotTenant { slots: Arc::clone(self), tenant: Arc::clone(tenant), semaphore }
    }
}

/// Permission to run one operation; dropping it gives the slot back.
#[derive(Debug)]
pub(crate) struct TenantSlot {
    // Permits are dropped first, because `SlotTenant` counts the references to the semaphore.
    _own: OwnedSemaphorePermit,
    _shared: OwnedSemaphorePermit,
    _member: SlotTenant,
}

/// Tenant that has a slot or waits for one; the last one of a tenant removes the tenant's entry.
#[derive(Debug)]
struct SlotTenant {
    slots: Arc<TenantSlots>,
    tenant: Arc<str>,
    semaphore: Arc<Semaphore>,
}

impl Drop for SlotTenant {
    fn drop(&mut self) {
        let mut by_tenant = lock(&self.slots.by_tenant);
        // The two references are this one and the table's.
        if Arc::strong_count(&self.semaphore) == 2 {
            by_tenant.remove(&self.tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timeout long enough to show that no slot is free.
    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn a_tenant_with_its_share_of_the_slots_waits_while_others_get_theirs() {
        let (slots, alice, bob) = (TenantSlots::new(3, 2), "alice".into(), "bob".into());
        let first = slots.acquire(&alice, SHORT).await.unwrap();
        let second = slots.acquire(&alice, SHORT).await.unwrap();
        assert!(slots.acquire(&alice, SHORT).await.is_none(), "the tenant's own limit");
        let others = slots.acquire(&bob, SHORT).await.unwrap();
        assert!(slots.acquire(&bob, SHORT).await.is_none(), "the limit of all");
        drop(first);
        let waited = slots.acquire(&bob, SHORT).await.unwrap();
        drop((second, others, waited));
        assert!(lock(&slots.by_tenant).is_empty(), "tenants without slots are forgotten");
    }

    #[tokio::test]
    async fn whoever_waits_gets_the_slot_that_is_given_back() {
        let (slots, alice) = (TenantSlots::new(1, 1), Arc::from("alice"));
        let held = slots.acquire(&alice, SHORT).await.unwrap();
        let (next, ()) = tokio::join!(slots.acquire(&alice, Duration::from_secs(60)), async { drop(held) });
        assert!(next.is_some());
    }
}
