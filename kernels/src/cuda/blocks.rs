//! The device's memory that is given out as a program runs: equal blocks, any of which holds keys and values, or is lent to an
//! adapter.

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

/// Equal blocks of the device's memory. Whose a block is, is the caller's business; what is lent to an adapter nobody else
/// touches until it is given back.
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
    /// `blocks` blocks, whose contents are unspecified.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn new(cuda: &Arc<Cuda>, block_bytes: usize, blocks: usize) -> Result<Arc<Self>, CudaError> {
        let data = DeviceVec::new(cuda, block_bytes.saturating_mul(blocks))?;
        Ok(Arc::new(Self { data, block_bytes, ledger: LeasedBlocks::new(blocks) }))
    }

    /// The device.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        self.data.cuda()
    }

    /// How many blocks there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.ledger.blocks()
    }

    /// Bytes of each.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Whether a block exists and is the KV pool's own.
    #[must_use]
    pub fn is_own(&self, block: u32) -> bool {
        self.ledger.is_own(block)
    }

    /// Lends blocks to an adapter. What was enqueued to use them is over.
    ///
    /// # Panics
    ///
    /// If one of them does not exist, or is lent already.
    #[must_use]
    pub fn lease(self: &Arc<Self>, blocks: &[u32]) -> DeviceBlockLease {
        self.ledger.mark_leased(blocks);
        DeviceBlockLease { memory: Arc::clone(self), blocks: blocks.into(), is_over: AtomicBool::new(false) }
    }

    /// Where the first block begins.
    pub(super) fn address(&self) -> u64 {
        self.data.address()
    }

    /// Copies what a block holds, once `stream` has come so far, and waits for that.
    pub(super) fn read(&self, stream: &CudaStream, block: u32, to: &mut [u8]) -> Result<(), CudaError> {
        stream.download(&self.data, self.begin(block, to.len()), to)
    }

    /// Replaces what a block holds in the order of `stream`, and waits for that.
    pub(super) fn write(&self, stream: &CudaStream, block: u32, from: &[u8]) -> Result<(), CudaError> {
        let to = self.data.address_of(self.begin(block, from.len()));
        stream.cuda().bind()?;
        // SAFETY: 1. Both ranges exist. 2. The block is lent to nobody, so who calls this has it. 3. `from` is ordinary memory,
        // which the driver copies before it returns.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream.raw()) };
        check("write a block", result)?;
        stream.synchronize()
    }

    /// The first byte of a block that is lent to nobody, all `bytes` of which are meant.
    fn begin(&self, block: u32, bytes: usize) -> usize {
        assert!(self.is_own(block), "block {block} of {} is not lent to an adapter", self.blocks());
        assert_eq!(bytes, self.block_bytes, "bytes of one block");
        block as usize * self.block_bytes
    }
}

/// Blocks that are an adapter's until this is dropped.
#[derive(Debug)]
pub struct DeviceBlockLease {
    memory: Arc<BlockMemory>,
    blocks: Box<[u32]>,
    /// They were given back before.
    is_over: AtomicBool,
}

impl DeviceBlockLease {
    /// Bytes of each block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.memory.block_bytes
    }

    /// The device.
    pub(super) fn cuda(&self) -> &Arc<Cuda> {
        self.memory.cuda()
    }

    /// How many blocks there are.
    pub(super) fn count(&self) -> usize {
        self.blocks.len()
    }

    /// Where a place in them is on the device.
    pub(super) fn address_of(&self, place: PieceOffset) -> u64 {
        let block = self.blocks[place.block as usize] as usize;
        assert!((place.offset as usize) < self.memory.block_bytes, "the place lies within its block");
        self.memory.data.address_of(block * self.memory.block_bytes + place.offset as usize)
    }

    /// Gives them back, once: nothing that is under way writes them, nor reads them to any effect.
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
