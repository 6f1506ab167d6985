//! Keys and values in blocks of the device's memory.

use std::sync::Arc;

use kernels::{
    attention::{AttentionLimits, KvShape, QkvLayout},
    cuda::{
        BlockMemory, Cuda, CudaError, CudaStream, Matrix,
        attention::{KvPool, RowTable},
    },
};
use types::BlockId;

use super::CudaDevice;
use crate::forward::KvStore;

/// A pool of KV blocks; who owns which block is the caller's business. Adapters borrow some.
#[derive(Debug)]
pub(super) struct CudaKv {
    pool: KvPool,
    /// Of each layer.
    limits: Vec<AttentionLimits>,
}

impl CudaKv {
    /// Takes memory for `blocks` blocks, with the limits of each layer's attention.
    pub(super) fn new(
        cuda: &Arc<Cuda>,
        shape: KvShape,
        blocks: usize,
        limits: Vec<AttentionLimits>,
    ) -> Result<Self, CudaError> {
        Ok(Self { pool: KvPool::new(cuda, shape, blocks)?, limits })
    }

    /// Blocks there are.
    pub(super) fn blocks(&self) -> usize {
        self.pool.blocks()
    }

    /// The blocks themselves.
    pub(super) fn memory(&self) -> &Arc<BlockMemory> {
        self.pool.memory()
    }

    /// Bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.pool.memory().block_bytes()
    }

    /// Copies what a block holds.
    pub(super) fn read_block(
        &self,
        stream: &CudaStream,
        block: BlockId,
        bytes: &mut [u8],
    ) -> Result<(), CudaError> {
        self.pool.read_block(stream, block.0, bytes)
    }

    /// Replaces what a block holds.
    pub(super) fn write_block(
        &mut self,
        stream: &CudaStream,
        block: BlockId,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        self.pool.write_block(stream, block.0, bytes)
    }
}

impl KvStore<CudaDevice> for CudaKv {
    fn append(
        &mut self,
        device: &mut CudaDevice,
        layer: usize,
        qkv: &Matrix,
        layout: QkvLayout,
        batch: &RowTable,
    ) -> Result<(), CudaError> {
        self.pool.append(device.stream(), layer, qkv, layout, batch)
    }

    fn attend(
        &self,
        device: &mut CudaDevice,
        layer: usize,
        qkv: &Matrix,
        layout: QkvLayout,
        batch: &RowTable,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        self.pool.attend(device.stream(), layer, qkv, layout, batch, self.limits[layer], out)
    }
}
