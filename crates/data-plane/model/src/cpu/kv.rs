//! Keys and values in blocks of memory of this process.

use std::{convert::Infallible, io, sync::Arc};

use kernels::{
    Activations,
    attention::{AttentionLimits, KvPool, KvShape, QkvLayout},
    blocks::BlockMemory,
};
use types::BlockId;

use crate::{
    cpu::{Compute, RowTable},
    forward::KvStore,
};

/// A pool of KV blocks; who owns which block is the caller's business.
#[derive(Debug)]
pub struct PagedKv {
    pool: KvPool,
    /// Of each layer.
    limits: Vec<AttentionLimits>,
}

impl PagedKv {
    /// Takes memory for `blocks` blocks, with the limits of each layer's attention.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn new(shape: KvShape, blocks: usize, limits: Vec<AttentionLimits>) -> io::Result<Self> {
        Ok(Self { pool: KvPool::new(shape, blocks)?, limits })
    }

    /// Blocks there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.pool.memory().blocks()
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.pool.shape().block_bytes()
    }

    /// Copies what a block holds.
    ///
    /// # Panics
    /// If the block does not exist, or `bytes` is not one block's worth.
    pub fn read_block(&self, block: BlockId, bytes: &mut [u8]) {
        self.pool.read_block(block.0, bytes);
    }

    /// Replaces what a block holds.
    ///
    /// # Panics
    /// As [`read_block`](Self::read_block).
    pub fn write_block(&mut self, block: BlockId, bytes: &[u8]) {
        self.pool.write_block(block.0, bytes);
    }

    /// What the blocks lie in, and may be lent from to adapters.
    #[must_use]
    pub fn memory(&self) -> &Arc<BlockMemory> {
        self.pool.memory()
    }
}

impl KvStore<Compute> for PagedKv {
    fn append(
        &mut self,
        device: &mut Compute,
        layer: usize,
        qkv: &Vec<f32>,
        layout: QkvLayout,
        batch: &RowTable,
    ) -> Result<(), Infallible> {
        self.pool.append(device.isa, layer, qkv, layout, &batch.sequences());
        for rows in batch.trunks() {
            self.pool.append(device.isa, layer, qkv, layout, &[rows]);
        }
        Ok(())
    }

    fn attend(
        &self,
        device: &mut Compute,
        layer: usize,
        qkv: &Vec<f32>,
        layout: QkvLayout,
        batch: &RowTable,
        out: &mut Activations,
    ) -> Result<(), Infallible> {
        let (rows, Compute { pool, isa }) = (batch.sequences(), device);
        self.pool.attend(pool, *isa, layer, qkv, layout, &rows, self.limits[layer], out.values_mut());
        Ok(())
    }
}
