//! Keys and values in blocks of the device's memory.

use kernels::{
    attention::{KvShape, QkvLayout},
    cuda::{
        CudaError, Matrix, Stream,
        attention::{KvPool, RowTable},
    },
};

use super::CudaDevice;
use crate::forward::KvStore;

/// A pool of KV blocks; who owns which block is the caller's business.
#[derive(Debug)]
pub(super) struct CudaKv {
    pool: KvPool,
    blocks: usize,
    window: Option<usize>,
}

impl CudaKv {
    /// Takes memory for `blocks` blocks. With a `window`, a token sees that many positions at most.
    pub(super) fn new(
        stream: &Stream,
        shape: KvShape,
        blocks: usize,
        window: Option<usize>,
    ) -> Result<Self, CudaError> {
        Ok(Self { pool: KvPool::new(stream, shape, blocks)?, blocks, window })
    }

    /// Blocks there are.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
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
        self.pool.attend(device.stream(), layer, qkv, layout, batch, self.window, out)
    }
}
