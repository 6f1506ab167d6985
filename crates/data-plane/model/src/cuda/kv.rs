//! KV blocks in device memory.

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

/// A pool of KV blocks; the caller assigns them to sequences and leases some to adapters.
#[derive(Debug)]
pub(super) struct CudaKv {
    pool: KvPool,
    limits: Vec<AttentionLimits>,
}

impl CudaKv {
    /// Allocates `blocks` blocks; `limits` are the attention limits of each layer.
    pub(super) fn new(
        cuda: &Arc<Cuda>,
        shape: KvShape,
        blocks: usize,
        limits: Vec<AttentionLimits>,
    ) -> Result<Self, CudaError> {
        Ok(Self { pool: KvPool::new(cuda, shape, blocks)?, limits })
    }

    pub(super) fn blocks(&self) -> usize {
        self.pool.blocks()
    }

    pub(super) fn memory(&self) -> &Arc<BlockMemory> {
        self.pool.memory()
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.pool.memory().block_bytes()
    }

    pub(super) fn read_block(
        &self,
        stream: &CudaStream,
        block: BlockId,
        bytes: &mut [u8],
    ) -> Result<(), CudaError> {
        self.pool.read_block(stream, block.0, bytes)
    }

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
