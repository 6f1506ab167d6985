//! Fair queueing between tenants by served tokens (the virtual token counter of Sheng et al., OSDI 2024).
//!
//! Each tenant has a counter of its served tokens, divided by its weight. The waiting tenant with the lowest
//! counter goes next. A tenant that returns after a pause starts no lower than the lowest waiting counter, so
//! idling earns no credit. While a permitted request waits, [`FairQueue::pop`] returns one.
//!
//! A request is charged an estimated cost when it goes, and the charge is [corrected](FairQueue::reconcile)
//! when the cost is known. Urgent classes go first, but a class is passed over only a bounded number of times
//! in a row. A request past its deadline never goes ([`FairQueue::expire`]). The queue is bounded; when it is
//! full, the tenant with the most waiting loses its youngest requests.
//!
//! # Layout
//!
//! - here: the queue.
//! - [`service_rate`]: measures how fast waiting requests are served.
//! - [`burst_limit`]: bounds the batch slots of some tenants beside others.
//! - [`background_limit`]: bounds background requests beside online requests.

pub mod background_limit;
pub mod burst_limit;
pub mod service_rate;

use std::collections::{BTreeMap, VecDeque};

/// Counter units per token, so that division by a weight loses little.
const PARTS: u64 = 1 << 16;

/// Bounds of a fair queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FairLimits {
    /// Maximum total size of waiting entries.
    pub max_waiting: usize,
    /// How many times in a row a class may be passed over for more urgent ones.
    pub max_passed_over: u32,
}

impl Default for FairLimits {
    fn default() -> Self {
        Self { max_waiting: 4096, max_passed_over: 16 }
    }
}

/// Urgency of a request: the lowest number is the most urgent.
pub type PriorityClass = u8;

/// Request that waits in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueEntry<T> {
    /// The caller's own description of the request.
    pub item: T,
    /// Estimated cost in tokens: the prompt and the expected answer.
    pub cost_tokens: u64,
    /// Units of [`FairLimits::max_waiting`] that the entry takes; at least 1.
    pub size: usize,
    /// Urgency of the request.
    pub class: PriorityClass,
    /// Time after which the request is dropped, in microseconds of the clock that `now_us` arguments use.
    pub deadline_us: Option<u64>,
}

/// Request that left the queue, by its turn, displacement, cancellation or deadline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DequeuedRequest<K, T> {
    /// Tenant that owns the request.
    pub tenant: K,
    /// The entry as it was queued.
    pub entry: QueueEntry<T>,
}

/// Error of a full queue: removing entries of tenants that have more waiting than the caller's tenant would
/// not free enough capacity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} requests wait, which is the limit")]
pub struct QueueFull<T> {
    /// Total size of the waiting entries.
    pub waiting: usize,
    /// Entry that was refused.
    pub entry: QueueEntry<T>,
}

#[derive(Debug, Clone)]
struct TenantQueues<T> {
    /// Served tokens in units of `1 / PARTS`, divided by the weight.
    counter: u64,
    weight: u64,
    queues: BTreeMap<PriorityClass, VecDeque<QueueEntry<T>>>,
    waiting: usize,
}

impl<T> TenantQueues<T> {
    fn virtual_parts(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(PARTS) / self.weight
    }

    /// Returns the position of the first entry of `class` that is not late.
    fn first(&self, class: PriorityClass, now_us: u64) -> Option<usize> {
        self.queues.get(&class)?.iter().position(|entry| !is_late(entry, now_us))
    }

    fn take(&mut self, class: PriorityClass, at: usize) -> Option<QueueEntry<T>> {
        let queue = self.queues.get_mut(&class)?;
        let entry = queue.remove(at)?;
        if queue.is_empty() {
            self.queues.remove(&class);
        }
        self.waiting -= entry.size;
        Some(entry)
    }
}

/// Fair queue of requests; `K` names a tenant.
#[derive(Debug, Clone)]
pub struct FairQueue<K, T> {
    limits: FairLimits,
    tenants: BTreeMap<K, TenantQueues<T>>,
    /// Lowest start value for the counter of a tenant that joins.
    floor: u64,
    waiting: usize,
    /// How many times in a row each waiting class was passed over.
    passed_over: BTreeMap<PriorityClass, u32>,
}

impl<K: Ord + Clone, T> FairQueue<K, T> {
    /// Creates a queue without entries.
    #[must_use]
    pub fn new(limits: FairLimits) -> Self {
        Self { limits, tenants: BTreeMap::new(), floor: 0, waiting: 0, passed_over: BTreeMap::new() }
    }

