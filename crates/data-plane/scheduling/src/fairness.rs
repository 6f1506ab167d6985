//! Fair queueing between tenants, by the tokens they are served (the virtual token counter of Sheng et al., OSDI 2024).
//!
//! Each tenant has a counter of the tokens it was served, divided by its weight; of those who wait, the one with the least goes
//! next. Who comes back after a pause begins no lower than the least of those who waited meanwhile, so that idleness earns
//! nothing; and somebody always goes while anybody waits.
//!
//! What a request will cost is charged when it goes, as an estimate, and [settled](FairQueue::reconcile) when it is known. Urgent
//! classes go first, but a class is passed over only so many times in a row. What is too late never goes
//! ([`FairQueue::expire`]). The queue is bounded; when it is full, who has the longest queue gives.
//!
//! # Layout
//!
//! - here: the queue.
//! - [`service_rate`]: how fast those who wait are served.
//! - [`burst_limit`]: how much some may have under way beside others.

pub mod burst_limit;
pub mod service_rate;

use std::collections::{BTreeMap, VecDeque};

/// Parts of a token that counters count in, so that weights divide it well.
const PARTS: u64 = 1 << 16;

/// Bounds of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FairLimits {
    /// What waits together, by its size.
    pub max_waiting: usize,
    /// How often in a row a class is passed over for more urgent ones.
    pub max_passed_over: u32,
}

impl Default for FairLimits {
    fn default() -> Self {
        Self { max_waiting: 4096, max_passed_over: 16 }
    }
}

/// How urgent a request is: the least is the most urgent.
pub type PriorityClass = u8;

/// A request that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueEntry<T> {
    /// What waits.
    pub item: T,
    /// Tokens it will cost: its prompt, and what its answer should have.
    pub cost_tokens: u64,
    /// What it counts in the queue's bound; at least 1.
    pub size: usize,
    /// How urgent it is.
    pub class: PriorityClass,
    /// From when on it need not go any more, in the time that everything is told here.
    pub deadline_us: Option<u64>,
}

/// A request whose turn it is, or whose turn never came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DequeuedRequest<K, T> {
    /// Whose it is.
    pub tenant: K,
    /// What waited.
    pub entry: QueueEntry<T>,
}

/// The queue is full, and whoever asks has the longest part of it. The entry comes back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} wait, and there may be no more")]
pub struct QueueFull<T> {
    /// How much waits.
    pub waiting: usize,
    /// What was refused.
    pub entry: QueueEntry<T>,
}

#[derive(Debug, Clone)]
struct TenantQueues<T> {
    /// Parts of tokens served, over the weight.
    counter: u64,
    weight: u64,
    queues: BTreeMap<PriorityClass, VecDeque<QueueEntry<T>>>,
    waiting: usize,
}

impl<T> TenantQueues<T> {
    fn virtual_parts(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(PARTS) / self.weight
    }

    /// What is first in a class among what is not too late.
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

/// See the module. `K` names a tenant.
#[derive(Debug, Clone)]
pub struct FairQueue<K, T> {
    limits: FairLimits,
    tenants: BTreeMap<K, TenantQueues<T>>,
    /// No counter of one who comes begins below it.
    floor: u64,
    waiting: usize,
    /// How often in a row each class that waits was passed over.
    passed_over: BTreeMap<PriorityClass, u32>,
}

impl<K: Ord + Clone, T> FairQueue<K, T> {
    /// A queue in which nobody waits.
    #[must_use]
    pub fn new(limits: FairLimits) -> Self {
        Self { limits, tenants: BTreeMap::new(), floor: 0, waiting: 0, passed_over: BTreeMap::new() }
    }

    /// How much waits.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// How much of a tenant waits.
    #[must_use]
    pub fn waiting_of(&self, tenant: &K) -> usize {
        self.tenants.get(tenant).map_or(0, |tenant| tenant.waiting)
    }

    /// A tenant's request joins; its `weight` (at least 1) holds for all it has. When the queue is full, the youngest of
    /// the least urgent of whoever has most give their places, and come back.
    ///
    /// # Errors
    /// The queue is full, and nobody has more in it than this tenant.
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

    /// What those have who have more than `so_much`, beyond that.
    fn above(&self, so_much: usize) -> usize {
        self.tenants.values().map(|tenant| tenant.waiting.saturating_sub(so_much)).sum()
    }

    /// Takes one of whoever has most.
    fn displace(&mut self) -> Option<DequeuedRequest<K, T>> {
        let (tenant, state) = self.tenants.iter_mut().max_by_key(|(_, state)| state.waiting)?;
        let (&class, queue) = state.queues.last_key_value()?;
        let last = queue.len().checked_sub(1)?;
        let entry = state.take(class, last)?;
        let turn = DequeuedRequest { tenant: tenant.clone(), entry };
        self.left(&turn.entry);
        Some(turn)
    }

    /// Whose turn it is, among those whose first request `may` go: it leaves, and its cost is charged. `None` if none may.
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
        // Who comes back would begin at the floor anyway.
        let floor = self.floor;
        self.tenants.retain(|_, one| one.waiting > 0 || one.counter > floor);
        Some(DequeuedRequest { tenant, entry })
    }

    fn next(&self, now_us: u64, mut may: impl FnMut(&K, &T) -> bool) -> Option<(PriorityClass, K, usize)> {
        let mut classes: Vec<(PriorityClass, u32)> =
            self.passed_over.iter().map(|(&class, &n)| (class, n)).collect();
        // Those that were passed over too often go first, the least urgent of them before all.
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

    /// It is gone.
    fn left(&mut self, entry: &QueueEntry<T>) {
        self.waiting -= entry.size;
        if !self.tenants.values().any(|tenant| tenant.queues.contains_key(&entry.class)) {
            self.passed_over.remove(&entry.class);
        }
    }

    /// What a request of a tenant of this `weight` came to, instead of what it was charged when it went.
    pub fn reconcile(&mut self, tenant: &K, weight: u64, charged_tokens: u64, cost_tokens: u64) {
        let floor = self.floor;
        // Whoever was forgotten would begin at the floor, and owes what is beyond the charge.
        let new =
            || TenantQueues { counter: floor, weight: weight.max(1), queues: BTreeMap::new(), waiting: 0 };
        let state = self.tenants.entry(tenant.clone()).or_insert_with(new);
        let (charged, cost) = (state.virtual_parts(charged_tokens), state.virtual_parts(cost_tokens));
        state.counter = state.counter.saturating_add(cost).saturating_sub(charged);
        if state.waiting == 0 && state.counter <= floor {
            self.tenants.remove(tenant);
        }
    }

    /// Takes out what is too late.
    pub fn expire(&mut self, now_us: u64) -> Vec<DequeuedRequest<K, T>> {
        self.extract(|entry| is_late(entry, now_us))
    }

    /// Takes out what its owner no longer wants.
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

    /// Tokens that are served before what a tenant would push now, if nobody else comes: of each other tenant as many as
    /// its counter lets it have until this one's has come so far, and all that waits of its own. It may be off by a request
    /// of each tenant, and does not know of classes.
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
            let room = u64::try_from(parts / u128::from(PARTS)).unwrap_or(u64::MAX);
            waiting(state).min(room)
        });
        own_tokens.saturating_add(others.sum())
    }
}

fn is_late<T>(entry: &QueueEntry<T>, now_us: u64) -> bool {
    entry.deadline_us.is_some_and(|deadline_us| deadline_us < now_us)
}

#[cfg(test)]
mod tests;
