//! Block pool of the device: a free list and a count of holders for each block.

use types::BlockId;

/// States of a pool's blocks; `free + used + cached = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolCounts {
    /// Number of blocks in the pool.
    pub total: usize,
    /// Number of blocks that hold nothing.
    pub free: usize,
    /// Number of blocks that at least one sequence holds.
    pub used: usize,
    /// Number of blocks that only the prefix tree knows.
    pub cached: usize,
}

/// State of a block after a holder has released it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// Other sequences hold the block.
    StillUsed,
    /// Only the prefix tree knows the block now.
    Cached,
    /// The block is free now.
    Freed,
}

#[derive(Debug, Clone, Copy, Default)]
struct BlockSlot {
    holders: u32,
    cached: bool,
}

/// Fixed number of blocks, each free, used or cached.
#[derive(Debug)]
pub struct BlockPool {
    slots: Vec<BlockSlot>,
    free: Vec<BlockId>,
    cached: usize,
}

impl BlockPool {
    /// Creates a pool of `blocks` free blocks.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        // Blocks are taken from the list's end, so low ids are used first and stay warm.
        Self {
            slots: vec![BlockSlot::default(); blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            cached: 0,
        }
    }

    /// Returns the current states of the blocks.
    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        let (total, free, cached) = (self.slots.len(), self.free.len(), self.cached);
        PoolCounts { total, free, used: total - free - cached, cached }
    }

    /// Takes a free block, which the caller alone holds.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.slot(block).holders = 1;
        Some(block)
    }

    /// Adds a holder to a used or cached block.
    ///
    /// # Panics
    /// Panics if the block is free.
    pub fn retain(&mut self, block: BlockId) {
        let slot = self.slot(block);
        assert!(slot.holders > 0 || slot.cached, "block {} is free and cannot be retained", block.0);
        slot.holders += 1;
        if slot.holders == 1 {
            self.cached -= 1;
        }
    }

    /// Removes a holder of a block.
    ///
    /// # Panics
    /// Panics if the block has no holder.
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

    /// Marks a block that the caller holds as known to the prefix tree.
    ///
    /// # Panics
    /// Panics if the block has no holder or the tree already knows it.
    pub fn cache(&mut self, block: BlockId) {
        let slot = self.slot(block);
        assert!(slot.holders > 0 && !slot.cached, "block {} must be held and new to the tree", block.0);
        slot.cached = true;
    }

    /// Marks a block as forgotten by the prefix tree; the block is free unless it has a holder.
    ///
    /// # Panics
    /// Panics if the tree did not know the block.
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
