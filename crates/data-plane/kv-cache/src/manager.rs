//! The cache manager: one pool of blocks for keys, values and adapters, and what lies below it (E-01).
//!
//! Only decisions are made here. Bytes are copied by whoever owns them: what is to be copied is put into a queue
//! ([`Cache::take_copies`]), and how that ended is told ([`Cache::copied_in`], [`Cache::copied_out`]). So an engine and a simulator run the same code.
//!
//! # Layout
//!
//! - here: what a sequence asks for.
//! - `adapters`: places of adapters in the pool.
//! - `eviction`: who leaves a tier when others need the room.
//! - `invariants`: whether the invariants hold.
//! - `settings`: what a cache holds itself to.
//! - `swap`: copies between tiers, and what was there before this process.
//!
//! # Invariants
//!
//! - At any time every block is exactly one of free, used (a sequence holds it), cached (only the tree knows it) or of an
//!   adapter.
//! - Every block of the tree that is on the device has all that it depends on there: the blocks before it, and its adapter
//!   unless that is computed elsewhere (E-05).

mod adapters;
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
    eviction_candidates::EvictionCandidates,
    pool::{BlockPool, Released},
    replacement::{AdapterDemand, AdapterUsage, ReplacementPolicy},
    tier::{FreeSlots, Tier, TierSlot},
    tree::{Cursor, DependencyTree, NodeId},
};

/// How the blocks of the device are divided; `free + used + cached + adapters = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Blocks of the pool.
    pub total: usize,
    /// Blocks that hold nothing.
    pub free: usize,
    /// Blocks at least one sequence holds: running keys and values.
    pub used: usize,
    /// Blocks that only the tree knows: keys and values of the past.
    pub cached: usize,
    /// Blocks of adapters.
    pub adapters: usize,
}

/// A prefix found on the device. The finder holds its blocks.
#[derive(Debug)]
pub struct Prefix {
    /// Its blocks in order, all full.
    pub blocks: Vec<BlockId>,
    /// Its end, where further blocks are added.
    pub cursor: Cursor,
}

/// Counters from the start of the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Prefixes looked up.
    pub lookups: u64,
    /// Blocks found on the device by lookups.
    pub found_blocks: u64,
    /// Blocks fetched from a lower tier for those who asked, by tier.
    pub fetched_blocks: [u64; Tier::ALL.len()],
    /// Blocks brought back before anybody asked.
    pub prefetched_blocks: u64,
    /// Blocks that entered the tree.
    pub inserted_blocks: u64,
    /// Blocks that left the device to make room.
    pub evicted_blocks: u64,
    /// Of them, those that no tier had room for.
    pub lost_blocks: u64,
    /// Blocks copied to lower tiers.
    pub spilled_blocks: u64,
    /// Copies from and to lower tiers that came to nothing.
    pub failed_copies: u64,
    /// Adapters that left the device to make room.
    pub evicted_adapters: u64,
    /// Blocks that adapters gave up to make room, and stayed ([`AdapterUnit::Block`]).
    pub shed_adapter_blocks: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Cache {
    settings: CacheSettings,
    pool: BlockPool,
    tree: DependencyTree,
    /// The nodes of device blocks.
    node_of: HashMap<BlockId, u32>,
    adapters: adapters::Adapters,
    slots: [FreeSlots; Tier::LOWER.len()],
    frontiers: [EvictionCandidates; Tier::ALL.len()],
    policy: Box<dyn ReplacementPolicy>,
    usage: AdapterUsage,
    /// Blocks that could come back to the device, the least valuable first.
    returning: BTreeSet<(i64, u32)>,
    copies: Vec<TierCopy>,
    /// Blocks that no lower tier has, in the order in which they were let go of.
    dirty: VecDeque<NodeId>,
    /// Copies out that may be begun before their bytes have gone: as many as somebody has room for.
    spill_room: usize,
    /// The next node whose worth is looked at again.
    reviewed: u32,
    now: Duration,
    statistics: Statistics,
}

