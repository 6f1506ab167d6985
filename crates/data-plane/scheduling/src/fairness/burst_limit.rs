//! Bounds the running sequences of tenants with a backlog, beside tenants that get all they ask for.
//!
//! More sequences on an executor make each of its steps longer. A new request waits for a step to end and
//! takes part in the next, however soon its turn comes. So tenants with a backlog are held back while some
//! recent tenant has no backlog. A tenant floods once it was served far more than its share (`FAR_ABOVE`),
//! until it was served no more than its share. Floods with a backlog divide a fixed number of batch slots
//! evenly. Other tenants with a backlog have the slots of their own share. Each executor may always have one
//! sequence of each of them. Where all tenants have a backlog, or one is alone, slots go by turn.
//!
//! A few clients that ask again and again make a flood without a backlog. Beside sequences of a tenant that
//! is not held back, the prompts of such a flood go one by one.
//!
//! No tenant that is held back waits for a sequence of another one. A shared count would let a tenant whose
//! prompt waits long, for a grammar or an adapter, keep the others waiting.
//!
//! The number of slots is fixed because measured steps and sequences already depend on how long steps are:
//! bounds that were computed from measurements settled where everything is slow.

use std::collections::BTreeMap;

/// Default fraction of an executor's batch slots for all over-quota tenants together.
pub const FLOOD_SHARE: f64 = 1.0 / 16.0;

/// Memory of a tenant after its last request, in microseconds; served tokens decay by a factor e in it.
const MEMORY_US: u64 = 10_000_000;

/// Multiple of its share from which a tenant floods. A tenant with less may only have happened to send longer
/// requests than the others.
const FAR_ABOVE: f64 = 1.5;

/// Age of the oldest waiting request from which a tenant has a backlog, in microseconds.
const BACKLOG_US: u64 = 1_000_000;

#[derive(Debug, Clone, PartialEq)]
struct TenantUsage {
    weight: u64,
    asked_us: u64,
    /// Decayed sum of served tokens, and the time in microseconds at which it was computed.
    served: (f64, u64),
    /// Since when the tenant has had a waiting request.
    waits_since_us: Option<u64>,
    floods: bool,
    under_way: usize,
    /// How many of the sequences under way have no first token.
    unbegun: usize,
}

impl TenantUsage {
    fn served_by(&self, now_us: u64) -> f64 {
        let (tokens, as_of_us) = self.served;
        tokens * (-(now_us.saturating_sub(as_of_us) as f64) / MEMORY_US as f64).exp()
    }

    fn is_here(&self, now_us: u64) -> bool {
        self.under_way > 0 || self.waits_since_us.is_some() || self.asked_us + MEMORY_US > now_us
    }
}

/// Usage of all recent tenants, each named by a `K`.
#[derive(Debug, Clone)]
pub struct BurstLimit<K> {
    tenants: BTreeMap<K, TenantUsage>,
}

impl<K> Default for BurstLimit<K> {
    fn default() -> Self {
        Self { tenants: BTreeMap::new() }
    }
}

/// Batch slots of all executors together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BurstCapacity {
    /// Number of executors of the deployment.
    pub executors: usize,
    /// Number of sequences that all executors together can run.
    pub all: usize,
    /// Slots that floods with a backlog divide, but each may have one per executor; from `all` on, no tenant
    /// is held back.
    pub floods: usize,
}

/// How a tenant is held back.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Throttle {
    /// The tenant has a backlog, and the batch slots of its share by weight, which is from 0 to 1.
    Share(f64),
    /// The tenant floods and has a backlog.
    Slots,
    /// The tenant floods and has no backlog.
    Prompts,
}

/// Tenant that is held back.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ThrottledTenant<'a, K> {
    key: &'a K,
    tenant: &'a TenantUsage,
    how: Throttle,
}

/// Tenants that are held back now.
#[derive(Debug, Clone, PartialEq)]
pub struct OverQuotaTenants<'a, K>(Vec<ThrottledTenant<'a, K>>);

