//! Copies between tiers, and blocks from an earlier process (E-06, E-07, E-15).

use std::collections::{HashMap, HashSet};

use types::BlockId;

use super::{Cache, Prefix};
use crate::{
    copy::CopyPriority,
    namespace::Chain,
    store::{BlockRecord, StoreSlot},
    tier::{Tier, TierSlot},
    tree::{Cursor, NodeId},
};

/// Used fraction of the device above which nothing is prefetched.
const IDLE_SHARE: f64 = 0.7;

/// Maximum number of consecutive blocks without a stored chain.
const UNCHAINED_BLOCKS: usize = 8;

/// Copy that the owner of the bytes must make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierCopy {
    /// A block's bytes go to slots of lower tiers. The owner must read them before the block is overwritten.
    Out {
        /// Node of the block.
        node: NodeId,
        /// Source block on the device.
        block: BlockId,
        /// Target slots, by lower tier.
        slots: [Option<u32>; Tier::LOWER.len()],
    },
    /// Bytes of a lower tier go to a block of the device.
    In {
        /// Node of the block.
        node: NodeId,
        /// Target block on the device.
        block: BlockId,
        /// Source tier of the bytes.
        tier: Tier,
        /// Slot in the source tier.
        slot: u32,
        /// Urgency of the copy.
        class: CopyPriority,
    },
    /// A request now waits for a block that was being prefetched: the copy becomes urgent.
    Hasten {
        /// Node of the awaited block.
        node: NodeId,
    },
}

/// Result of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyOutcome {
    /// The bytes are complete at the target.
    Done,
    /// The copy failed, and the bytes at source and target are not to be trusted.
    Failed,
}

/// Result of restoring blocks from disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoredBlocks {
    /// Number of blocks that can be fetched again.
    pub blocks: usize,
    /// Number of blocks whose beginning is missing, or that are duplicates.
    pub dropped: usize,
}

impl Cache {
    /// Extends `prefix`, which [`lookup`](Self::lookup) found for `tokens`, by blocks of lower tiers:
    /// allocates device blocks for the caller and queues the copies. Returns their nodes, whose bytes may
    /// arrive later.
    pub fn fetch(&mut self, prefix: &mut Prefix, tokens: &[u32]) -> Vec<NodeId> {
        let (mut nodes, mut cursor) = (Vec::new(), prefix.cursor);
        let found = prefix.blocks.len();
        for tokens in tokens.chunks_exact(self.settings.block_tokens).skip(found) {
            let Some(id) = self.tree.child(&cursor, tokens) else { break };
            let Some(block) = self.fetch_one(id) else { break };
            self.visit(id.index);
            prefix.blocks.push(block);
            nodes.push(id);
            cursor = self.tree.cursor_of(id);
        }
        nodes
    }

    /// Returns the number of blocks that [`fetch`](Self::fetch) would add.
    #[must_use]
    pub fn below(&self, prefix: &Prefix, tokens: &[u32]) -> usize {
        let mut cursor = prefix.cursor;
        let blocks = tokens.chunks_exact(self.settings.block_tokens).skip(prefix.blocks.len());
        let is_known = |tokens: &[u32]| {
            let id = self.tree.child(&cursor, tokens)?;
            cursor = self.tree.cursor_of(id);
            self.tree.node(id.index).is_somewhere().then_some(())
        };
        blocks.map_while(is_known).count()
    }

    fn fetch_one(&mut self, id: NodeId) -> Option<BlockId> {
        let node = self.tree.node(id.index);
        let place = node.place(Tier::Device);
        if matches!(place, TierSlot::Coming(_)) {
            self.copies.push(TierCopy::Hasten { node: id });
        }
        if let Some(block) = place.index() {
            self.mark_held(BlockId(block), id.index);
            return Some(BlockId(block));
        }
        let (tier, slot) = node.lower()?;
        let block = self.allocate_one()?;
        // The eviction for `block` may have removed the node's slot.
        if self.tree.get(id).and_then(|node| node.place(tier).index()) != Some(slot) {
            self.pool.release(block);
            return None;
        }
        self.begin_fetch(id, block, (tier, slot), CopyPriority::Demand);
        self.tree.node_mut(id.index).is_held = true;
        self.statistics.fetched_blocks[tier as usize] += 1;
        Some(block)
    }

