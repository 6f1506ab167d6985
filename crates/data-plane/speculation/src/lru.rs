//! A bounded table of statistics of the most recent adapters and clients.
//!
//! The acceptance of draft tokens depends on the adapter, which the drafter does not have, and on the client.
//! The numbers of adapters and clients are not bounded, so a server keeps a bounded number of entries.

use std::{collections::HashMap, hash::Hash};

/// A bounded table that evicts the least recently used entry when it is full.
#[derive(Debug, Clone)]
pub struct LruTable<K, V> {
    entries: HashMap<K, (u64, V)>,
    max_entries: usize,
    asked: u64,
}

impl<K: Hash + Eq + Clone, V: Default> LruTable<K, V> {
    /// Creates a table of at most `max_entries` entries, at least one.
    #[must_use]
    pub fn new(max_entries: usize) -> Self {
        Self { entries: HashMap::new(), max_entries: max_entries.max(1), asked: 0 }
    }

    /// Returns the entry of `key`, which is the default value if the table has none.
    pub fn of(&mut self, key: &K) -> &mut V {
        self.asked += 1;
        if self.entries.len() >= self.max_entries && !self.entries.contains_key(key) {
            // A new key in a full table is rare, so a scan costs less than an order that is always kept.
            let oldest = self.entries.iter().min_by_key(|(_, (asked, _))| *asked).map(|(key, _)| key.clone());
            oldest.map(|key| self.entries.remove(&key));
        }
        let (asked, value) = self.entries.entry(key.clone()).or_default();
        *asked = self.asked;
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_asked_for_longest_ago_is_forgotten_first() {
        let mut recent = LruTable::new(2);
        *recent.of(&'a') = 1;
        *recent.of(&'b') = 2;
        assert_eq!(*recent.of(&'a'), 1);
        *recent.of(&'c') = 3;
        assert_eq!((*recent.of(&'a'), *recent.of(&'c')), (1, 3));
        assert_eq!(*recent.of(&'b'), 0);
    }
}