impl<K: Ord> OverQuotaTenants<'_, K> {
    /// Whether a request of `tenant` may go. A tenant that floods has at most one request without a first
    /// token per executor, because prompts lengthen a step most.
    #[must_use]
    pub fn lets(&self, tenant: &K, places: BurstCapacity) -> bool {
        let BurstCapacity { executors, all, floods } = places;
        if floods >= all {
            return true;
        }
        let Some(ThrottledTenant { tenant, how, .. }) = self.0.iter().find(|held| held.key == tenant) else {
            return true;
        };
        let is_free = tenant.unbegun < executors;
        match how {
            Throttle::Share(part) => tenant.under_way < ((all as f64 * part) as usize).max(executors),
            Throttle::Slots => is_free && tenant.under_way < (floods / self.flooding()).max(executors),
            Throttle::Prompts => is_free,
        }
    }

    /// Returns the number of tenants that share the slots for floods.
    fn flooding(&self) -> usize {
        self.0.iter().filter(|held| held.how == Throttle::Slots).count().max(1)
    }
}

impl<K: Ord + Clone> BurstLimit<K> {
    /// Records a request of a tenant whose share is in proportion to `weight`, at least 1.
    pub fn ask(&mut self, tenant: &K, weight: u64, now_us: u64) {
        let new = || TenantUsage {
            weight,
            asked_us: now_us,
            served: (0.0, now_us),
            waits_since_us: None,
            floods: false,
            under_way: 0,
            unbegun: 0,
        };
        let known = self.tenants.entry(tenant.clone()).or_insert_with(new);
        (known.weight, known.asked_us) = (weight, now_us);
    }

    /// Records that `sequences` of a tenant go to an executor.
    pub fn send(&mut self, tenant: &K, sequences: usize) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.under_way += sequences;
            tenant.unbegun += sequences;
        }
    }

    /// Records that `sequences` have first tokens, or never will.
    pub fn begin(&mut self, tenant: &K, sequences: usize) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.unbegun = tenant.unbegun.saturating_sub(sequences);
        }
    }

    /// Records that `sequences` have ended, for which `tokens` were computed.
    pub fn end(&mut self, tenant: &K, sequences: usize, tokens: u64, now_us: u64) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.under_way = tenant.under_way.saturating_sub(sequences);
            tenant.unbegun = tenant.unbegun.min(tenant.under_way);
            tenant.served = (tenant.served_by(now_us) + tokens as f64, now_us);
        }
    }

    /// Records which tenants have waiting requests; called before each decision and after the last of them.
    pub fn update_waiting(&mut self, waits: impl Fn(&K) -> bool, now_us: u64) {
        for (key, tenant) in &mut self.tenants {
            tenant.waits_since_us = waits(key).then(|| tenant.waits_since_us.unwrap_or(now_us));
        }
        self.tenants.retain(|_, tenant| tenant.is_here(now_us));
        let (served, weights) = self.total(now_us);
        for tenant in self.tenants.values_mut() {
            let part = served * tenant.weight as f64 / weights as f64;
            tenant.floods = tenant.served_by(now_us) > if tenant.floods { part } else { part * FAR_ABOVE };
        }
    }

    /// Returns the served tokens and the weights of all tenants.
    fn total(&self, now_us: u64) -> (f64, u64) {
        let all = || self.tenants.values();
        (all().map(|tenant| tenant.served_by(now_us)).sum(), all().map(|tenant| tenant.weight).sum())
    }

    /// Returns the tenants that are held back now.
    #[must_use]
    pub fn crowd(&self, now_us: u64) -> OverQuotaTenants<'_, K> {
        let piles_up = |tenant: &TenantUsage| {
            tenant.waits_since_us.is_some_and(|since_us| since_us + BACKLOG_US <= now_us)
        };
        if self.tenants.values().all(piles_up) {
            return OverQuotaTenants(Vec::new());
        }
        let (_, weights) = self.total(now_us);
        let is_served = |tenant: &TenantUsage| tenant.under_way > 0 && !tenant.floods && !piles_up(tenant);
        let is_disturbed = self.tenants.values().any(is_served);
        let how = |tenant: &TenantUsage| match (piles_up(tenant), tenant.floods) {
            (true, false) => Some(Throttle::Share(tenant.weight as f64 / weights as f64)),
            (true, true) => Some(Throttle::Slots),
            (false, floods) => (floods && is_disturbed).then_some(Throttle::Prompts),
        };
        let held = self
            .tenants
            .iter()
            .filter_map(|(key, tenant)| Some(ThrottledTenant { key, tenant, how: how(tenant)? }));
        OverQuotaTenants(held.collect())
    }
}

#[cfg(test)]
mod tests;