    /// Returns the total size of waiting entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Whether no entry waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns the total size of a tenant's waiting entries.
    #[must_use]
    pub fn waiting_of(&self, tenant: &K) -> usize {
        self.tenants.get(tenant).map_or(0, |tenant| tenant.waiting)
    }

    /// Queues a request of `tenant`; `weight` (at least 1) applies to all its entries. In a full queue, the
    /// tenant with the most waiting loses the youngest of its least urgent entries, which are returned.
    ///
    /// # Errors
    /// Returns `QueueFull` with the entry if tenants with more waiting cannot free enough capacity.
    pub fn push(
        &mut self,
        tenant: &K,
        weight: u64,
        entry: QueueEntry<T>,
    ) -> Result<Vec<DequeuedRequest<K, T>>, QueueFull<T>> {
        let of_it = self.waiting_of(tenant).saturating_add(entry.size).saturating_sub(1);
        let mut excess = self.waiting.saturating_add(entry.size).saturating_sub(self.limits.max_waiting);
        if excess > self.above(of_it) {
            return Err(QueueFull { waiting: self.waiting, entry });
        }
        let mut displaced = Vec::new();
        while excess > 0
            && let Some(turn) = self.displace()
        {
            excess = excess.saturating_sub(turn.entry.size);
            displaced.push(turn);
        }
        let floor = self.floor;
        let new = || TenantQueues { counter: floor, weight: 1, queues: BTreeMap::new(), waiting: 0 };
        let state = self.tenants.entry(tenant.clone()).or_insert_with(new);
        if state.waiting == 0 {
            state.counter = state.counter.max(floor);
        }
        state.weight = weight.max(1);
        state.waiting += entry.size;
        self.waiting += entry.size;
        self.passed_over.entry(entry.class).or_default();
        state.queues.entry(entry.class).or_default().push_back(entry);
        Ok(displaced)
    }

    /// Returns the sum, over all tenants, of the waiting size beyond `so_much`.
    fn above(&self, so_much: usize) -> usize {
        self.tenants.values().map(|tenant| tenant.waiting.saturating_sub(so_much)).sum()
    }

    /// Takes one entry from the tenant with the most waiting.
    fn displace(&mut self) -> Option<DequeuedRequest<K, T>> {
        let (tenant, state) = self.tenants.iter_mut().max_by_key(|(_, state)| state.waiting)?;
        let (&class, queue) = state.queues.last_key_value()?;
        let last = queue.len().checked_sub(1)?;
        let entry = state.take(class, last)?;
        let turn = DequeuedRequest { tenant: tenant.clone(), entry };
        self.left(&turn.entry);
        Some(turn)
    }

    /// Takes and charges the next request among tenants whose first request passes `may`; `None` if none.
    pub fn pop(&mut self, now_us: u64, may: impl FnMut(&K, &T) -> bool) -> Option<DequeuedRequest<K, T>> {
        let (class, tenant, at) = self.next(now_us, may)?;
        let state = self.tenants.get_mut(&tenant)?;
        let before = state.counter;
        let entry = state.take(class, at)?;
        state.counter = before.saturating_add(state.virtual_parts(entry.cost_tokens));
        let least = self.tenants.values().filter(|one| one.waiting > 0).map(|one| one.counter).min();
        self.floor = self.floor.max(least.unwrap_or(before));
        self.count_passed_over(class);
        self.left(&entry);
        // A forgotten tenant that returns starts at the floor, as it would anyway.
        let floor = self.floor;
        self.tenants.retain(|_, one| one.waiting > 0 || one.counter > floor);
        Some(DequeuedRequest { tenant, entry })
    }

    fn next(&self, now_us: u64, mut may: impl FnMut(&K, &T) -> bool) -> Option<(PriorityClass, K, usize)> {
        let mut classes: Vec<(PriorityClass, u32)> =
            self.passed_over.iter().map(|(&class, &n)| (class, n)).collect();
        // Classes that were passed over too often go first, the most passed over before the others.
        classes.sort_by_key(|&(class, passed)| {
            let is_due = passed >= self.limits.max_passed_over;
            (!is_due, if is_due { u32::MAX - passed } else { 0 }, class)
        });
        classes.into_iter().find_map(|(class, _)| {
            let mut waiting: Vec<(u64, &K, usize)> = self
                .tenants
                .iter()
                .filter_map(|(key, tenant)| Some((tenant.counter, key, tenant.first(class, now_us)?)))
                .collect();
            waiting.sort_by(|one, other| (one.0, one.1).cmp(&(other.0, other.1)));
            let first = |&(_, key, at): &(u64, &K, usize)| {
                self.tenants[key].queues.get(&class).and_then(|queue| queue.get(at)).map(|entry| &entry.item)
            };
            let found = waiting.into_iter().find(|one| first(one).is_some_and(|item| may(one.1, item)));
            found.map(|(_, key, at)| (class, key.clone(), at))
        })
    }

