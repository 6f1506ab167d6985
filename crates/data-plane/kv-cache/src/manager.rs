//! Cache manager: one block pool for KV blocks and adapters, and the lower tiers (E-01).
//!
//! This module only decides. The owner of the bytes copies them: it takes copies from a queue
//! ([`Cache::take_copies`]) and reports their results ([`Cache::copied_in`], [`Cache::copied_out`]). So an
//! engine and a simulator run the same code.
//!
//! # Layout
//!
//! - here: the requests of a sequence.
//! - `adapters`: blocks of adapters in the pool.
//! - `events`: events of blocks, for observers.
//! - `eviction`: evicts blocks and adapters when a tier lacks capacity.
//! - `invariants`: checks the invariants.
//! - `settings`: sizes, limits and policy of a cache.
//! - `swap`: copies between tiers, and blocks from an earlier process.
//!
//! # Invariants
//!
//! - At any time every block is in exactly one state: free, used (a sequence holds it), cached (only the tree
//!   knows it) or held by an adapter.
//! - For every block of the tree on the device, its dependencies are on the device too: the earlier blocks,
//!   and its adapter unless that is computed elsewhere (E-05).

mod adapters;
mod events;
mod eviction;
mod invariants;
mod settings;
mod swap;

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::Duration,
};

use types::{AdapterId, BlockId};

pub use self::{
    adapters::{PlacementOutcome, RemoveOutcome},
    invariants::InvariantViolation,
    settings::{AdapterUnit, CacheSettings},
    swap::{CopyOutcome, RestoredBlocks, TierCopy},
};
use crate::{
    block_events::EventRecorder,
    eviction_candidates::EvictionCandidates,
    pool::{BlockPool, Released},
    replacement::{AdapterDemand, AdapterUsage, ReplacementPolicy},
    tier::{FreeSlots, Tier, TierSlot},
    tree::{Cursor, DependencyTree, NodeId},
};

/// States of the device's blocks; `free + used + cached + adapters = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Number of blocks in the pool.
    pub total: usize,
    /// Number of blocks that hold nothing.
    pub free: usize,
    /// Number of KV blocks that at least one sequence holds.
    pub used: usize,
    /// Number of KV blocks that only the tree knows.
    pub cached: usize,
    /// Number of blocks that adapters hold.
    pub adapters: usize,
}

/// Prefix found on the device. The caller of the lookup holds its blocks.
#[derive(Debug)]
pub struct Prefix {
    /// Full blocks of the prefix, in order.
    pub blocks: Vec<BlockId>,
    /// End of the prefix, where further blocks are added.
    pub cursor: Cursor,
}

/// Counters since the creation of the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Number of prefix lookups.
    pub lookups: u64,
    /// Number of blocks that lookups found on the device.
    pub found_blocks: u64,
    /// Number of blocks fetched from a lower tier for a request, by tier.
    pub fetched_blocks: [u64; Tier::ALL.len()],
    /// Number of blocks prefetched before a request needed them.
    pub prefetched_blocks: u64,
    /// Number of blocks inserted into the tree.
    pub inserted_blocks: u64,
    /// Number of blocks evicted from the device.
    pub evicted_blocks: u64,
    /// Number of evicted blocks for which no lower tier had capacity.
    pub lost_blocks: u64,
    /// Number of blocks copied to lower tiers.
    pub spilled_blocks: u64,
    /// Number of failed copies from and to lower tiers.
    pub failed_copies: u64,
    /// Number of adapters evicted from the device.
    pub evicted_adapters: u64,
    /// Number of blocks evicted from adapters that stayed on the device ([`AdapterUnit::Block`]).
    pub shed_adapter_blocks: u64,
}

/// Cache manager; the module describes its invariants.
#[derive(Debug)]
pub struct Cache {
    settings: CacheSettings,
    pool: BlockPool,
    tree: DependencyTree,
    node_of: HashMap<BlockId, u32>,
    adapters: adapters::Adapters,
    slots: [FreeSlots; Tier::LOWER.len()],
    frontiers: [EvictionCandidates; Tier::ALL.len()],
    policy: Box<dyn ReplacementPolicy>,
    usage: AdapterUsage,
    /// Blocks that may return to the device, the least valuable first.
    returning: BTreeSet<(i64, u32)>,
    copies: Vec<TierCopy>,
    /// Blocks that no lower tier has, in the order of their release.
    dirty: VecDeque<NodeId>,
    /// Number of spills that may begin now, as the copier has buffers for them.
    spill_capacity: usize,
    /// Next node whose worth is updated.
    reviewed: u32,
    now: Duration,
    statistics: Statistics,
    events: EventRecorder,
}

