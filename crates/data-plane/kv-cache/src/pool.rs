//! The blocks of the device: a free list and a count of holders for each.

use types::BlockId;

/// How the blocks of a pool are divided; `free + used + cached = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolCounts {
    /// Blocks of the pool.
    pub total: usize,
    /// Blocks that hold nothing.
    pub free: usize,
    /// Blocks at least one sequence holds.
    pub used: usize,
    /// Blocks that only the prefix tree knows.
    pub cached: usize,
}

/// What became of a block when a holder let go of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// Others hold it.
    StillUsed,
    /// Only the prefix tree knows it now.
    Cached,
    /// It is free.
    Freed,
}

#[derive(Debug, Clone, Copy, Default)]
struct BlockSlot {
    holders: u32,
    cached: bool,
}

/// A fixed number of blocks, each free, used or cached.
#[derive(Debug)]
pub struct BlockPool {
    slots: Vec<BlockSlot>,
    free: Vec<BlockId>,
    cached: usize,
}

impl BlockPool {
    /// A pool of `blocks` free blocks.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        // The last of the list is taken first: low ids are used first and stay warm.
        Self {
            slots: vec![BlockSlot::default(); blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            cached: 0,
        }
    }

    /// How the blocks are divided now.
    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        let (total, free, cached) = (self.slots.len(), self.free.len(), self.cached);
        PoolCounts { total, free, used: total - free - cached, cached }
    }

    /// Takes a free block; the caller is its one holder.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.slot(block).holders = 1;
        Some(block)
    }

    /// Adds a holder to a block that is used or cached.
    ///
    /// # Panics
    /// If the block is free.
    pub fn retain(&mut self, block: BlockId) {
        let slot = self.slot(block);
        assert!(slot.holders > 0 || slot.cached, "block {} is free and cannot be retained", block.0);
        slot.holders += 1;
        if slot.holders == 1 {
            self.cached -= 1;
        }
    }

    /// Removes a holder.
    ///
    /// # Panics
    /// If nobody holds the block.
    pub fn release(&mut self, block: BlockId) -> Released {
        let slot = self.slot(block);
        assert!(slot.holders > 0, "block {} is released more often than it was retained", block.0);
        slot.holders -= 1;
        match *slot {
            BlockSlot { holders: 0, cached: true } => {
                self.cached += 1;
                Released::Cached
            }
            BlockSlot { holders: 0, cached: false } => {
                self.free.push(block);
                Released::Freed
            }
            _ => Released::StillUsed,
        }
    }

    /// Notes that the prefix tree knows a block which the caller holds.
    ///
    /// # Panics
    /// If nobody holds the block or the tree knows it already.
    pub fn cache(&mut self, block: BlockId) {
        let slot = self.slot(block);
        assert!(slot.holders > 0 && !slot.cached, "block {} must be held and new to the tree", block.0);
        slot.cached = true;
    }

    /// Notes that the prefix tree has forgotten a block; it is free unless somebody holds it.
    ///
    /// # Panics
    /// If the tree did not know the block.
    pub fn uncache(&mut self, block: BlockId) {
        let slot = self.slot(block);
        assert!(slot.cached, "block {} is not in the tree", block.0);
        slot.cached = false;
        if slot.holders == 0 {
            self.cached -= 1;
            self.free.push(block);
        }
    }

    fn slot(&mut self, block: BlockId) -> &mut BlockSlot {
        &mut self.slots[block.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_free_used_or_cached_and_the_counts_say_which() {
        let mut pool = BlockPool::new(2);
        let block = pool.allocate().unwrap();
        assert_eq!(pool.counts(), PoolCounts { total: 2, free: 1, used: 1, cached: 0 });
        pool.cache(block);
        assert_eq!(pool.release(block), Released::Cached);
        assert_eq!(pool.counts(), PoolCounts { total: 2, free: 1, used: 0, cached: 1 });
        pool.retain(block);
        pool.uncache(block);
        assert_eq!(pool.counts(), PoolCounts { total: 2, free: 1, used: 1, cached: 0 });
        assert_eq!(pool.release(block), Released::Freed);
        assert_eq!(pool.counts(), PoolCounts { total: 2, free: 2, used: 0, cached: 0 });
    }

    #[test]
    fn an_empty_pool_gives_nothing() {
        let mut pool = BlockPool::new(1);
        assert!(pool.allocate().is_some());
        assert_eq!(pool.allocate(), None);
    }

    #[test]
    #[should_panic(expected = "released more often")]
    fn releasing_twice_is_a_fault_of_the_caller() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.release(block);
        pool.release(block);
    }
}
