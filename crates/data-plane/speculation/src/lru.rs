//! What was learned about those who came last.
//!
//! How far a draft is to be trusted depends on whose text it drafts: the adapter, which the draft does not have, and the client
//! (CHECKLIST D4.11). There may be any number of them, and a server keeps a bounded number in mind.

use std::{collections::HashMap, hash::Hash};

/// A bounded table. Where it is full, whoever was asked for longest ago is forgotten.
#[derive(Debug, Clone)]
pub struct LruTable<K, V> {
    entries: HashMap<K, (u64, V)>,
    max_entries: usize,
    asked: u64,
}

impl<K: Hash + Eq + Clone, V: Default> LruTable<K, V> {
    /// Room for so many, at least one.
    #[must_use]
    pub fn new(max_entries: usize) -> Self {
        Self { entries: HashMap::new(), max_entries: max_entries.max(1), asked: 0 }
    }

    /// What is known of `key`: where that is nothing, what is known of nobody.
    pub fn of(&mut self, key: &K) -> &mut V {
        self.asked += 1;
        if self.entries.len() >= self.max_entries && !self.entries.contains_key(key) {
            // Seldom: a key that is new to a full table. Looking through all of them then is cheaper than an order kept always.
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
