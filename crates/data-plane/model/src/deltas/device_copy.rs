//! An adapter's copy on the device, complete or in progress.
//!
//! One thread copies rank blocks, layer by layer in the order of a pass, and within a layer from the last
//! block to the first. The compute thread uses the blocks that have arrived. Each device implements its kind
//! of memory and its copies ([`DeviceMemory`], [`StagedMatrices`]).

use std::{
    any::Any,
    error::Error,
    fmt::Debug,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};

use kernels::lora::LoraMatrix;
use types::BlockId;

use crate::{
    deltas::matrices::{ByLayer, HostMatrices},
    shape::source::Target,
};

/// Memory for adapter copies on a device: blocks of the pool that also holds the KV cache.
pub trait DeviceMemory: Debug + Send + Sync {
    /// Returns the number of blocks for a copy of `host`, or `None` if the smallest piece exceeds a block.
    fn blocks_for(&self, host: &HostMatrices) -> Option<u32>;

    /// Creates an empty copy of `host`, which owns `blocks` until it is [revoked](DeviceCopy::revoke).
    ///
    /// # Panics
    ///
    /// If there are fewer blocks than [`blocks_for`](Self::blocks_for) returns, or another copy owns them.
    fn copy_of(&self, host: &HostMatrices, blocks: &[BlockId]) -> DeviceCopy;

    /// Makes arrived blocks visible to the next pass. The pass itself notices a lost device.
    fn poll_arrivals(&self) {}
}

/// Error of copying a block to the device.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct CopyError(pub Box<dyn Error + Send + Sync>);

/// Device memory for the matrices of one adapter, numbered in the order of a pass.
pub trait StagedMatrices: Any + Debug + Send + Sync {
    /// Returns the bytes of a matrix's next block, or `None` if all blocks are copied or in transfer.
    fn next_bytes(&self, index: usize) -> Option<usize>;

    /// Returns the first rank of a matrix that is on the device; all later ranks are too.
    fn first_rank(&self, index: usize) -> usize;

    /// Copies the next block of `matrix`, number `index` of `host`, and returns its bytes.
    ///
    /// # Errors
    ///
    /// The device refuses the copy.
    fn copy_next(&self, index: usize, host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError>;

    /// Waits until all copied blocks have arrived.
    ///
    /// # Errors
    ///
    /// The device fails.
    fn finish(&self) -> Result<(), CopyError>;

    /// True if no copied block is still in transfer.
    fn has_arrived(&self) -> bool;

    /// Releases the blocks after all transfers to them. The copy must not be used afterwards.
    fn revoke(&self);
}

/// The device's copy of an adapter.
#[derive(Debug)]
pub struct DeviceCopy {
    /// Linear layers in the order of a pass.
    order: Vec<(usize, Target)>,
    numbers: ByLayer<u32>,
    staged: Box<dyn StagedMatrices>,
    /// Index in `order` of the first layer that is not completely copied or in transfer.
    next: AtomicUsize,
    arrived_bytes: AtomicU64,
    bytes: u64,
    /// Whether the device refused a copy; then no more blocks are copied.
    is_broken: AtomicBool,
}

impl DeviceCopy {
    pub(crate) fn new(host: &HostMatrices, staged: Box<dyn StagedMatrices>) -> Self {
        let order: Vec<_> = host.iter().map(|(layer, target, _)| (layer, target)).collect();
        let mut numbers = ByLayer::new(host.layers());
        for (number, &(layer, target)) in (0..).zip(&order) {
            numbers.set(layer, target, number);
        }
        Self {
            order,
            numbers,
            staged,
            next: AtomicUsize::new(0),
            arrived_bytes: AtomicU64::new(0),
            bytes: host.bytes() as u64,
            is_broken: AtomicBool::new(false),
        }
    }

    /// Returns the bytes of the complete copy.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes that are copied or in transfer.
    #[must_use]
    pub fn arrived_bytes(&self) -> u64 {
        self.arrived_bytes.load(Ordering::Relaxed)
    }

    /// Whether all blocks have arrived.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.next.load(Ordering::Relaxed) == self.order.len() && self.staged.has_arrived()
    }

    /// Returns the bytes of the next block, or `None` if no block is left to copy.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        if self.is_broken.load(Ordering::Relaxed) {
            return None;
        }
        let index = self.next.load(Ordering::Relaxed);
        if index < self.order.len() { self.staged.next_bytes(index) } else { None }
    }

    /// Copies the next block of `host`, the original of this copy. One thread must make all calls. After the
    /// last call the copy is complete, unless the device refused a block.
    pub fn copy_next(&self, host: &HostMatrices) {
        let index = self.next.load(Ordering::Relaxed);
        let Some(&(layer, target)) = self.order.get(index) else { return };
        let Some(matrix) = host.get(layer, target) else { return };
        match self.copy(index, host, matrix) {
            Ok(bytes) => self.arrived_bytes.fetch_add(bytes as u64, Ordering::Relaxed),
            Err(error) => {
                tracing::error!(%error, "cannot copy an adapter to the device");
                self.is_broken.store(true, Ordering::Relaxed);
                return;
            }
        };
        if self.staged.next_bytes(index).is_none() {
            self.next.store(index + 1, Ordering::Relaxed);
        }
    }

    /// Copies a block; after the last one, waits for all transfers.
    fn copy(&self, index: usize, host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError> {
        let bytes = self.staged.copy_next(index, host, matrix)?;
        if index + 1 == self.order.len() && self.staged.next_bytes(index).is_none() {
            self.staged.finish()?;
        }
        Ok(bytes)
    }

    /// Releases the blocks, between two passes; when this returns, other users may take them.
    pub fn revoke(&self) {
        self.staged.revoke();
    }

    /// Returns the device's memory as type `S`, and the linear layer's number in it. Returns `None` if the
    /// layer is not adapted, or another kind of device made the copy.
    pub(crate) fn staged<S: StagedMatrices>(&self, layer: usize, target: Target) -> Option<(&S, usize)> {
        let number = *self.numbers.get(layer, target)?;
        let staged: &dyn Any = &*self.staged;
        Some((staged.downcast_ref()?, number as usize))
    }

    /// Returns the number of leading ranks that are missing on the device.
    pub(crate) fn missing_ranks(&self, host: &LoraMatrix, layer: usize, target: Target) -> usize {
        let number = self.numbers.get(layer, target);
        number.map_or(host.rank(), |&number| self.staged.first_rank(number as usize))
    }
}
