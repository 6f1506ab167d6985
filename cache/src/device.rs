//! The device tier: which adapters have a place on the device, and which give theirs up.
//!
//! A ledger of bytes, without the bytes. An adapter has all of its place or none, from before its first piece is
//! copied; how much of it has arrived is for its owner to know. What is pinned stays; of the rest, the least
//! recently used goes first, and no more than must go.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
};

/// Whether there is a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement<K> {
    /// It had one already.
    AlreadyThere,
    /// It has one now.
    Placed {
        /// Those that gave theirs up for it, the least recently used first.
        evicted: Vec<K>,
    },
    /// What is pinned leaves too little room; nothing was evicted.
    NoRoom,
    /// It is larger than the whole tier.
    TooLarge,
}

/// What became of a wish to remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Its place is free.
    Removed {
        /// The size of the place.
        bytes: u64,
    },
    /// It is pinned and stays.
    Pinned,
    /// It had no place.
    Absent,
}

/// One place, for statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<K> {
    /// Whose it is.
    pub key: K,
    /// Its size.
    pub bytes: u64,
    /// How many hold it there.
    pub pins: u32,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    pins: u32,
    /// Of the last use: its key in `idle` while nobody pins it.
    used_at: u64,
}

/// See the module.
#[derive(Debug)]
pub struct DeviceTier<K> {
    entries: HashMap<K, Entry>,
    /// The unpinned, least recently used first.
    idle: BTreeMap<u64, K>,
    limit_bytes: u64,
    held_bytes: u64,
    pinned_bytes: u64,
    /// Counts uses.
    clock: u64,
}

impl<K: Copy + Eq + Hash> DeviceTier<K> {
    /// An empty tier of `limit_bytes`.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            entries: HashMap::new(),
            idle: BTreeMap::new(),
            limit_bytes,
            held_bytes: 0,
            pinned_bytes: 0,
            clock: 0,
        }
    }

    /// Gives `key` a place of `bytes`, unpinned, if it has none; a use of it in either case.
    pub fn place(&mut self, key: K, bytes: u64) -> Placement<K> {
        if self.touch(key) {
            return Placement::AlreadyThere;
        }
        if bytes > self.limit_bytes {
            return Placement::TooLarge;
        }
        if bytes > self.limit_bytes - self.pinned_bytes {
            return Placement::NoRoom;
        }
        let mut evicted = Vec::new();
        while bytes > self.limit_bytes - self.held_bytes {
            // There is one: without the unpinned there would be room.
            let Some((_, oldest)) = self.idle.first_key_value() else { break };
            evicted.push(*oldest);
            self.remove(*oldest);
        }
        self.held_bytes += bytes;
        let used_at = self.tick();
        self.entries.insert(key, Entry { bytes, pins: 0, used_at });
        self.idle.insert(used_at, key);
        Placement::Placed { evicted }
    }

    /// Keeps `key` in its place until [`unpin`](Self::unpin) was called as often; says whether it has one.
    #[must_use]
    pub fn pin(&mut self, key: K) -> bool {
        let used_at = self.tick();
        let Some(entry) = self.entries.get_mut(&key) else { return false };
        if entry.pins == 0 {
            self.idle.remove(&entry.used_at);
            self.pinned_bytes += entry.bytes;
        }
        entry.pins += 1;
        entry.used_at = used_at;
        true
    }

    /// Takes one pin back.
    ///
    /// # Panics
    /// If `key` is not pinned.
    pub fn unpin(&mut self, key: K) {
        let entry = self.entries.get_mut(&key).filter(|entry| entry.pins > 0);
        let Some(entry) = entry else { panic!("an adapter is unpinned more often than it was pinned") };
        entry.pins -= 1;
        if entry.pins == 0 {
            self.pinned_bytes -= entry.bytes;
            self.idle.insert(entry.used_at, key);
        }
    }

    /// Counts as a use of `key`; says whether it has a place.
    pub fn touch(&mut self, key: K) -> bool {
        let used_at = self.tick();
        let Some(entry) = self.entries.get_mut(&key) else { return false };
        if entry.pins == 0 {
            self.idle.remove(&entry.used_at);
            self.idle.insert(used_at, key);
        }
        entry.used_at = used_at;
        true
    }

    /// Takes the place of `key` away, unless it is pinned.
    pub fn remove(&mut self, key: K) -> Removal {
        let Some(entry) = self.entries.get(&key) else { return Removal::Absent };
        let Entry { bytes, pins, used_at } = *entry;
        if pins > 0 {
            return Removal::Pinned;
        }
        self.idle.remove(&used_at);
        self.entries.remove(&key);
        self.held_bytes -= bytes;
        Removal::Removed { bytes }
    }

    /// Whether `key` has a place.
    #[must_use]
    pub fn contains(&self, key: K) -> bool {
        self.entries.contains_key(&key)
    }

    /// Bytes of all places.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Bytes of the pinned places.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// Bytes there are.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// All places, in no order.
    pub fn iter(&self) -> impl Iterator<Item = Place<K>> + '_ {
        self.entries.iter().map(|(&key, entry)| Place { key, bytes: entry.bytes, pins: entry.pins })
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
