//! An adapter on its way to the device, or there.
//!
//! One thread brings its blocks of ranks, layer by layer in the order of a pass, from the last block of a layer to the
//! first; the compute thread goes on with whatever has arrived. What kind of memory the blocks go to, and how, is the
//! device's business ([`DeviceMemory`], [`StagedMatrices`]).

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

/// Where a device's copies are made: the blocks of a pool, which they share with keys and values.
pub trait DeviceMemory: Debug + Send + Sync {
    /// Blocks that a copy of `host` takes; `None` if no block holds the least of its pieces.
    fn blocks_for(&self, host: &HostMatrices) -> Option<u32>;

    /// A copy of `host` in so many blocks, of which nothing is there yet. They are its own until it is
    /// [revoked](DeviceCopy::revoke).
    ///
    /// # Panics
    ///
    /// If these are fewer blocks than [`blocks_for`](Self::blocks_for) says, or another copy's.
    fn copy_of(&self, host: &HostMatrices, blocks: &[BlockId]) -> DeviceCopy;

    /// Lets the next pass see what has arrived. A device that is lost is noticed by the pass.
    fn poll_arrivals(&self) {}
}

/// Why a block did not get to the device.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct CopyError(pub Box<dyn Error + Send + Sync>);

/// A device's memory for the matrices of one adapter, by their number in the order of a pass.
pub trait StagedMatrices: Any + Debug + Send + Sync {
    /// Bytes of the next block of a matrix; `None` if all of it is there, or on its way.
    fn next_bytes(&self, index: usize) -> Option<usize>;

    /// Ranks of a matrix from this one on are on the device.
    fn first_rank(&self, index: usize) -> usize;

    /// Copies the next block of `matrix`, which is number `index` of `host`; says how many bytes these are.
    ///
    /// # Errors
    ///
    /// The device refuses it.
    fn copy_next(&self, index: usize, host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError>;

    /// Returns when all that was copied is there.
    ///
    /// # Errors
    ///
    /// The device fails.
    fn finish(&self) -> Result<(), CopyError>;

    /// True if nothing that was copied is still on its way.
    fn has_arrived(&self) -> bool;

    /// Gives the blocks back, once nothing travels to them any more. No more is copied, and nobody computes with what is there.
    fn revoke(&self);
}

/// The device's copy of an adapter.
#[derive(Debug)]
pub struct DeviceCopy {
    /// The linear layers in the order of a pass.
    order: Vec<(usize, Target)>,
    /// Where in that order a linear layer is.
    numbers: ByLayer<u32>,
    staged: Box<dyn StagedMatrices>,
    /// The first in `order` that is not complete, or wholly on its way: those before it are.
    next: AtomicUsize,
    arrived_bytes: AtomicU64,
    bytes: u64,
    /// The device refused a copy: no more come.
    is_broken: AtomicBool,
}

impl DeviceCopy {
    /// A copy of `host` in `staged`, memory of which nothing is there yet.
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

    /// Bytes of all of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are there, or as good as there.
    #[must_use]
    pub fn arrived_bytes(&self) -> u64 {
        self.arrived_bytes.load(Ordering::Relaxed)
    }

    /// Whether all of it is there.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.next.load(Ordering::Relaxed) == self.order.len() && self.staged.has_arrived()
    }

    /// Bytes of the next block; `None` if nothing is left to be copied.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        if self.is_broken.load(Ordering::Relaxed) {
            return None;
        }
        let index = self.next.load(Ordering::Relaxed);
        if index < self.order.len() { self.staged.next_bytes(index) } else { None }
    }

    /// Copies the next block of `host`, which this is the copy of. Blocks come from one thread. After the last of them
    /// all of it is there, unless the device refused one.
    pub fn copy_next(&self, host: &HostMatrices) {
        let index = self.next.load(Ordering::Relaxed);
        let Some(&(layer, target)) = self.order.get(index) else { return };
        let Some(matrix) = host.get(layer, target) else { return };
        match self.copy(index, host, matrix) {
            Ok(bytes) => self.arrived_bytes.fetch_add(bytes as u64, Ordering::Relaxed),
            Err(error) => {
                tracing::error!(%error, "an adapter does not get to the device");
                self.is_broken.store(true, Ordering::Relaxed);
                return;
            }
        };
        if self.staged.next_bytes(index).is_none() {
            self.next.store(index + 1, Ordering::Relaxed);
        }
    }

    /// Copies a block, and waits for all that is on its way if it is the last.
    fn copy(&self, index: usize, host: &HostMatrices, matrix: &LoraMatrix) -> Result<usize, CopyError> {
        let bytes = self.staged.copy_next(index, host, matrix)?;
        if index + 1 == self.order.len() && self.staged.next_bytes(index).is_none() {
            self.staged.finish()?;
        }
        Ok(bytes)
    }

    /// Gives its blocks back, between two passes: others may have them when this returns.
    pub fn revoke(&self) {
        self.staged.revoke();
    }

    /// The memory as the device that made it knows it, and a linear layer's number in it. `None` if the linear layer is
    /// not adapted, or another device made it.
    pub(crate) fn staged<S: StagedMatrices>(&self, layer: usize, target: Target) -> Option<(&S, usize)> {
        let number = *self.numbers.get(layer, target)?;
        let staged: &dyn Any = &*self.staged;
        Some((staged.downcast_ref()?, number as usize))
    }

    /// Ranks of a linear layer that are missing, from the first.
    pub(crate) fn missing_ranks(&self, host: &LoraMatrix, layer: usize, target: Target) -> usize {
        let number = self.numbers.get(layer, target);
        number.map_or(host.rank(), |&number| self.staged.first_rank(number as usize))
    }
}