    fn begin_fetch(&mut self, id: NodeId, block: BlockId, (tier, slot): (Tier, u32), class: CopyPriority) {
        self.pool.cache(block);
        self.node_of.insert(block, id.index);
        self.set_place(id.index, Tier::Device, TierSlot::Coming(block.0));
        self.copies.push(TierCopy::In { node: id, block, tier, slot, class });
    }

    /// Returns how many of `nodes`, from the first, are on the device; `None` while some are on their way.
    #[must_use]
    pub fn arrived(&self, nodes: &[NodeId]) -> Option<usize> {
        for (count, &id) in nodes.iter().enumerate() {
            match self.tree.get(id).map(|node| node.place(Tier::Device)) {
                Some(TierSlot::Here(_)) => {}
                Some(TierSlot::Coming(_)) => return None,
                Some(TierSlot::None) | None => return Some(count),
            }
        }
        Some(nodes.len())
    }

    /// Returns the end of the prefix that ends with a node.
    #[must_use]
    pub fn cursor_at(&self, id: NodeId) -> Option<Cursor> {
        self.tree.get(id).map(|_| self.tree.cursor_of(id))
    }

    /// Whether a node still waits for its bytes in this block.
    #[must_use]
    pub fn awaits(&self, id: NodeId, block: BlockId) -> bool {
        self.tree.get(id).is_some_and(|node| node.place(Tier::Device) == TierSlot::Coming(block.0))
    }

    /// Takes the queued copies, in order.
    pub fn take_copies(&mut self) -> Vec<TierCopy> {
        std::mem::take(&mut self.copies)
    }

    /// Records the result of a copy to the device.
    pub fn copied_in(&mut self, id: NodeId, block: BlockId, outcome: CopyOutcome) {
        if !self.awaits(id, block) {
            return;
        }
        match outcome {
            CopyOutcome::Done => self.set_place(id.index, Tier::Device, TierSlot::Here(block.0)),
            CopyOutcome::Failed => {
                self.statistics.failed_copies += 1;
                self.forget_branch(id.index);
            }
        }
    }

    /// Records the result of a copy to a lower tier.
    pub fn copied_out(&mut self, id: NodeId, tier: Tier, outcome: CopyOutcome) {
        let Some(TierSlot::Coming(slot)) = self.tree.get(id).map(|node| node.place(tier)) else { return };
        match outcome {
            CopyOutcome::Done => {
                self.statistics.spilled_blocks += 1;
                self.set_place(id.index, tier, TierSlot::Here(slot));
            }
            CopyOutcome::Failed => {
                self.statistics.failed_copies += 1;
                self.leave_lower(id.index, tier);
                self.drop_if_nowhere(id.index);
                // The spill is repeated when there is capacity.
                if self.tree.get(id).is_some_and(|node| node.lower().is_none()) {
                    self.dirty.push_back(id);
                }
            }
        }
    }

    /// Sets how many spills may begin until the next call; their bytes are buffered in host memory.
    pub fn set_spill_capacity(&mut self, blocks: usize) {
        self.spill_capacity = blocks;
    }

    /// Queues spills of up to `count` blocks that no lower tier has, the earliest released first. Spilled
    /// blocks can leave the device at once, and survive a restart.
    pub fn spill(&mut self, count: usize) {
        let mut begun = 0;
        while begun < count && self.spill_capacity > 0 {
            let Some(id) = self.dirty.pop_front() else { return };
            let is_meant =
                |node: &crate::tree::Node| node.place(Tier::Device).is_here() && node.lower().is_none();
            if self.tree.get(id).is_some_and(is_meant) && self.begin_spill(id.index) {
                begun += 1;
            }
        }
    }

    /// Returns the number of blocks that wait to be spilled.
    #[must_use]
    pub fn unspilled(&self) -> usize {
        self.dirty.len()
    }

    /// Allocates lower slots for a device block and queues the copy; returns false without capacity.
    pub(super) fn begin_spill(&mut self, index: u32) -> bool {
        let TierSlot::Here(block) = self.tree.node(index).place(Tier::Device) else { return false };
        if self.spill_capacity == 0 {
            return false;
        }
        let id = self.tree.id(index);
        let slots = Tier::LOWER.map(|tier| self.slot_for(id, tier));
        if slots.iter().all(Option::is_none) {
            return false;
        }
        self.spill_capacity -= 1;
        self.copies.push(TierCopy::Out { node: id, block: BlockId(block), slots });
        true
    }

