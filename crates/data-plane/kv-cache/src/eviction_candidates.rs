//! Eviction candidates of a tier, the least valuable first, with the share of each tenant.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use types::TenantId;

/// Time after its last visit for which a tenant keeps its share.
const SHARE_MEMORY: Duration = Duration::from_secs(600);

/// Returns an integer that sorts as `worth` does.
pub(crate) fn key_of(worth: f64) -> i64 {
    let bits = worth.to_bits().cast_signed();
    bits ^ (((bits >> 63).cast_unsigned()) >> 1).cast_signed()
}

/// Returns the worth of a key.
pub(crate) fn worth_of(key: i64) -> f64 {
    f64::from_bits((key ^ (((key >> 63).cast_unsigned()) >> 1).cast_signed()).cast_unsigned())
}

#[derive(Debug, Default)]
struct TierShare {
    candidates: BTreeSet<(i64, u32)>,
    /// Number of all blocks of the tenant in the tier.
    blocks: u32,
    visited_at: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct EvictionCandidates {
    shares: HashMap<TenantId, TierShare>,
    /// Weights of tenants with another weight than 1.
    weights: HashMap<TenantId, u32>,
    adapters: BTreeSet<(i64, u32)>,
}

impl EvictionCandidates {
    /// Sets the tenants' weights in the tier; all others have weight 1.
    pub(crate) fn weigh(&mut self, weights: HashMap<TenantId, u32>) {
        self.weights = weights;
    }

    pub(crate) fn add_block(&mut self, owner: TenantId, now: Duration) {
        let share = self.shares.entry(owner).or_default();
        share.blocks += 1;
        share.visited_at = now;
    }

    pub(crate) fn remove_block(&mut self, owner: TenantId) {
        let Some(share) = self.shares.get_mut(&owner) else { return };
        share.blocks -= 1;
        if share.blocks == 0 {
            self.shares.remove(&owner);
        }
    }

    /// Records a request of a tenant.
    pub(crate) fn visit(&mut self, owner: TenantId, now: Duration) {
        if let Some(share) = self.shares.get_mut(&owner) {
            share.visited_at = now;
        }
    }

    pub(crate) fn list(&mut self, owner: TenantId, key: i64, index: u32) {
        self.shares.entry(owner).or_default().candidates.insert((key, index));
    }

    pub(crate) fn unlist(&mut self, owner: TenantId, key: i64, index: u32) {
        if let Some(share) = self.shares.get_mut(&owner) {
            share.candidates.remove(&(key, index));
        }
    }

    pub(crate) fn list_adapter(&mut self, key: i64, index: u32) {
        self.adapters.insert((key, index));
    }

    pub(crate) fn unlist_adapter(&mut self, key: i64, index: u32) {
        self.adapters.remove(&(key, index));
    }

    pub(crate) fn first_adapter(&self) -> Option<(i64, u32)> {
        self.adapters.first().copied()
    }

    /// Returns the least valuable block of tenants that exceed their share of `total` blocks or were inactive
    /// for [`SHARE_MEMORY`]; if they have no candidate, the least valuable of all.
    pub(crate) fn first_block(&self, total: u32, now: Duration) -> Option<(i64, u32)> {
        let is_active = |share: &TierShare| share.visited_at + SHARE_MEMORY > now;
        let weight = |owner: &TenantId| u64::from(self.weights.get(owner).copied().unwrap_or(1));
        let active = self.shares.iter().filter(|(_, share)| is_active(share));
        let weights = active.map(|(owner, _)| weight(owner)).sum::<u64>().max(1);
        let first = |share: &TierShare| share.candidates.first().copied();
        let owes = |(owner, share): &(&TenantId, &TierShare)| {
            u64::from(share.blocks) > u64::from(total) * weight(owner) / weights || !is_active(share)
        };
        let owed = self.shares.iter().filter(owes).filter_map(|(_, share)| first(share)).min();
        owed.or_else(|| self.shares.values().filter_map(first).min())
    }

    pub(crate) fn by_owner(&self) -> impl Iterator<Item = (TenantId, u32)> + '_ {
        self.shares.iter().map(|(owner, share)| (*owner, share.blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOODER: TenantId = TenantId([1; 32]);
    const GUEST: TenantId = TenantId([2; 32]);

    #[test]
    fn keys_sort_as_their_numbers_and_give_them_back() {
        let numbers = [f64::NEG_INFINITY, -1e300, -2.5, -0.0, 0.0, 1e-300, 7.0, f64::INFINITY];
        assert!(numbers.map(key_of).is_sorted());
        assert!(numbers.iter().all(|&number| worth_of(key_of(number)).to_bits() == number.to_bits()));
    }

    #[test]
    fn who_has_more_than_a_share_gives_first_and_who_has_not_is_spared() {
        let (mut frontier, now) = (EvictionCandidates::default(), Duration::from_secs(1));
        for index in 0..10 {
            frontier.add_block(FLOODER, now);
            frontier.list(FLOODER, key_of(1000.0), index);
        }
        frontier.add_block(GUEST, now);
        frontier.list(GUEST, key_of(1.0), 10);
        assert_eq!(frontier.first_block(11, now), Some((key_of(1000.0), 0)));
        let all_fit = frontier.first_block(100, now);
        assert_eq!(all_fit, Some((key_of(1.0), 10)), "within the shares the least valuable goes first");
        frontier.weigh(HashMap::from([(FLOODER, 20)]));
        assert_eq!(frontier.first_block(11, now), Some((key_of(1.0), 10)), "10 of 11 are its part");
        let later = now + SHARE_MEMORY;
        assert_eq!(frontier.first_block(11, later), Some((key_of(1.0), 10)), "nobody keeps a share for ever");
    }
}
