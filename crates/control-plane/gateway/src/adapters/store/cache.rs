//! Cache of a bucket on this host. Contents that exceed the budget are evicted, least recently used first;
//! held contents and those of pinned adapters stay.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::{Arc, Mutex},
};

use super::content::ContentId;
use crate::lock::{KeyedLocks, lock};

#[derive(Debug)]
pub(super) struct Cache {
    budget_bytes: u64,
    state: Mutex<CacheState>,
    /// A task that fetches a content holds its lock; other tasks that need the content wait.
    pub(super) arriving: KeyedLocks<ContentId>,
}

#[derive(Debug, Default)]
struct CacheState {
    contents: HashMap<ContentId, Cached>,
    /// Number of holds by content, even if the content was removed since; no value is zero.
    holders: HashMap<ContentId, usize>,
    /// Logical time, which counts uses.
    now: u64,
}

#[derive(Debug)]
struct Cached {
    bytes: u64,
    used: u64,
}

/// Keeps the files of one content id in this host's cache; dropping the hold allows their removal.
#[derive(Debug)]
pub(crate) struct CacheHold(Option<(Arc<Cache>, ContentId)>);

impl CacheHold {
    /// Returns a hold of a store that is not a cache; such a store never evicts.
    pub(super) fn by_nobody() -> Self {
        Self(None)
    }

    /// True if the held content can be fetched from the bucket again.
    pub(crate) fn is_of_bucket(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for CacheHold {
    fn drop(&mut self) {
        if let Some((cache, content)) = &self.0
            && let Entry::Occupied(mut holders) = lock(&cache.state).holders.entry(*content)
        {
            *holders.get_mut() -= 1;
            if *holders.get() == 0 {
                holders.remove();
            }
        }
    }
}

impl Cache {
    /// Creates a cache that contains `found`, least recently used first.
    pub(super) fn new(budget_bytes: u64, found: impl IntoIterator<Item = (ContentId, u64)>) -> Self {
        let cache = Self { budget_bytes, state: Mutex::default(), arriving: KeyedLocks::default() };
        for (content, bytes) in found {
            lock(&cache.state).add(content, bytes);
        }
        cache
    }

    /// Adds and holds a content, so that it is not evicted before its first use.
    pub(super) fn admit(self: &Arc<Self>, content: ContentId, bytes: u64) -> CacheHold {
        let mut state = lock(&self.state);
        state.add(content, bytes);
        *state.holders.entry(content).or_default() += 1;
        CacheHold(Some((Arc::clone(self), content)))
    }

    pub(super) fn forget(&self, content: ContentId) {
        lock(&self.state).contents.remove(&content);
    }

    /// Holds a content, if it is cached.
    pub(super) fn acquire(self: &Arc<Self>, content: ContentId) -> Option<CacheHold> {
        let mut state = lock(&self.state);
        state.now += 1;
        let used = state.now;
        state.contents.get_mut(&content)?.used = used;
        *state.holders.entry(content).or_default() += 1;
        Some(CacheHold(Some((Arc::clone(self), content))))
    }

    pub(super) fn bytes(&self) -> u64 {
        lock(&self.state).bytes()
    }

    /// Evicts contents until the rest fits the budget. `take` removes each one's files while the lock
    /// prevents new holds. Returns the number of evicted contents.
    pub(super) fn evict(&self, keep: &HashSet<ContentId>, mut take: impl FnMut(ContentId)) -> usize {
        let mut state = lock(&self.state);
        let mut evicted = 0;
        while state.bytes() > self.budget_bytes {
            let is_free = |id: &ContentId| !state.holders.contains_key(id) && !keep.contains(id);
            let free = state.contents.iter().filter(|(id, _)| is_free(id));
            let Some(oldest) = free.min_by_key(|(_, one)| one.used).map(|(id, _)| *id) else { break };
            state.contents.remove(&oldest);
            take(oldest);
            evicted += 1;
        }
        evicted
    }
}

impl CacheState {
    fn add(&mut self, content: ContentId, bytes: u64) {
        self.now += 1;
        let used = self.now;
        self.contents.entry(content).or_insert(Cached { bytes, used }).used = used;
    }

    fn bytes(&self) -> u64 {
        self.contents.values().map(|cached| cached.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> ContentId {
        ContentId([number; 32])
    }

    fn evicted(cache: &Cache, keep: &[u8]) -> Vec<u8> {
        let mut gone = Vec::new();
        cache.evict(&keep.iter().map(|number| id(*number)).collect(), |content| gone.push(content.0[0]));
        gone
    }

    #[test]
    fn what_was_used_least_recently_goes_first_and_what_is_held_or_kept_stays() {
        let cache = Arc::new(Cache::new(30, [(id(1), 10), (id(2), 10), (id(3), 10)]));
        assert_eq!(evicted(&cache, &[]), [0; 0]);
        drop(cache.acquire(id(1)));
        lock(&cache.state).add(id(4), 10);
        assert_eq!(evicted(&cache, &[]), [2]);
        let held = cache.acquire(id(3)).unwrap();
        lock(&cache.state).add(id(5), 20);
        assert_eq!(evicted(&cache, &[1]), [4, 5], "what was just brought may go too, if nobody holds it");
        cache.forget(id(3));
        lock(&cache.state).add(id(3), 10);
        assert_eq!(evicted(&cache, &[1, 5]), [0; 0], "who holds what came again still holds it");
        drop(held);
        lock(&cache.state).add(id(6), 30);
        assert_eq!(evicted(&cache, &[6]), [1, 3]);
        assert!(cache.acquire(id(1)).is_none() && cache.acquire(id(6)).is_some());
        assert_eq!(cache.bytes(), 30);
        let held = cache.admit(id(7), 40);
        assert_eq!(evicted(&cache, &[]), [6], "what comes is held before anybody can make room of it");
        drop(held);
        assert_eq!(evicted(&cache, &[]), [7]);
    }
}
