//! A cache that is isolated by tenant: shares and the total are bounded in bytes.
//!
//! A lookup of one tenant never reveals whether another tenant asked for the same key. One tenant's entries
//! never evict another's within its share, unless the total is exceeded: then the largest share is evicted
//! from.

use std::collections::{HashMap, VecDeque};

use types::TenantId;

/// Memory limits of a cache that tenants share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// Maximum bytes of one tenant's entries.
    pub tenant_bytes: usize,
    /// Maximum bytes of all tenants' entries together.
    pub total_bytes: usize,
}

/// Cache with a byte-limited share for each tenant.
#[derive(Debug)]
pub struct TenantCache<K, V> {
    limits: CacheLimits,
    shares: HashMap<TenantId, Share<K, V>>,
    used: usize,
}

#[derive(Debug)]
struct Share<K, V> {
    /// Entries from least to most recently used.
    entries: VecDeque<Entry<K, V>>,
    used: usize,
}

#[derive(Debug)]
struct Entry<K, V> {
    key: K,
    value: V,
    bytes: usize,
}

impl<K: PartialEq, V> TenantCache<K, V> {
    /// Creates an empty cache with these limits.
    #[must_use]
    pub fn new(limits: CacheLimits) -> Self {
        Self { limits, shares: HashMap::new(), used: 0 }
    }

    /// Returns the value of `tenant` for `key`, and marks it as recently used.
    pub fn get(&mut self, tenant: TenantId, is_key: impl Fn(&K) -> bool) -> Option<&V> {
        let entries = &mut self.shares.get_mut(&tenant)?.entries;
        let index = entries.iter().position(|entry| is_key(&entry.key))?;
        let entry = entries.remove(index)?;
        entries.push_back(entry);
        entries.back().map(|entry| &entry.value)
    }

    /// Stores `value` of `bytes` for `tenant` under `key`, and evicts least recently used entries. A value
    /// larger than a tenant's share is not stored.
    pub fn insert(&mut self, tenant: TenantId, key: K, value: V, bytes: usize) {
        self.remove(tenant, |known| *known == key);
        if bytes > self.limits.tenant_bytes.min(self.limits.total_bytes) {
            return;
        }
        let used = |cache: &Self| cache.shares.get(&tenant).map_or(0, |share| share.used);
        while used(self) + bytes > self.limits.tenant_bytes {
            self.drop_oldest_of(tenant);
        }
        while self.used + bytes > self.limits.total_bytes {
            let Some(largest) = self.largest() else { break };
            self.drop_oldest_of(largest);
        }
        let share = self.shares.entry(tenant).or_insert(Share { entries: VecDeque::new(), used: 0 });
        share.entries.push_back(Entry { key, value, bytes });
        share.used += bytes;
        self.used += bytes;
    }

    /// Drops the value of `tenant` for `key`.
    pub fn remove(&mut self, tenant: TenantId, is_key: impl Fn(&K) -> bool) {
        let Some(share) = self.shares.get(&tenant) else { return };
        if let Some(index) = share.entries.iter().position(|entry| is_key(&entry.key)) {
            self.drop_entry(tenant, index);
        }
    }

    /// Returns the bytes of all entries of all tenants.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }

    fn largest(&self) -> Option<TenantId> {
        self.shares.iter().max_by_key(|(_, share)| share.used).map(|(tenant, _)| *tenant)
    }

    fn drop_oldest_of(&mut self, tenant: TenantId) {
        self.drop_entry(tenant, 0);
    }

    fn drop_entry(&mut self, tenant: TenantId, index: usize) {
        let Some(share) = self.shares.get_mut(&tenant) else { return };
        if let Some(entry) = share.entries.remove(index) {
            share.used -= entry.bytes;
            self.used -= entry.bytes;
        }
        if share.entries.is_empty() {
            self.shares.remove(&tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: CacheLimits = CacheLimits { tenant_bytes: 10, total_bytes: 25 };

    fn tenant(number: u8) -> TenantId {
        TenantId([number; 32])
    }

    fn has(cache: &mut TenantCache<u32, ()>, of: u8, key: u32) -> bool {
        cache.get(tenant(of), |known| *known == key).is_some()
    }

    #[test]
    fn what_one_tenant_keeps_is_unknown_to_the_others() {
        let mut cache = TenantCache::new(LIMITS);
        cache.insert(tenant(1), 7, (), 5);
        assert!(has(&mut cache, 1, 7));
        assert!(!has(&mut cache, 2, 7));
    }

    #[test]
    fn a_tenant_that_keeps_more_than_its_share_loses_what_it_used_longest_ago() {
        let mut cache = TenantCache::new(LIMITS);
        cache.insert(tenant(2), 1, (), 10);
        for key in 0..3 {
            cache.insert(tenant(1), key, (), 4);
            assert!(has(&mut cache, 1, 0) || key == 2, "what is used stays");
        }
        let kept: Vec<bool> = (0..3).map(|key| has(&mut cache, 1, key)).collect();
        assert_eq!(kept.iter().filter(|kept| **kept).count(), 2);
        assert!(has(&mut cache, 2, 1), "another tenant's share is its own");
    }

    #[test]
    fn the_largest_share_gives_way_where_all_together_are_full() {
        let mut cache = TenantCache::new(LIMITS);
        cache.insert(tenant(1), 1, (), 10);
        cache.insert(tenant(2), 1, (), 9);
        cache.insert(tenant(3), 1, (), 8);
        assert!(!has(&mut cache, 1, 1));
        assert!(has(&mut cache, 2, 1) && has(&mut cache, 3, 1));
        assert_eq!(cache.used(), 17);
    }

    #[test]
    fn a_value_that_no_share_could_hold_is_not_kept_and_throws_nothing_out() {
        let mut cache = TenantCache::new(LIMITS);
        cache.insert(tenant(1), 1, (), 10);
        cache.insert(tenant(1), 2, (), 11);
        assert!(has(&mut cache, 1, 1) && !has(&mut cache, 1, 2));
        assert_eq!(cache.used(), 10);
    }

    #[test]
    fn a_value_that_is_kept_again_is_counted_once() {
        let mut cache = TenantCache::new(LIMITS);
        cache.insert(tenant(1), 1, (), 4);
        cache.insert(tenant(1), 1, (), 6);
        assert_eq!(cache.used(), 6);
        cache.remove(tenant(1), |known| *known == 1);
        assert_eq!((cache.used(), cache.shares.len()), (0, 0));
    }
}
