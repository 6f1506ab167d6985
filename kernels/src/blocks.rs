//! Memory of a device in blocks of one size, each of which holds KV cache or parts of adapters (ELORA §4.1).
//!
//! The caller decides the owner of each block. This module ensures that no block has two owners: a block
//! belongs to the KV pool unless it is *lent* to an adapter, and the pool refuses access to a lent block.

use std::{
    io,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::buffer::Buffer;

/// Flags of lent blocks. Only the allocator of blocks changes them, between passes, so relaxed order
/// suffices.
#[derive(Debug)]
pub(crate) struct LeasedBlocks(Box<[AtomicBool]>);

impl LeasedBlocks {
    pub(crate) fn new(blocks: usize) -> Self {
        Self((0..blocks).map(|_| AtomicBool::new(false)).collect())
    }

    pub(crate) fn blocks(&self) -> usize {
        self.0.len()
    }

    /// True if the block exists and belongs to the KV pool.
    pub(crate) fn is_own(&self, block: u32) -> bool {
        self.0.get(block as usize).is_some_and(|lent| !lent.load(Ordering::Relaxed))
    }

    /// Marks the blocks as lent.
    ///
    /// # Panics
    /// Panics if a block does not exist or is already lent.
    pub(crate) fn mark_leased(&self, blocks: &[u32]) {
        for &block in blocks {
            assert!((block as usize) < self.blocks(), "block {block} of {}", self.blocks());
            let was_lent = self.0[block as usize].swap(true, Ordering::Relaxed);
            assert!(!was_lent, "block {block} is lent to an adapter");
        }
    }

    pub(crate) fn take_back(&self, blocks: &[u32]) {
        blocks.iter().for_each(|&block| self.0[block as usize].store(false, Ordering::Relaxed));
    }
}

/// KV cache and adapter blocks in this process's memory.
#[derive(Debug)]
pub struct BlockMemory {
    bytes: Buffer<u8>,
    block_bytes: usize,
    ledger: LeasedBlocks,
}

impl BlockMemory {
    /// Allocates `blocks` blocks of zeros.
    ///
    /// # Errors
    /// Fails if the memory cannot be allocated.
    pub fn new(block_bytes: usize, blocks: usize) -> io::Result<Arc<Self>> {
        let bytes = block_bytes.checked_mul(blocks).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Self { bytes: Buffer::zeroed(bytes)?, block_bytes, ledger: LeasedBlocks::new(blocks) }))
    }

    /// Returns the bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.ledger.blocks()
    }

    /// Lends blocks to an adapter until [`BlockLease::end`] or the drop of the lease.
    ///
    /// # Panics
    /// Panics if a block does not exist or is already lent.
    #[must_use]
    pub fn lease(self: &Arc<Self>, blocks: &[u32]) -> Arc<BlockLease> {
        self.ledger.mark_leased(blocks);
        Arc::new(BlockLease { memory: Arc::clone(self), blocks: blocks.into(), is_over: RwLock::new(false) })
    }

    /// True if the block exists and belongs to the KV pool.
    pub(crate) fn is_own(&self, block: u32) -> bool {
        self.ledger.is_own(block)
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.bytes.as_ptr()
    }
}

/// Lease of blocks to an adapter.
#[derive(Debug)]
pub struct BlockLease {
    memory: Arc<BlockMemory>,
    blocks: Box<[u32]>,
    is_over: RwLock<bool>,
}

impl BlockLease {
    /// Ends the lease once no guard holds the blocks; later calls of `guard` get `None`.
    pub fn end(&self) {
        let mut is_over = self.is_over.write().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *is_over, true) {
            self.memory.ledger.take_back(&self.blocks);
        }
    }

    /// Keeps the blocks from being returned while the guard lives; `None` if the lease is over.
    pub(crate) fn guard(&self) -> Option<LeaseGuard<'_>> {
        let is_over = self.is_over.read().unwrap_or_else(PoisonError::into_inner);
        (!*is_over).then_some(LeaseGuard(is_over))
    }

    /// Returns the address of `bytes` bytes from `offset` in the lease's block number `block`.
    ///
    /// # Panics
    /// Panics if the bytes exceed the block.
    pub(crate) fn address(&self, block: usize, offset: usize, bytes: usize) -> *mut u8 {
        let block = self.blocks[block] as usize;
        assert!(offset + bytes <= self.memory.block_bytes, "a piece lies within its block");
        self.memory.as_ptr().wrapping_add(block * self.memory.block_bytes + offset)
    }
}

impl Drop for BlockLease {
    fn drop(&mut self) {
        self.end();
    }
}

/// Keeps the blocks of a [`BlockLease`] lent while it lives.
#[derive(Debug)]
pub(crate) struct LeaseGuard<'a>(
    #[allow(dead_code, reason = "what matters is that it is held")] RwLockReadGuard<'a, bool>,
);
