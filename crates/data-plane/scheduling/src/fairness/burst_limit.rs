//! How much those may have under way who want more than their part, beside others who get all they ask for.
//!
//! The more sequences an executor has, the longer is every step of it; whoever comes next waits for one to end and takes part in
//! another, however soon its turn is. So as long as a tenant asked of late that is served as it asks, those whose requests pile up
//! are held back: who was served more than its part has a fixed share of executors' places together with all who were, who was
//! not as many as are its part, and each executor may have one of theirs. Where all pile up, or one is alone, places go to
//! whoever's turn it is.
//!
//! The share is fixed because what is seen of steps and of others' sequences depends on how long steps are already: bounds that
//! were computed from it settled where everything is slow.

use std::collections::BTreeMap;

/// Of an executor's places, those that such tenants have together, unless an operator says otherwise.
pub const FLOOD_SHARE: f64 = 1.0 / 16.0;

/// How long a tenant that asks no more is reckoned with; what it was served counts e times less after it.
const MEMORY_US: u64 = 10_000_000;

/// Whose requests have been waiting for so long asks for more than it gets.
const BACKLOG_US: u64 = 1_000_000;

#[derive(Debug, Clone, PartialEq)]
struct TenantUsage {
    weight: u64,
    asked_us: u64,
    /// Tokens that it was served, earlier ones counting less, as of a time.
    served: (f64, u64),
    /// Since when something of it waits.
    waits_since_us: Option<u64>,
    under_way: usize,
    /// Of them, those without a token.
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

/// What is known of tenants, each of which is named by a `K`.
#[derive(Debug, Clone)]
pub struct BurstLimit<K> {
    tenants: BTreeMap<K, TenantUsage>,
}

impl<K> Default for BurstLimit<K> {
    fn default() -> Self {
        Self { tenants: BTreeMap::new() }
    }
}

/// What executors have for those who are held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BurstCapacity {
    /// How many executors there are.
    pub executors: usize,
    /// Sequences that they compute together, all of them.
    pub all: usize,
    /// Of these, those for all who were served more than their part; where these are all, nobody is held back.
    pub floods: usize,
}

/// Somebody who is held back.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ThrottledTenant<'a, K> {
    key: &'a K,
    tenant: &'a TenantUsage,
    /// Its part of all, if it was served no more.
    part: Option<f64>,
}

/// Who is held back now.
#[derive(Debug, Clone, PartialEq)]
pub struct OverQuotaTenants<'a, K>(Vec<ThrottledTenant<'a, K>>);

impl<K: Ord> OverQuotaTenants<'_, K> {
    /// Whether a request of `tenant` may go. One of those who were served more than their part waits for its first token in each
    /// executor: prompts lengthen a step most.
    #[must_use]
    pub fn lets(&self, tenant: &K, places: BurstCapacity) -> bool {
        let BurstCapacity { executors, all, floods } = places;
        if floods >= all {
            return true;
        }
        match self.0.iter().find(|held| held.key == tenant) {
            None => true,
            Some(ThrottledTenant { tenant, part: Some(part), .. }) => {
                tenant.under_way < ((all as f64 * part) as usize).max(executors)
            }
            Some(_) => {
                let pool = || self.0.iter().filter(|held| held.part.is_none()).map(|held| held.tenant);
                let [under_way, unbegun] =
                    [|one: &TenantUsage| one.under_way, |one: &TenantUsage| one.unbegun]
                        .map(|of| pool().map(of).sum::<usize>());
                under_way < floods.max(executors) && unbegun < executors
            }
        }
    }
}

impl<K: Ord + Clone> BurstLimit<K> {
    /// A tenant asks whose part of what is served, beside others, is `weight`, at least 1.
    pub fn ask(&mut self, tenant: &K, weight: u64, now_us: u64) {
        let new = || TenantUsage {
            weight,
            asked_us: now_us,
            served: (0.0, now_us),
            waits_since_us: None,
            under_way: 0,
            unbegun: 0,
        };
        let known = self.tenants.entry(tenant.clone()).or_insert_with(new);
        (known.weight, known.asked_us) = (weight, now_us);
    }

    /// So many sequences of a tenant go to an executor.
    pub fn send(&mut self, tenant: &K, sequences: usize) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.under_way += sequences;
            tenant.unbegun += sequences;
        }
    }

    /// They have their first tokens, or never will.
    pub fn begin(&mut self, tenant: &K, sequences: usize) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.unbegun = tenant.unbegun.saturating_sub(sequences);
        }
    }

    /// They have ended, and so many tokens were computed for them.
    pub fn end(&mut self, tenant: &K, sequences: usize, tokens: u64, now_us: u64) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.under_way = tenant.under_way.saturating_sub(sequences);
            tenant.unbegun = tenant.unbegun.min(tenant.under_way);
            tenant.served = (tenant.served_by(now_us) + tokens as f64, now_us);
        }
    }

    /// Looks who waits: before it is decided who may go, and when all have gone who may.
    pub fn update_waiting(&mut self, waits: impl Fn(&K) -> bool, now_us: u64) {
        for (key, tenant) in &mut self.tenants {
            tenant.waits_since_us = waits(key).then(|| tenant.waits_since_us.unwrap_or(now_us));
        }
        self.tenants.retain(|_, tenant| tenant.is_here(now_us));
    }

    /// Who is held back.
    #[must_use]
    pub fn crowd(&self, now_us: u64) -> OverQuotaTenants<'_, K> {
        let piles_up = |tenant: &TenantUsage| {
            tenant.waits_since_us.is_some_and(|since_us| since_us + BACKLOG_US <= now_us)
        };
        if self.tenants.values().all(piles_up) {
            return OverQuotaTenants(Vec::new());
        }
        let weights: u64 = self.tenants.values().map(|tenant| tenant.weight).sum();
        let served: f64 = self.tenants.values().map(|tenant| tenant.served_by(now_us)).sum();
        let held = self.tenants.iter().filter(|(_, tenant)| piles_up(tenant)).map(|(key, tenant)| {
            let part = tenant.weight as f64 / weights as f64;
            let is_over = tenant.served_by(now_us) > served * part;
            ThrottledTenant { key, tenant, part: (!is_over).then_some(part) }
        });
        OverQuotaTenants(held.collect())
    }
}

#[cfg(test)]
mod tests;
