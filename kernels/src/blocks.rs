//! A device's memory in blocks of one size, any of which holds keys and values or pieces of adapters (ELORA §4.1).
//!
//! Who has which block is decided elsewhere. Here is seen to it that no block is had by two: it is the KV pool's own unless it is
//! *lent* to an adapter, and the pool refuses to touch one that is.

use std::{
    io,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::buffer::Buffer;

/// Which blocks are lent, on whatever device. Changed between passes, by who gives blocks out: these order nothing.
#[derive(Debug)]
pub(crate) struct LeasedBlocks(Box<[AtomicBool]>);

impl LeasedBlocks {
    /// Of so many blocks, none of which is lent.
    pub(crate) fn new(blocks: usize) -> Self {
        Self((0..blocks).map(|_| AtomicBool::new(false)).collect())
    }

    /// How many blocks there are.
    pub(crate) fn blocks(&self) -> usize {
        self.0.len()
    }

    /// Whether a block exists and is the KV pool's own.
    pub(crate) fn is_own(&self, block: u32) -> bool {
        self.0.get(block as usize).is_some_and(|lent| !lent.load(Ordering::Relaxed))
    }

    /// Notes that these are lent.
    ///
    /// # Panics
    ///
    /// If one of them does not exist, or is lent already.
    pub(crate) fn mark_leased(&self, blocks: &[u32]) {
        for &block in blocks {
            assert!((block as usize) < self.blocks(), "block {block} of {}", self.blocks());
            let was_lent = self.0[block as usize].swap(true, Ordering::Relaxed);
            assert!(!was_lent, "block {block} is lent to an adapter");
        }
    }

    /// Notes that these, which were lent, are the pool's own again.
    pub(crate) fn take_back(&self, blocks: &[u32]) {
        blocks.iter().for_each(|&block| self.0[block as usize].store(false, Ordering::Relaxed));
    }
}

/// Blocks of this process's memory.
#[derive(Debug)]
pub struct BlockMemory {
    bytes: Buffer<u8>,
    block_bytes: usize,
    ledger: LeasedBlocks,
}

impl BlockMemory {
    /// So many blocks of zeroes.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new(block_bytes: usize, blocks: usize) -> io::Result<Arc<Self>> {
        let bytes = block_bytes.checked_mul(blocks).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Self { bytes: Buffer::zeroed(bytes)?, block_bytes, ledger: LeasedBlocks::new(blocks) }))
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// How many there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.ledger.blocks()
    }

    /// Lends blocks to an adapter, until it gives them back.
    ///
    /// # Panics
    ///
    /// If a block does not exist, or is lent already.
    #[must_use]
    pub fn lease(self: &Arc<Self>, blocks: &[u32]) -> Arc<BlockLease> {
        self.ledger.mark_leased(blocks);
        Arc::new(BlockLease { memory: Arc::clone(self), blocks: blocks.into(), is_over: RwLock::new(false) })
    }

    /// Whether a block exists and is the KV pool's own.
    pub(crate) fn is_own(&self, block: u32) -> bool {
        self.ledger.is_own(block)
    }

    /// The first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.bytes.as_ptr()
    }
}

/// Blocks that are lent to an adapter.
#[derive(Debug)]
pub struct BlockLease {
    memory: Arc<BlockMemory>,
    blocks: Box<[u32]>,
    is_over: RwLock<bool>,
}

impl BlockLease {
    /// Gives the blocks back, once nobody holds them any more; no one will again.
    pub fn end(&self) {
        let mut is_over = self.is_over.write().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *is_over, true) {
            self.memory.ledger.take_back(&self.blocks);
        }
    }

    /// Keeps them from being given back; `None` if they were.
    pub(crate) fn guard(&self) -> Option<LeaseGuard<'_>> {
        let is_over = self.is_over.read().unwrap_or_else(PoisonError::into_inner);
        (!*is_over).then_some(LeaseGuard(is_over))
    }

    /// Where `bytes` bytes of a block are, the `block`th of those that were lent, from `offset` on.
    ///
    /// # Panics
    ///
    /// If they are not within it.
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

/// As long as it lives, the blocks of a [`BlockLease`] stay lent.
#[derive(Debug)]
pub(crate) struct LeaseGuard<'a>(
    #[allow(dead_code, reason = "what matters is that it is held")] RwLockReadGuard<'a, bool>,
);