    fn count_passed_over(&mut self, served: PriorityClass) {
        for (&class, passed) in &mut self.passed_over {
            *passed = if class > served { passed.saturating_add(1) } else { *passed };
        }
        self.passed_over.insert(served, 0);
    }

    /// Updates the totals after `entry` left the queue.
    fn left(&mut self, entry: &QueueEntry<T>) {
        self.waiting -= entry.size;
        if !self.tenants.values().any(|tenant| tenant.queues.contains_key(&entry.class)) {
            self.passed_over.remove(&entry.class);
        }
    }

    /// Replaces the tokens charged for a request of a tenant with this `weight` by its real cost.
    pub fn reconcile(&mut self, tenant: &K, weight: u64, charged_tokens: u64, cost_tokens: u64) {
        let floor = self.floor;
        // A tenant that was forgotten starts at the floor and owes what exceeds the charge.
        let new =
            || TenantQueues { counter: floor, weight: weight.max(1), queues: BTreeMap::new(), waiting: 0 };
        let state = self.tenants.entry(tenant.clone()).or_insert_with(new);
        let (charged, cost) = (state.virtual_parts(charged_tokens), state.virtual_parts(cost_tokens));
        state.counter = state.counter.saturating_add(cost).saturating_sub(charged);
        if state.waiting == 0 && state.counter <= floor {
            self.tenants.remove(tenant);
        }
    }

    /// Removes and returns all entries past their deadline.
    pub fn expire(&mut self, now_us: u64) -> Vec<DequeuedRequest<K, T>> {
        self.extract(|entry| is_late(entry, now_us))
    }

    /// Removes and returns all entries that match `is_it`, which their owners cancelled.
    pub fn cancel(&mut self, mut is_it: impl FnMut(&T) -> bool) -> Vec<DequeuedRequest<K, T>> {
        self.extract(|entry| is_it(&entry.item))
    }

    fn extract(&mut self, mut goes: impl FnMut(&QueueEntry<T>) -> bool) -> Vec<DequeuedRequest<K, T>> {
        let mut gone = Vec::new();
        for (tenant, state) in &mut self.tenants {
            for queue in state.queues.values_mut() {
                let (out, kept) = std::mem::take(queue).into_iter().partition::<Vec<_>, _>(&mut goes);
                *queue = kept.into();
                gone.extend(out.into_iter().map(|entry| DequeuedRequest { tenant: tenant.clone(), entry }));
            }
            state.queues.retain(|_, queue| !queue.is_empty());
            state.waiting = state.queues.values().flatten().map(|entry| entry.size).sum();
        }
        gone.iter().for_each(|turn| self.left(&turn.entry));
        gone
    }

    /// Estimates the tokens served before a request that `tenant` would push now, if no other request
    /// arrives. The estimate counts all waiting tokens of `tenant`, and those of each other tenant until its
    /// counter reaches the one of `tenant`. The result may be off by one request per tenant and ignores
    /// classes.
    #[must_use]
    pub fn ahead_tokens(&self, tenant: &K) -> u64 {
        let waiting = |state: &TenantQueues<T>| -> u64 {
            state.queues.values().flatten().map(|entry| entry.cost_tokens).sum()
        };
        let own = self.tenants.get(tenant);
        let own_tokens = own.map_or(0, waiting);
        let begins = own.map_or(self.floor, |state| state.counter.max(self.floor));
        let reached = begins.saturating_add(own.map_or(0, |state| state.virtual_parts(own_tokens)));
        let others = self.tenants.iter().filter(|(key, _)| *key != tenant).map(|(_, state)| {
            let parts = u128::from(reached.saturating_sub(state.counter)) * u128::from(state.weight);
            let left = u64::try_from(parts / u128::from(PARTS)).unwrap_or(u64::MAX);
            waiting(state).min(left)
        });
        own_tokens.saturating_add(others.sum())
    }
}

fn is_late<T>(entry: &QueueEntry<T>, now_us: u64) -> bool {
    entry.deadline_us.is_some_and(|deadline_us| deadline_us < now_us)
}

#[cfg(test)]
mod tests;