impl Cache {
    /// Creates an empty cache.
    #[must_use]
    pub fn new(settings: CacheSettings) -> Self {
        let settings = settings.divided();
        Self {
            settings,
            pool: BlockPool::new(settings.device),
            tree: DependencyTree::default(),
            node_of: HashMap::new(),
            adapters: adapters::Adapters::default(),
            slots: Tier::LOWER.map(|tier| FreeSlots::new(settings.blocks(tier))),
            frontiers: Default::default(),
            policy: settings.variant.policy(settings.tau),
            usage: AdapterUsage::default(),
            returning: BTreeSet::new(),
            copies: Vec::new(),
            dirty: VecDeque::new(),
            spill_capacity: 0,
            reviewed: 0,
            now: Duration::ZERO,
            statistics: Statistics::default(),
            events: EventRecorder::default(),
        }
    }

    /// Returns the current states of the device's blocks.
    #[must_use]
    pub fn counts(&self) -> BlockCounts {
        let pool = self.pool.counts();
        let adapters = self.adapters.blocks();
        BlockCounts {
            total: pool.total,
            free: pool.free,
            used: pool.used - adapters,
            cached: pool.cached,
            adapters,
        }
    }

    /// Returns the used slots of a tier, and the total.
    #[must_use]
    pub fn slots(&self, tier: Tier) -> (usize, usize) {
        match tier {
            Tier::Device => {
                (self.settings.device as usize - self.pool.counts().free, self.settings.device as usize)
            }
            lower => {
                let slots = &self.slots[lower as usize - 1];
                (slots.used(), slots.total() as usize)
            }
        }
    }

    /// Returns the counters since the creation of the cache.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Returns the number of KV blocks that [`allocate`](Self::allocate) can give.
    #[must_use]
    pub fn available(&self) -> usize {
        let counts = self.counts();
        let idle = counts.free + counts.cached + self.adapters.idle_blocks();
        idle.min((self.settings.max_kv_blocks as usize).saturating_sub(counts.used))
    }

    /// Returns the number of KV blocks that one sequence can always get, with any use of adapters by others.
    #[must_use]
    pub fn sure_kv_blocks(&self) -> u32 {
        let CacheSettings { device, max_kv_blocks, max_adapter_blocks, .. } = self.settings;
        max_kv_blocks.min(device.saturating_sub(max_adapter_blocks))
    }

