//! Device memory in equal blocks, allocated at run time: each block holds KV cache or is lent to an adapter.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::sys;

use super::{Cuda, CudaError, CudaStream, DeviceVec, error::check};
use crate::{blocks::LeasedBlocks, lora::PieceOffset};

/// Equal blocks of device memory. The caller decides the owner of a block. A block that is lent to an adapter
/// is used by the adapter alone until it is returned.
pub struct BlockMemory {
    data: DeviceVec<u8>,
    block_bytes: usize,
    ledger: LeasedBlocks,
}

impl fmt::Debug for BlockMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockMemory({} of {})", self.blocks(), self.block_bytes)
    }
}

impl BlockMemory {
    /// Allocates `blocks` blocks with unspecified contents.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn new(cuda: &Arc<Cuda>, block_bytes: usize, blocks: usize) -> Result<Arc<Self>, CudaError> {
        let data = DeviceVec::new(cuda, block_bytes.saturating_mul(blocks))?;
        Ok(Arc::new(Self { data, block_bytes, ledger: LeasedBlocks::new(blocks) }))
    }

    /// Returns the device that holds the blocks.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        self.data.cuda()
    }

    /// Returns the number of blocks in the pool.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.ledger.blocks()
    }

    /// Returns the bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// True if the block exists and belongs to the KV pool.
    #[must_use]
    pub fn is_own(&self, block: u32) -> bool {
        self.ledger.is_own(block)
    }

    /// Lends blocks to an adapter. All enqueued uses of the blocks must be finished.
    ///
    /// # Panics
    /// Panics if a block does not exist or is already lent.
    #[must_use]
    pub fn lease(self: &Arc<Self>, blocks: &[u32]) -> DeviceBlockLease {
        self.ledger.mark_leased(blocks);
        DeviceBlockLease { memory: Arc::clone(self), blocks: blocks.into(), is_over: AtomicBool::new(false) }
    }

    pub(super) fn address(&self) -> u64 {
        self.data.address()
    }

    /// Copies a block to `to` in the order of `stream`, and waits for the copy.
    pub(super) fn read(&self, stream: &CudaStream, block: u32, to: &mut [u8]) -> Result<(), CudaError> {
        stream.download(&self.data, self.begin(block, to.len()), to)
    }

    /// Overwrites a block in the order of `stream`, and waits for the copy.
    pub(super) fn write(&self, stream: &CudaStream, block: u32, from: &[u8]) -> Result<(), CudaError> {
        let to = self.data.address_of(self.begin(block, from.len()));
        stream.cuda().bind()?;
        // SAFETY: 1. Both ranges exist. 2. The block is not lent, so the caller owns it. 3. `from` is pageable memory,
        // which the driver copies before it returns.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream.raw()) };
        check("write a block", result)?;
        stream.synchronize()
    }

    /// Returns the byte offset of a block that is not lent; `bytes` must be the size of a block.
    fn begin(&self, block: u32, bytes: usize) -> usize {
        assert!(self.is_own(block), "block {block} of {} is not lent to an adapter", self.blocks());
        assert_eq!(bytes, self.block_bytes, "bytes of one block");
        block as usize * self.block_bytes
    }
}

/// Blocks that belong to an adapter until the lease is dropped.
#[derive(Debug)]
pub struct DeviceBlockLease {
    memory: Arc<BlockMemory>,
    blocks: Box<[u32]>,
    /// Whether the blocks were already returned.
    is_over: AtomicBool,
}

impl DeviceBlockLease {
    /// Returns the bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.memory.block_bytes
    }

    pub(super) fn cuda(&self) -> &Arc<Cuda> {
        self.memory.cuda()
    }

    pub(super) fn count(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the device address of an offset in the leased blocks.
    pub(super) fn address_of(&self, place: PieceOffset) -> u64 {
        let block = self.blocks[place.block as usize] as usize;
        assert!((place.offset as usize) < self.memory.block_bytes, "the place lies within its block");
        self.memory.data.address_of(block * self.memory.block_bytes + place.offset as usize)
    }

    /// Ends the lease, once. Work in flight must not write the blocks or use values that it reads from them.
    pub(super) fn end(&self) {
        if !self.is_over.swap(true, Ordering::Relaxed) {
            self.memory.ledger.take_back(&self.blocks);
        }
    }
}

impl Drop for DeviceBlockLease {
    fn drop(&mut self) {
        self.end();
    }
}