    fn slot_for(&mut self, id: NodeId, tier: Tier) -> Option<u32> {
        let slot = self.slots[tier as usize - 1].allocate().or_else(|| {
            (self.settings.blocks(tier) > 0).then(|| self.evict_block(tier)).flatten()?;
            self.slots[tier as usize - 1].allocate()
        })?;
        if self.tree.get(id).is_none() {
            self.slots[tier as usize - 1].give_back(slot);
            return None;
        }
        self.set_place(id.index, tier, TierSlot::Coming(slot));
        Some(slot)
    }

    /// Prefetches up to `count` of the most valuable blocks after present prefixes, on an idle device (E-07).
    pub fn prefetch(&mut self, count: usize) {
        for _ in 0..count {
            let counts = self.counts();
            let has_room = counts.used + counts.cached < self.settings.max_kv_blocks as usize;
            if !self.is_idle() || !has_room {
                return;
            }
            let Some(index) = self.returning.last().map(|&(_, index)| index) else { return };
            let (Some(lower), Some(block)) = (self.tree.node(index).lower(), self.pool.allocate()) else {
                return;
            };
            self.begin_fetch(self.tree.id(index), block, lower, CopyPriority::SwapIn);
            self.pool.release(block);
            self.statistics.prefetched_blocks += 1;
        }
    }

    /// Whether the device has capacity for prefetching.
    pub(super) fn is_idle(&self) -> bool {
        let counts = self.counts();
        ((counts.total - counts.free) as f64) < counts.total as f64 * IDLE_SHARE
    }

    /// Returns the record to store with a node's bytes in a slot.
    #[must_use]
    pub fn record(&mut self, id: NodeId, used_at_s: u64) -> Option<BlockRecord> {
        self.tree.get(id)?;
        let parent = self.chain_before(id.index);
        let tokens = self.tree.node(id.index).tokens().into();
        Some(BlockRecord { namespace: self.tree.namespace(id.index), parent, tokens, used_at_s })
    }

    /// Returns the chain before a block. Storing some chains avoids hashing a long prefix for every block.
    pub(super) fn chain_before(&mut self, index: u32) -> Chain {
        let namespace = self.tree.namespace(index);
        let mut unhashed = Vec::new();
        let mut at = self.tree.parent(index);
        let mut chain = loop {
            let Some(above) = at.filter(|&above| self.tree.node(above).adapter().is_none()) else {
                break Chain::root(&namespace);
            };
            if let Some(chain) = &self.tree.node(above).chain {
                break **chain;
            }
            unhashed.push(above);
            at = self.tree.parent(above);
        };
        let (nearest, walked) = (unhashed.first().copied(), unhashed.len());
        for above in unhashed.into_iter().rev() {
            chain = chain.then(self.tree.node(above).tokens());
        }
        if let Some(nearest) = nearest.filter(|_| walked >= UNCHAINED_BLOCKS) {
            self.tree.node_mut(nearest).chain = Some(Box::new(chain));
        }
        chain
    }

    /// Adds blocks that an earlier process left on the disk. The last used ones are worth most.
    pub fn restore(&mut self, mut records: Vec<(StoreSlot, BlockRecord)>) -> RestoredBlocks {
        let block_tokens = self.settings.block_tokens;
        records.retain(|(slot, record)| slot.0 < self.settings.disk && record.tokens.len() == block_tokens);
        // Older blocks are restored first, so that they look as if they had been used first.
        records.sort_by_key(|(_, record)| record.used_at_s);
        let total = records.len();
        let mut children: HashMap<Chain, Vec<(StoreSlot, BlockRecord)>> = HashMap::new();
        let mut roots = Vec::new();
        for (slot, record) in records {
            if record.parent == Chain::root(&record.namespace) {
                roots.push((Cursor::root(record.namespace), slot, record));
            } else {
                children.entry(record.parent).or_default().push((slot, record));
            }
        }
        let mut taken = HashSet::new();
        while let Some((cursor, slot, record)) = roots.pop() {
            if self.tree.child(&cursor, &record.tokens).is_some() {
                continue;
            }
            let Some(id) = self.tree.add(&cursor, &record.tokens) else { continue };
            self.set_place(id.index, Tier::Disk, TierSlot::Here(slot.0));
            self.visit(id.index);
            taken.insert(slot.0);
            let cursor = self.tree.cursor_of(id);
            let below = children.remove(&record.chain()).unwrap_or_default();
            roots.extend(below.into_iter().map(|(slot, record)| (cursor, slot, record)));
        }
        self.slots[Tier::Disk as usize - 1].claim(&taken);
        RestoredBlocks { blocks: taken.len(), dropped: total - taken.len() }
    }
}
