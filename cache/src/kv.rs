//! Block pool and prefix tree as one: what an engine asks for blocks.

use ids::{AdapterId, BlockId};

use crate::{
    pool::{BlockPool, Counts, Released},
    tree::{Cursor, Namespace, PrefixTree},
};

/// A prefix found in the cache. The finder holds its blocks.
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
    /// Blocks found by lookups.
    pub found_blocks: u64,
    /// Blocks that entered the tree.
    pub inserted_blocks: u64,
    /// Blocks given up to make room.
    pub evicted_blocks: u64,
}

/// The KV blocks of an engine. A sequence holds the blocks it was given until it releases them; full blocks
/// that it inserted stay behind for others until the room is needed.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    tree: PrefixTree,
    block_tokens: usize,
    statistics: Statistics,
}

impl KvCache {
    /// A cache of `blocks` free blocks of `block_tokens` tokens.
    #[must_use]
    pub fn new(blocks: u32, block_tokens: usize) -> Self {
        Self {
            pool: BlockPool::new(blocks),
            tree: PrefixTree::new(blocks),
            block_tokens,
            statistics: Statistics::default(),
        }
    }

    /// How the blocks are divided now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.pool.counts()
    }

    /// Counters from the start.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Blocks that [`allocate`](Self::allocate) can give: the free ones and, since whoever holds a block holds
    /// the prefix before it too, all cached ones.
    #[must_use]
    pub fn available(&self) -> usize {
        let counts = self.pool.counts();
        counts.free + counts.cached
    }

    /// Blocks that hold `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Gives `count` blocks, evicting cached ones where too few are free; all of them or, if there are not so
    /// many, none.
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
                self.tree.let_go(block);
            }
        }
    }

    /// Finds the longest run of full blocks that hold the beginning of `tokens`; the caller holds them then.
    pub fn lookup(&mut self, namespace: Namespace, tokens: &[u32]) -> Prefix {
        let mut prefix = Prefix { blocks: Vec::new(), cursor: Cursor::root(namespace) };
        for block_tokens in tokens.chunks_exact(self.block_tokens) {
            let Some(block) = self.tree.child(&prefix.cursor, block_tokens) else { break };
            self.hold(block);
            prefix.cursor = self.tree.cursor_of(block);
            prefix.blocks.push(block);
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
        assert_eq!(tokens.len(), self.block_tokens, "only full blocks are cached");
        if let Some(known) = self.tree.child(cursor, tokens) {
            self.hold(known);
            self.release(&[block]);
            *cursor = self.tree.cursor_of(known);
            return known;
        }
        match self.tree.add(cursor, tokens, block) {
            Some(next) => {
                self.pool.cache(block);
                self.statistics.inserted_blocks += 1;
                *cursor = next;
            }
            None => *cursor = cursor.nowhere(),
        }
        block
    }

    /// Forgets every prefix of an adapter at once; returns how many blocks that were. Blocks that sequences
    /// hold stay theirs.
    pub fn remove_adapter(&mut self, adapter: AdapterId) -> usize {
        let removed = self.tree.remove_adapter(adapter);
        for &block in &removed {
            self.pool.uncache(block);
        }
        removed.len()
    }

    fn hold(&mut self, block: BlockId) {
        self.pool.retain(block);
        self.tree.hold(block);
    }

    fn allocate_one(&mut self) -> Option<BlockId> {
        if let Some(block) = self.pool.take() {
            return Some(block);
        }
        let evicted = self.tree.evict()?;
        self.statistics.evicted_blocks += 1;
        self.pool.uncache(evicted);
        failpoint::pass("executor.prefix_evicted");
        self.pool.take()
    }
}
