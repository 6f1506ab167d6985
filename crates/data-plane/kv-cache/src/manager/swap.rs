//! Copies between tiers, and what was there before this process (E-06, E-07, E-15).

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

/// Above this share of the device nothing is brought back before somebody asks for it.
const IDLE_SHARE: f64 = 0.7;

/// Blocks in a row that may have no chain kept.
const UNCHAINED_BLOCKS: usize = 8;

/// A copy that somebody is to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierCopy {
    /// A block's bytes to slots of lower tiers. They are to be taken before the block is computed into again.
    Out {
        /// Whose they are.
        node: NodeId,
        /// Where they are.
        block: BlockId,
        /// Where they go, by lower tier.
        slots: [Option<u32>; Tier::LOWER.len()],
    },
    /// Bytes of a lower tier to a block of the device.
    In {
        /// Whose they are.
        node: NodeId,
        /// Where they go.
        block: BlockId,
        /// Where they are.
        tier: Tier,
        /// Where they are in it.
        slot: u32,
        /// How urgent it is.
        class: CopyPriority,
    },
    /// Somebody waits by now for a block that was to come without haste.
    Hasten {
        /// Whose bytes they are.
        node: NodeId,
    },
}

/// How a copy ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyOutcome {
    /// The bytes are there.
    Done,
    /// They are not, and what was there is not to be trusted.
    Failed,
}

/// What a restart found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoredBlocks {
    /// Blocks that can be asked for again.
    pub blocks: usize,
    /// Blocks whose beginning is gone, or that are there twice.
    pub dropped: usize,
}

impl Cache {
    /// Goes on with `prefix`, the one that [`lookup`](Self::lookup) found of `tokens`, by blocks of lower tiers: takes blocks of
    /// the device for them, which the caller holds, and has them copied. Returns their nodes, whose bytes may not be there yet.
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

    /// Blocks that [`fetch`](Self::fetch) would bring.
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
        // Making room may have cost it its place.
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

    /// How many of `nodes`, from the first, are on the device; `None` while some are on their way.
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

    /// The end of the prefix that ends with a node.
    #[must_use]
    pub fn cursor_at(&self, id: NodeId) -> Option<Cursor> {
        self.tree.get(id).map(|_| self.tree.cursor_of(id))
    }

    /// A node's bytes are wanted in this block: nobody has given it up since its copy was asked for.
    #[must_use]
    pub fn awaits(&self, id: NodeId, block: BlockId) -> bool {
        self.tree.get(id).is_some_and(|node| node.place(Tier::Device) == TierSlot::Coming(block.0))
    }

    /// What is to be copied, in order.
    pub fn take_copies(&mut self) -> Vec<TierCopy> {
        std::mem::take(&mut self.copies)
    }

    /// What was to come to the device has come, or never will.
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

    /// What was to go to a lower tier is there, or never will be.
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
                // To be tried again, once there is room for it.
                if self.tree.get(id).is_some_and(|node| node.lower().is_none()) {
                    self.dirty.push_back(id);
                }
            }
        }
    }

    /// So many blocks may be copied out until this is said again: their bytes wait in memory for a slower tier.
    pub fn set_spill_room(&mut self, blocks: usize) {
        self.spill_room = blocks;
    }

    /// Has up to `count` blocks copied out that no lower tier has, those first that were let go of first: what has been copied
    /// can leave the device at once, and is there after a restart.
    pub fn spill(&mut self, count: usize) {
        let mut begun = 0;
        while begun < count && self.spill_room > 0 {
            let Some(id) = self.dirty.pop_front() else { return };
            let is_meant =
                |node: &crate::tree::Node| node.place(Tier::Device).is_here() && node.lower().is_none();
            if self.tree.get(id).is_some_and(is_meant) && self.begin_spill(id.index) {
                begun += 1;
            }
        }
    }

    /// Blocks that wait to be copied out.
    #[must_use]
    pub fn unspilled(&self) -> usize {
        self.dirty.len()
    }

    /// Gives a block of the device slots below, and has it copied there; false if there is no room.
    pub(super) fn begin_spill(&mut self, index: u32) -> bool {
        let TierSlot::Here(block) = self.tree.node(index).place(Tier::Device) else { return false };
        if self.spill_room == 0 {
            return false;
        }
        let id = self.tree.id(index);
        let slots = Tier::LOWER.map(|tier| self.slot_for(id, tier));
        if slots.iter().all(Option::is_none) {
            return false;
        }
        self.spill_room -= 1;
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

    /// Brings back what is worth most, as long as the device is idle: up to `count` blocks whose beginnings are there (E-07).
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

    /// There is room for what nobody has asked for yet.
    pub(super) fn is_idle(&self) -> bool {
        let counts = self.counts();
        ((counts.total - counts.free) as f64) < counts.total as f64 * IDLE_SHARE
    }

    /// What a slot is to be told of the bytes it gets.
    #[must_use]
    pub fn record(&mut self, id: NodeId, used_at_s: u64) -> Option<BlockRecord> {
        self.tree.get(id)?;
        let parent = self.chain_before(id.index);
        let tokens = self.tree.node(id.index).tokens().into();
        Some(BlockRecord { namespace: self.tree.namespace(id.index), parent, tokens, used_at_s })
    }

    /// The chain of what is before a block. Some are kept, so that a long prefix is hashed once and nodes stay small.
    fn chain_before(&mut self, index: u32) -> Chain {
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

    /// Takes in what an earlier process left on the disk. What was used last is worth most.
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