impl Cache {
    /// An empty cache.
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
            spill_room: 0,
            reviewed: 0,
            now: Duration::ZERO,
            statistics: Statistics::default(),
        }
    }

    /// How the blocks of the device are divided now.
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

    /// Slots in use of a lower tier, and all it has.
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

    /// Counters from the start.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Blocks of keys and values that [`allocate`](Self::allocate) can give.
    #[must_use]
    pub fn available(&self) -> usize {
        let counts = self.counts();
        let idle = counts.free + counts.cached + self.adapters.idle_blocks();
        idle.min((self.settings.max_kv_blocks as usize).saturating_sub(counts.used))
    }

    /// Blocks of keys and values that one sequence can have, whatever adapters others use.
    #[must_use]
    pub fn sure_kv_blocks(&self) -> u32 {
        let CacheSettings { device, max_kv_blocks, max_adapter_blocks, .. } = self.settings;
        max_kv_blocks.min(device.saturating_sub(max_adapter_blocks))
    }

    /// Blocks that hold `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.settings.block_tokens)
    }

    /// Gives `count` blocks, evicting others where too few are free; all of them or, if there are not so many, none.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.available() {
            return None;
        }
        (0..count).map(|_| self.allocate_one()).collect()
    }

    /// Lets go of blocks. Those in the tree stay cached.
    ///
    /// # Panics
    /// If the caller did not hold them.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if self.pool.release(block) == Released::Cached {
                self.mark_released(block);
            }
        }
    }

    /// Tokens that so many full blocks hold.
    #[must_use]
    pub fn tokens_in(&self, blocks: usize) -> usize {
        blocks * self.settings.block_tokens
    }

    /// Finds the longest run of full blocks on the device that hold the beginning of `tokens` after a prefix, or from the start of a namespace;
    /// the caller holds them then.
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
    /// `cursor` behind it. Returns the block the caller holds from now on: another than `block` if the cache
    /// had these tokens already (its content is equal, and `block` was released).
    ///
    /// # Panics
    /// If `tokens` is not one block's worth, or the caller does not hold `block`.
    pub fn insert(&mut self, cursor: &mut Cursor, tokens: &[u32], block: BlockId) -> BlockId {
        assert_eq!(tokens.len(), self.settings.block_tokens, "only full blocks are cached");
        // What is before it may have left the device under it, as where an adapter was unloaded.
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
            // Its bytes come from below for somebody else; who holds a block holds all before it, so this way ends here.
            TierSlot::Coming(_) => *cursor = cursor.nowhere(),
            TierSlot::None => {
                self.settle_on_device(id, block);
                self.statistics.inserted_blocks += 1;
                *cursor = self.tree.cursor_of(id);
            }
        }
        block
    }

    /// Takes away from the device every prefix of an adapter that is unloaded; returns how many blocks that were. Blocks that
    /// sequences hold stay theirs, and what lower tiers have stays there.
    pub fn remove_adapter(&mut self, adapter: AdapterId) -> usize {
        let Some(root) = self.tree.adapter(Some(adapter)) else { return 0 };
        let below: Vec<NodeId> =
            self.tree.subtree(root).into_iter().skip(1).map(|index| self.tree.id(index)).collect();
        // Those below before those above: nothing is ever without what it depends on.
        below
            .into_iter()
            .rev()
            .filter(|&id| self.tree.get(id).is_some() && self.leave_device(id.index))
            .count()
    }

    /// Time has passed; a batch has so many sequences. Called at every step of whoever owns this; it looks again at what some
    /// nodes are worth.
    pub fn advance(&mut self, now: Duration, batch: usize) {
        let passed = now.saturating_sub(std::mem::replace(&mut self.now, now));
        self.review(passed);
        self.usage.advance(now, batch);
    }

    /// How many adapters there are on the device, and how many a batch uses (Eq. 3).
    #[must_use]
    pub fn adapter_demand(&self) -> AdapterDemand {
        AdapterDemand { now: self.adapters.placed() as f64, required: self.usage.required() }
    }

    /// Somebody asks for an adapter, or for the base model.
    pub fn note_request(&mut self, adapter: Option<AdapterId>) {
        self.usage.note(adapter);
        if let Some(index) = self.tree.adapter(adapter) {
            self.visit(index);
        }
    }

    /// Gives tenants their parts of the tiers, beside 1 for everybody else.
    pub fn weigh(&mut self, weights: &HashMap<types::TenantId, u32>) {
        for frontier in &mut self.frontiers {
            frontier.weigh(weights.clone());
        }
    }

    /// Blocks on the device by owner.
    pub fn shares(&self) -> impl Iterator<Item = (types::TenantId, u32)> + '_ {
        self.frontiers[Tier::Device as usize].by_owner()
    }

    /// A block whose bytes are there joins the tree.
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

    /// The last holder of a block of the tree has let go of it.
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
