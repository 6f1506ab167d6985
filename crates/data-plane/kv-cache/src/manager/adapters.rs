//! Blocks of adapters in the pool.

use std::collections::HashMap;

use types::{AdapterId, BlockId};

use super::{AdapterUnit, Cache, CacheSettings};
use crate::{
    eviction_candidates::key_of,
    tier::{Tier, TierSlot},
};

/// Result of placing an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlacementOutcome {
    /// The adapter already had all its blocks.
    AlreadyThere,
    /// The adapter has all or more of its blocks; others may be evicted ([`Cache::take_evicted_adapters`]).
    Placed,
    /// Pinned adapters and running sequences leave too little capacity; nothing was evicted.
    NoRoom,
    /// The adapter exceeds the limit of all adapters together.
    TooLarge,
}

/// Result of removing an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoveOutcome {
    /// The adapter's blocks are free.
    Removed,
    /// The adapter is pinned and stays.
    Pinned,
    /// The adapter had no blocks.
    Absent,
}

#[derive(Debug, Default)]
struct AdapterBlocks {
    /// Blocks in the order in which they are filled.
    blocks: Vec<BlockId>,
    /// Number of blocks of the complete adapter.
    wanted: usize,
    pins: u32,
}

#[derive(Debug, Default)]
pub(super) struct Adapters {
    homes: HashMap<AdapterId, AdapterBlocks>,
    blocks: usize,
    pinned_blocks: usize,
    /// Evicted adapters that were not yet reported.
    evicted: Vec<AdapterId>,
    /// Adapters that lost some blocks, not yet reported.
    shrunk: Vec<AdapterId>,
}

impl Adapters {
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of unpinned blocks.
    pub(super) fn idle_blocks(&self) -> usize {
        self.blocks - self.pinned_blocks
    }

    pub(super) fn placed(&self) -> usize {
        self.homes.len()
    }

    pub(super) fn knows(&self, adapter: Option<AdapterId>) -> bool {
        adapter.is_some_and(|adapter| self.homes.contains_key(&adapter))
    }

    pub(super) fn blocks_of(&self, adapter: Option<AdapterId>) -> u32 {
        let home = adapter.and_then(|adapter| self.homes.get(&adapter));
        home.map_or(0, |home| u32::try_from(home.blocks.len()).unwrap_or(u32::MAX))
    }

    fn extend(&mut self, id: AdapterId, wanted: usize, blocks: Vec<BlockId>) {
        let home = self.homes.entry(id).or_default();
        self.blocks += blocks.len();
        if home.pins > 0 {
            self.pinned_blocks += blocks.len();
        }
        home.wanted = wanted;
        home.blocks.extend(blocks);
    }

    /// Takes the last block of an unpinned adapter.
    fn shrink(&mut self, id: AdapterId) -> Option<BlockId> {
        let block = self.homes.get_mut(&id)?.blocks.pop()?;
        self.blocks -= 1;
        self.shrunk.push(id);
        Some(block)
    }
}

impl CacheSettings {
    /// Divides the device between adapters and KV blocks as the policy requires, unless already divided.
    #[must_use]
    pub fn divided(self) -> Self {
        let is_divided = self.max_kv_blocks.saturating_add(self.max_adapter_blocks) <= self.device;
        match self.variant.policy(self.tau).rules().adapter_share {
            Some(share) if !is_divided => {
                let adapters = (f64::from(self.device) * share) as u32;
                Self { max_adapter_blocks: adapters, max_kv_blocks: self.device - adapters, ..self }
            }
            _ => self,
        }
    }
}

impl Cache {
    /// Allocates `blocks` blocks for an adapter, unpinned, or the ones that it lacks. If parts of adapters
    /// are useful, the adapter may get fewer ([`Cache::adapter_blocks`]).
    pub fn place_adapter(&mut self, id: AdapterId, blocks: u32) -> PlacementOutcome {
        let wanted = blocks as usize;
        let has = self.adapters.homes.get(&id).map(|home| home.blocks.len());
        if has.is_some_and(|has| has >= wanted) {
            return PlacementOutcome::AlreadyThere;
        }
        if wanted > self.settings.max_adapter_blocks as usize {
            return PlacementOutcome::TooLarge;
        }
        // The pin keeps the adapter's own blocks from being evicted for its rest.
        let is_pinned = self.pin_adapter(id);
        let place = self.extend_adapter(id, wanted, has.unwrap_or(0));
        if is_pinned {
            self.unpin_adapter(id);
        }
        place
    }

