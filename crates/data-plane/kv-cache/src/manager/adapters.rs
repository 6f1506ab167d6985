//! Places of adapters in the pool.

use std::collections::HashMap;

use types::{AdapterId, BlockId};

use super::{AdapterUnit, Cache, CacheSettings};
use crate::{
    eviction_candidates::key_of,
    tier::{Tier, TierSlot},
};

/// Whether there is a place for an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlacementOutcome {
    /// It had one already, for all of it.
    AlreadyThere,
    /// It has one now, or a larger one; others may have given up theirs ([`Cache::take_evicted_adapters`]).
    Placed,
    /// What is in use leaves too little room; nothing was evicted.
    NoRoom,
    /// It is larger than what adapters may have.
    TooLarge,
}

/// What became of a wish to remove an adapter's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoveOutcome {
    /// Its place is free.
    Removed,
    /// It is pinned and stays.
    Pinned,
    /// It had no place.
    Absent,
}

/// The place of one adapter.
#[derive(Debug, Default)]
struct AdapterBlocks {
    /// In the order in which they are filled.
    blocks: Vec<BlockId>,
    /// Blocks that all of it takes.
    wanted: usize,
    pins: u32,
}

/// All places of adapters.
#[derive(Debug, Default)]
pub(super) struct Adapters {
    homes: HashMap<AdapterId, AdapterBlocks>,
    blocks: usize,
    pinned_blocks: usize,
    /// Those that gave way and have not been told of.
    evicted: Vec<AdapterId>,
    /// Those that gave up part of their place and have not been told of.
    shrunk: Vec<AdapterId>,
}

impl Adapters {
    /// Blocks of all places.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Blocks that nobody pins.
    pub(super) fn idle_blocks(&self) -> usize {
        self.blocks - self.pinned_blocks
    }

    /// Adapters that have a place.
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

    /// Takes the last block of one that nobody pins.
    fn shrink(&mut self, id: AdapterId) -> Option<BlockId> {
        let block = self.homes.get_mut(&id)?.blocks.pop()?;
        self.blocks -= 1;
        self.shrunk.push(id);
        Some(block)
    }
}

impl CacheSettings {
    /// With the device divided as the policy wants it, unless its owner has divided it already.
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
    /// Gives an adapter a place of `blocks` blocks, unpinned, if it has none; where part of one is of use, what it lacks of
    /// them, or as many as there is room for ([`Cache::adapter_blocks`]).
    pub fn place_adapter(&mut self, id: AdapterId, blocks: u32) -> PlacementOutcome {
        let wanted = blocks as usize;
        let has = self.adapters.homes.get(&id).map(|home| home.blocks.len());
        if has.is_some_and(|has| has >= wanted) {
            return PlacementOutcome::AlreadyThere;
        }
        if wanted > self.settings.max_adapter_blocks as usize {
            return PlacementOutcome::TooLarge;
        }
        // What it has is no room for the rest of it.
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
        let room = idle.min(limit - self.adapters.pinned_blocks);
        let missing = match self.settings.adapter_unit {
            AdapterUnit::Whole => wanted - has,
            AdapterUnit::Block { .. } => (wanted - has).min(room.max(1)),
        };
        if missing > room {
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

    /// The least valuable adapter that nobody pins gives up its place, and before it what depends on it, or a block that it can do
    /// without: keys and values of others would make no room for adapters.
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

    /// Blocks that an adapter may be given without another giving up its place: those that are free, and those of history.
    #[must_use]
    pub fn room_for_adapter(&self) -> [usize; 2] {
        let left = (self.settings.max_adapter_blocks as usize).saturating_sub(self.adapters.blocks);
        let counts = self.counts();
        [counts.free, counts.free + counts.cached].map(|blocks| blocks.min(left))
    }

    /// Blocks that adapters may have.
    #[must_use]
    pub fn max_adapter_blocks(&self) -> u32 {
        self.settings.max_adapter_blocks
    }

    /// Keeps an adapter in its place until [`unpin_adapter`](Self::unpin_adapter) was called as often; says whether it has one.
    /// Every sequence of an adapter that has a place pins it, also one that began before it had.
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

    /// Takes one pin back.
    ///
    /// # Panics
    /// If the adapter is not pinned.
    pub fn unpin_adapter(&mut self, id: AdapterId) {
        let home = self.adapters.homes.get_mut(&id).filter(|home| home.pins > 0);
        let Some(home) = home else { panic!("an adapter is unpinned more often than it was pinned") };
        home.pins -= 1;
        if home.pins == 0 {
            self.adapters.pinned_blocks -= home.blocks.len();
            self.set_adapter_held(id, false);
        }
    }

    /// Takes an adapter's place away, and what depends on it, unless it is pinned.
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

    /// Whether an adapter has a place, if not for all of it.
    #[must_use]
    pub fn has_adapter_place(&self, id: AdapterId) -> bool {
        self.adapters.homes.contains_key(&id)
    }

    fn has_whole_place(&self, id: AdapterId) -> bool {
        self.adapters.homes.get(&id).is_some_and(|home| home.blocks.len() >= home.wanted)
    }

    /// The adapter that is asked for most of those without a place whose `blocks` are free, as long as the device is idle: its
    /// owner may place it, or the rest of it, before somebody waits for it (E-07). One that needs no place, or cannot have one, has none of them.
    #[must_use]
    pub fn wanted_adapter(&self, blocks: impl Fn(AdapterId) -> Option<u32>) -> Option<AdapterId> {
        if self.settings.max_adapter_blocks == 0 || !self.is_idle() {
            return None;
        }
        let [free, _] = self.room_for_adapter();
        let lacks = |id, blocks: u32| (blocks as usize).saturating_sub(self.adapter_blocks(id).len());
        let fits = |id| blocks(id).is_some_and(|blocks| lacks(id, blocks) <= free);
        self.usage.favourite(|id| !self.has_whole_place(id) && fits(id))
    }

    /// Adapters that gave up their places since this was last asked.
    pub fn take_evicted_adapters(&mut self) -> Vec<AdapterId> {
        std::mem::take(&mut self.adapters.evicted)
    }

    /// Adapters that gave up part of their places since this was last asked; some may have given up the rest, too.
    pub fn take_shrunk_adapters(&mut self) -> Vec<AdapterId> {
        std::mem::take(&mut self.adapters.shrunk)
    }

    /// The blocks of an adapter's place, in the order in which they are filled; none without one.
    #[must_use]
    pub fn adapter_blocks(&self, id: AdapterId) -> &[BlockId] {
        self.adapters.homes.get(&id).map_or(&[], |home| &home.blocks)
    }

    /// An adapter gives up its place, on which nothing depends, or a block of it.
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

    /// It is an adapter that is of use with a block less.
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
