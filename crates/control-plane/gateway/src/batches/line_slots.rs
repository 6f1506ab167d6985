//! Slots for lines that are computed at the same time, shared by the batches of all tenants.
//!
//! The admission queue says how many background sequences may run. A line takes a slot before its request is
//! made, so that waiting lines hold neither memory of prompts nor leases of adapters. The tenant whose lines
//! used the fewest tokens goes next (`scheduling::fairness`). When online requests arrive, the number falls,
//! and the slots that were taken last are revoked: their lines stop, and are computed again later.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use scheduling::fairness::{FairLimits, FairQueue, QueueEntry};
use tokio::sync::{Notify, oneshot, watch};

use crate::lock::lock;

/// All lines are of one class, and all tenants have one weight.
const CLASS: u8 = 0;
const WEIGHT: u64 = 1;

#[derive(Debug)]
struct SlotQueue {
    waiting: FairQueue<Arc<str>, oneshot::Sender<LineSlot>>,
    /// Slots that lines hold, in the order in which they were taken.
    held: BTreeMap<u64, Arc<Notify>>,
    last: u64,
}

/// The slots and the lines that wait for one.
#[derive(Debug)]
pub(super) struct LineSlots {
    queue: Mutex<SlotQueue>,
    limit: watch::Receiver<usize>,
}

/// Permission to compute one line; dropping it gives the slot back.
#[derive(Debug)]
pub(super) struct LineSlot {
    slots: Arc<LineSlots>,
    tenant: Arc<str>,
    number: u64,
    is_revoked: Arc<Notify>,
    charged_tokens: u64,
    used_tokens: u64,
}

impl LineSlots {
    /// Creates slots, of which as many are usable as `limit` says.
    pub(super) fn new(limit: watch::Receiver<usize>) -> Arc<Self> {
        // Batches bound the number of waiting lines.
        let limits = FairLimits { max_waiting: usize::MAX, ..FairLimits::default() };
        let queue = SlotQueue { waiting: FairQueue::new(limits), held: BTreeMap::new(), last: 0 };
        Arc::new(Self { queue: Mutex::new(queue), limit })
    }

    /// Number of lines that may run now.
    pub(super) fn limit(&self) -> usize {
        *self.limit.borrow()
    }

    /// Number of lines that run.
    pub(super) fn held(&self) -> usize {
        lock(&self.queue).held.len()
    }

    /// Waits for a slot for a line of `tenant` that needs about `cost_tokens`.
    pub(super) async fn acquire(self: &Arc<Self>, tenant: &Arc<str>, cost_tokens: u64) -> LineSlot {
        loop {
            let (item, granted) = oneshot::channel();
            let entry = QueueEntry { item, cost_tokens, size: 1, class: CLASS, deadline_us: None };
            // The queue has no maximum length, so no entry is displaced.
            let _ = lock(&self.queue).waiting.push(tenant, WEIGHT, entry);
            self.dispatch();
            if let Ok(slot) = granted.await {
                return slot;
            }
        }
    }

    /// Follows the limit: grants slots when it rises, and revokes slots when it falls.
    pub(super) async fn follow(self: Arc<Self>) {
        let mut limit = self.limit.clone();
        while limit.changed().await.is_ok() {
            self.revoke();
            self.dispatch();
        }
    }

    fn revoke(&self) {
        let queue = lock(&self.queue);
        let excess = queue.held.len().saturating_sub(self.limit());
        queue.held.values().rev().take(excess).for_each(|slot| slot.notify_one());
    }

    fn dispatch(self: &Arc<Self>) {
        let mut refused = Vec::new();
        let mut queue = lock(&self.queue);
        while queue.held.len() < self.limit()
            && let Some(turn) = queue.waiting.pop(0, |_, waiter| !waiter.is_closed())
        {
            queue.last += 1;
            let (number, is_revoked) = (queue.last, Arc::new(Notify::new()));
            queue.held.insert(number, Arc::clone(&is_revoked));
            let charged_tokens = turn.entry.cost_tokens;
            let (slots, tenant) = (Arc::clone(self), turn.tenant);
            let slot = LineSlot { slots, tenant, number, is_revoked, charged_tokens, used_tokens: 0 };
            refused.extend(turn.entry.item.send(slot).err());
        }
        queue.waiting.cancel(oneshot::Sender::is_closed);
        drop(queue);
        // A slot whose line is gone locks the queue when it is dropped.
        drop(refused);
    }
}

impl LineSlot {
    /// Waits until the slot is revoked.
    pub(super) async fn revoked(&self) {
        self.is_revoked.notified().await;
    }

    /// Records the tokens that the line used.
    pub(super) fn used(&mut self, tokens: u64) {
        self.used_tokens = tokens;
    }
}

impl Drop for LineSlot {
    fn drop(&mut self) {
        let mut queue = lock(&self.slots.queue);
        queue.held.remove(&self.number);
        queue.waiting.reconcile(&self.tenant, WEIGHT, self.charged_tokens, self.used_tokens);
        drop(queue);
        self.slots.dispatch();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn slots(limit: usize) -> (watch::Sender<usize>, Arc<LineSlots>) {
        let (sender, receiver) = watch::channel(limit);
        (sender, LineSlots::new(receiver))
    }

    #[tokio::test]
    async fn a_slot_goes_to_the_tenant_that_used_the_fewest_tokens() {
        let (_limit, slots) = slots(1);
        let (alice, bob) = ("alice".into(), "bob".into());
        let mut held = slots.acquire(&alice, 10).await;
        held.used(1000);
        let (mut again, mut other) = (Box::pin(slots.acquire(&alice, 10)), Box::pin(slots.acquire(&bob, 10)));
        assert!((&mut again).now_or_never().is_none() && (&mut other).now_or_never().is_none());
        drop(held);
        assert!((&mut again).now_or_never().is_none(), "bob has used nothing");
        drop(other.await);
        drop(again.await);
        assert_eq!(slots.held(), 0);
    }

    #[tokio::test]
    async fn a_lower_limit_revokes_the_last_slots_and_a_line_that_is_gone_keeps_none() {
        let (limit, slots) = slots(3);
        let tenant = "alice".into();
        let held = [(); 3].map(|()| slots.acquire(&tenant, 1).now_or_never().unwrap());
        let gone = slots.acquire(&tenant, 1).now_or_never();
        assert!(gone.is_none());
        limit.send(1).unwrap();
        slots.revoke();
        let revoked = held.each_ref().map(|slot| slot.revoked().now_or_never().is_some());
        assert_eq!(revoked, [false, true, true]);
        drop(held);
        assert_eq!(slots.held(), 0, "the line that no longer waits gets no slot");
    }
}