    fn extend_adapter(&mut self, id: AdapterId, wanted: usize, has: usize) -> PlacementOutcome {
        let (counts, limit) = (self.counts(), self.settings.max_adapter_blocks as usize);
        let idle = counts.free + counts.cached + self.adapters.idle_blocks();
        let available = idle.min(limit - self.adapters.pinned_blocks);
        let missing = match self.settings.adapter_unit {
            AdapterUnit::Whole => wanted - has,
            AdapterUnit::Block { .. } => (wanted - has).min(available.max(1)),
        };
        if missing > available {
            return PlacementOutcome::NoRoom;
        }
        while self.adapters.blocks + missing > limit {
            if self.evict_idle_adapter().is_none() {
                return PlacementOutcome::NoRoom;
            }
        }
        while self.pool.counts().free < missing {
            if self.evict_any().is_none() {
                return PlacementOutcome::NoRoom;
            }
        }
        let blocks: Vec<BlockId> = (0..missing).map_while(|_| self.pool.allocate()).collect();
        self.adapters.extend(id, wanted, blocks);
        let index = self.tree.adapter_or_new(Some(id));
        self.set_place(index, Tier::Device, TierSlot::Here(0));
        self.visit(index);
        PlacementOutcome::Placed
    }

    /// Evicts the least valuable unpinned adapter after its dependent blocks, or one of its blocks if the
    /// rest stays useful. Evicting KV blocks of others would not free capacity of the adapters' limit.
    fn evict_idle_adapter(&mut self) -> Option<()> {
        let idle = self.adapters.homes.iter().filter(|(_, home)| home.pins == 0);
        let roots = idle.filter_map(|(id, _)| self.tree.adapter(Some(*id)));
        let least = roots.map(|index| (key_of(self.worth(index, Tier::Device)), index)).min()?.1;
        if !self.can_shrink(least) {
            let below: Vec<u32> = self.tree.subtree(least).into_iter().skip(1).collect();
            for index in below.into_iter().rev() {
                if self.may_leave(index, Tier::Device) {
                    self.evict(index, Tier::Device);
                }
            }
        }
        self.evict_adapter(least);
        Some(())
    }

    /// Returns how many blocks an adapter may get without evicting another: free ones; free and cached ones.
    #[must_use]
    pub fn free_adapter_blocks(&self) -> [usize; 2] {
        let left = (self.settings.max_adapter_blocks as usize).saturating_sub(self.adapters.blocks);
        let counts = self.counts();
        [counts.free, counts.free + counts.cached].map(|blocks| blocks.min(left))
    }

    /// Returns the maximum number of blocks of all adapters together.
    #[must_use]
    pub fn max_adapter_blocks(&self) -> u32 {
        self.settings.max_adapter_blocks
    }

    /// Pins an adapter until an equal number of calls of [`unpin_adapter`](Self::unpin_adapter); returns
    /// whether it has blocks. Every sequence of an adapter with blocks pins it, even one that began before.
    #[must_use]
    pub fn pin_adapter(&mut self, id: AdapterId) -> bool {
        let Some(home) = self.adapters.homes.get_mut(&id) else { return false };
        if home.pins == 0 {
            self.adapters.pinned_blocks += home.blocks.len();
        }
        home.pins += 1;
        self.set_adapter_held(id, true);
        true
    }

    /// Removes one pin of an adapter.
    ///
    /// # Panics
    /// Panics if the adapter is not pinned.
    pub fn unpin_adapter(&mut self, id: AdapterId) {
        let home = self.adapters.homes.get_mut(&id).filter(|home| home.pins > 0);
        let Some(home) = home else { panic!("an adapter is unpinned more often than it was pinned") };
        home.pins -= 1;
        if home.pins == 0 {
            self.adapters.pinned_blocks -= home.blocks.len();
            self.set_adapter_held(id, false);
        }
    }