    /// Returns the number of blocks that hold `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.settings.block_tokens)
    }

    /// Allocates `count` blocks, evicting others if too few are free; all or none.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.available() {
            return None;
        }
        (0..count).map(|_| self.allocate_one()).collect()
    }

    /// Releases blocks. Blocks in the prefix tree stay cached.
    ///
    /// # Panics
    /// Panics if the caller does not hold the blocks.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if self.pool.release(block) == Released::Cached {
                self.mark_released(block);
            }
        }
    }

    /// Returns the number of tokens in `blocks` full blocks.
    #[must_use]
    pub fn tokens_in(&self, blocks: usize) -> usize {
        blocks * self.settings.block_tokens
    }

    /// Finds the longest run of full blocks on the device that match the beginning of `tokens`, after a
    /// prefix or from the start of a namespace. The caller then holds these blocks.
    pub fn lookup(&mut self, after: impl Into<Cursor>, tokens: &[u32]) -> Prefix {
        let mut prefix = Prefix { blocks: Vec::new(), cursor: after.into() };
        for tokens in tokens.chunks_exact(self.settings.block_tokens) {
            let Some(id) = self.tree.child(&prefix.cursor, tokens) else { break };
            let TierSlot::Here(block) = self.tree.node(id.index).place(Tier::Device) else { break };
            self.mark_held(BlockId(block), id.index);
            self.visit(id.index);
            prefix.cursor = self.tree.cursor_of(id);
            prefix.blocks.push(BlockId(block));
        }
        self.statistics.lookups += 1;
        self.statistics.found_blocks += prefix.blocks.len() as u64;
        prefix
    }

    /// Offers a block that has become full with `tokens` to others, after the prefix at `cursor`, and moves
    /// `cursor` to its end. Returns the block that the caller holds from now on: another than `block` if the
    /// cache already had these tokens (with equal content; `block` was released).
    ///
    /// # Panics
    /// Panics if `tokens` is not one block's worth, or the caller does not hold `block`.
    pub fn insert(&mut self, cursor: &mut Cursor, tokens: &[u32], block: BlockId) -> BlockId {
        assert_eq!(tokens.len(), self.settings.block_tokens, "only full blocks are cached");
        // The prefix may have left the device meanwhile, for example because its adapter was unloaded.
        let is_based = self.tree.is_on_device(cursor);
        let known = is_based
            .then(|| self.tree.child(cursor, tokens).or_else(|| self.tree.add(cursor, tokens)))
            .flatten();
        let Some(id) = known else {
            *cursor = cursor.nowhere();
            return block;
        };
        match self.tree.node(id.index).place(Tier::Device) {
            TierSlot::Here(other) => {
                self.mark_held(BlockId(other), id.index);
                self.release(&[block]);
                *cursor = self.tree.cursor_of(id);
                return BlockId(other);
            }
            // The block is being fetched for another request. A holder of a block must hold all earlier ones, so
            // this prefix ends.
            TierSlot::Coming(_) => *cursor = cursor.nowhere(),
            TierSlot::None => {
                self.settle_on_device(id, block);
                self.statistics.inserted_blocks += 1;
                *cursor = self.tree.cursor_of(id);
            }
        }
        block
    }

    /// Removes all prefixes of an unloaded adapter from the device; returns the number of blocks. Sequences
    /// keep the blocks that they hold, and lower tiers keep theirs.
    pub fn remove_adapter(&mut self, adapter: AdapterId) -> usize {
        let Some(root) = self.tree.adapter(Some(adapter)) else { return 0 };
        let below: Vec<NodeId> =
            self.tree.subtree(root).into_iter().skip(1).map(|index| self.tree.id(index)).collect();
        // Children leave before their parents, so no block ever lacks its dependencies.
        below
            .into_iter()
            .rev()
            .filter(|&id| self.tree.get(id).is_some() && self.leave_device(id.index))
            .count()
    }

    /// Sets the time and the batch size, and updates the worth of some nodes; to be called at every step.
    pub fn advance(&mut self, now: Duration, batch: usize) {
        let passed = now.saturating_sub(std::mem::replace(&mut self.now, now));
        self.review(passed);
        self.usage.advance(now, batch);
    }

    /// Returns the number of adapters on the device, and the number that a batch uses (Eq. 3).
    #[must_use]
    pub fn adapter_demand(&self) -> AdapterDemand {
        AdapterDemand { now: self.adapters.placed() as f64, required: self.usage.required() }
    }

    /// Records a request for an adapter, or for the base model.
    pub fn note_request(&mut self, adapter: Option<AdapterId>) {
        self.usage.note(adapter);
        if let Some(index) = self.tree.adapter(adapter) {
            self.visit(index);
        }
    }

    /// Sets the tenants' weights in all tiers; all others have weight 1.
    pub fn weigh(&mut self, weights: &HashMap<types::TenantId, u32>) {
        for frontier in &mut self.frontiers {
            frontier.weigh(weights.clone());
        }
    }

    /// Returns the number of device blocks by owner.
    pub fn shares(&self) -> impl Iterator<Item = (types::TenantId, u32)> + '_ {
        self.frontiers[Tier::Device as usize].by_owner()
    }

    /// Adds a block whose bytes are on the device to the tree.
    fn settle_on_device(&mut self, id: NodeId, block: BlockId) {
        self.pool.cache(block);
        self.node_of.insert(block, id.index);
        self.tree.node_mut(id.index).is_held = true;
        self.set_place(id.index, Tier::Device, TierSlot::Here(block.0));
        self.visit(id.index);
    }

    fn mark_held(&mut self, block: BlockId, index: u32) {
        self.pool.retain(block);
        self.tree.node_mut(index).is_held = true;
        self.relist(index);
    }

    /// Updates a tree block whose last holder has released it.
    fn mark_released(&mut self, block: BlockId) {
        let Some(&index) = self.node_of.get(&block) else { return };
        let now = self.now;
        let node = self.tree.node_mut(index);
        node.is_held = false;
        node.set_last_use(now);
        let is_dirty = node.lower().is_none();
        self.relist(index);
        if !self.policy.rules().keeps_history {
            self.forget_branch(index);
        } else if is_dirty && self.has_lower_tier() {
            self.dirty.push_back(self.tree.id(index));
        }
    }

    fn allocate_one(&mut self) -> Option<BlockId> {
        while self.counts().used + self.counts().cached >= self.settings.max_kv_blocks as usize {
            self.evict_block(Tier::Device)?;
        }
        loop {
            if let Some(block) = self.pool.allocate() {
                return Some(block);
            }
            self.evict_any()?;
        }
    }

    fn has_lower_tier(&self) -> bool {
        self.settings.host > 0 || self.settings.disk > 0
    }
}
