//! KV blocks in process memory.

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

/// A pool of KV blocks; the caller assigns them to sequences.
#[derive(Debug)]
pub struct PagedKv {
    pool: KvPool,
    limits: Vec<AttentionLimits>,
}

impl PagedKv {
    /// Allocates `blocks` blocks; `limits` are the attention limits of each layer.
    ///
    /// # Errors
    /// Memory for the blocks is missing.
    pub fn new(shape: KvShape, blocks: usize, limits: Vec<AttentionLimits>) -> io::Result<Self> {
        Ok(Self { pool: KvPool::new(shape, blocks)?, limits })
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.pool.memory().blocks()
    }

    /// Returns the bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.pool.shape().block_bytes()
    }

    /// Copies the contents of a block to `bytes`.
    ///
    /// # Panics
    /// If the block does not exist, or `bytes` does not have the length of one block.
    pub fn read_block(&self, block: BlockId, bytes: &mut [u8]) {
        self.pool.read_block(block.0, bytes);
    }

    /// Replaces the contents of a block.
    ///
    /// # Panics
    /// If the block does not exist, or `bytes` does not have the length of one block.
    pub fn write_block(&mut self, block: BlockId, bytes: &[u8]) {
        self.pool.write_block(block.0, bytes);
    }

    /// Returns the memory of the blocks, of which some may be leased to adapters.
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