    /// Frees an adapter's blocks, and removes the KV blocks that depend on it, unless it is pinned.
    pub fn remove_adapter_place(&mut self, id: AdapterId) -> RemoveOutcome {
        match self.adapters.homes.get(&id) {
            None => return RemoveOutcome::Absent,
            Some(home) if home.pins > 0 => return RemoveOutcome::Pinned,
            Some(_) => {}
        }
        self.remove_adapter(id);
        self.vacate(id);
        RemoveOutcome::Removed
    }

    /// Whether an adapter has any blocks.
    #[must_use]
    pub fn has_adapter_place(&self, id: AdapterId) -> bool {
        self.adapters.homes.contains_key(&id)
    }

    fn has_whole_place(&self, id: AdapterId) -> bool {
        self.adapters.homes.get(&id).is_some_and(|home| home.blocks.len() >= home.wanted)
    }

    /// Returns the most requested adapter that lacks blocks and fits into free ones, while the device is
    /// idle. The caller may place this adapter before a request waits (E-07). `blocks` gives an adapter's
    /// size; `None` excludes it.
    #[must_use]
    pub fn wanted_adapter(&self, blocks: impl Fn(AdapterId) -> Option<u32>) -> Option<AdapterId> {
        if self.settings.max_adapter_blocks == 0 || !self.is_idle() {
            return None;
        }
        let [free, _] = self.free_adapter_blocks();
        let lacks = |id, blocks: u32| (blocks as usize).saturating_sub(self.adapter_blocks(id).len());
        let fits = |id| blocks(id).is_some_and(|blocks| lacks(id, blocks) <= free);
        self.usage.favourite(|id| !self.has_whole_place(id) && fits(id))
    }

    /// Returns the adapters that were evicted since the last call.
    pub fn take_evicted_adapters(&mut self) -> Vec<AdapterId> {
        std::mem::take(&mut self.adapters.evicted)
    }

    /// Returns the adapters that lost some blocks since the last call; some may have been evicted since.
    pub fn take_shrunk_adapters(&mut self) -> Vec<AdapterId> {
        std::mem::take(&mut self.adapters.shrunk)
    }

    /// Returns the blocks of an adapter, in the order in which they are filled; empty without any.
    #[must_use]
    pub fn adapter_blocks(&self, id: AdapterId) -> &[BlockId] {
        self.adapters.homes.get(&id).map_or(&[], |home| &home.blocks)
    }

    /// Evicts an adapter on which no block depends, or one of its blocks.
    pub(super) fn evict_adapter(&mut self, index: u32) {
        let Some(id) = self.tree.adapter_of(index) else { return };
        if self.can_shrink(index) {
            self.statistics.shed_adapter_blocks += 1;
            self.adapters.shrink(id).into_iter().for_each(|block| _ = self.pool.release(block));
            return self.relist(index);
        }
        self.statistics.evicted_adapters += 1;
        self.adapters.evicted.push(id);
        self.vacate(id);
    }

    /// Whether the node is an adapter that stays useful with one block less.
    pub(super) fn can_shrink(&self, index: u32) -> bool {
        let adapter = self.tree.node(index).adapter().flatten();
        self.settings.adapter_unit != AdapterUnit::Whole && self.adapters.blocks_of(adapter) > 1
    }

    fn vacate(&mut self, id: AdapterId) {
        let Some(home) = self.adapters.homes.remove(&id) else { return };
        self.adapters.blocks -= home.blocks.len();
        for block in home.blocks {
            self.pool.release(block);
        }
        if let Some(index) = self.tree.adapter(Some(id)) {
            self.set_place(index, Tier::Device, TierSlot::None);
            self.drop_if_nowhere(index);
        }
    }

    fn set_adapter_held(&mut self, id: AdapterId, is_held: bool) {
        if let Some(index) = self.tree.adapter(Some(id)) {
            let now = self.now;
            let node = self.tree.node_mut(index);
            node.is_held = is_held;
            node.set_last_use(now);
            self.relist(index);
        }
    }
}
