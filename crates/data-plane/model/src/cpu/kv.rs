//! KV blocks in process memory.

use std::{convert::Infallible, io, sync::Arc};

use kernels::{
    Activations,
    attention::{AttentionLimits, KvPool, KvPrecision, KvShape, QkvLayout},
    blocks::BlockMemory,
};
use types::BlockId;

use crate::{
    cpu::{Compute, RowTable},
    forward::{KvStore, ModelContext},
};

/// A pool of KV blocks; the caller assigns them to sequences.
#[derive(Debug)]
pub struct PagedKv {
    pool: KvPool,
    limits: Vec<AttentionLimits>,
    /// Origin of each layer's keys; empty if the elements have bits enough without.
    key_origins: Vec<Vec<f32>>,
    /// Sinks of each layer's heads; empty for models without.
    sinks: Vec<Vec<f32>>,
}

impl PagedKv {
    /// Allocates `blocks` blocks for `model`.
    ///
    /// # Errors
    /// Memory for the blocks is missing.
    pub fn new(shape: KvShape, blocks: usize, model: &ModelContext) -> io::Result<Self> {
        let key_origins = match shape.precision {
            KvPrecision::Bf16 | KvPrecision::Int8 => model.attention.key_origins.clone(),
            KvPrecision::F32 | KvPrecision::F16 => Vec::new(),
        };
        let (limits, sinks) = (model.config.limits(), model.attention.sinks.clone());
        Ok(Self { pool: KvPool::new(shape, blocks)?, limits, key_origins, sinks })
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
    fn center_keys(&self, layer: usize, qkv: &mut Vec<f32>, layout: QkvLayout) {
        let Some(origin) = self.key_origins.get(layer).filter(|origin| !origin.is_empty()) else { return };
        for row in qkv.chunks_exact_mut(layout.stride()) {
            row[layout.key_column()..].iter_mut().zip(origin).for_each(|(key, origin)| *key -= origin);
        }
    }

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
        let (limits, sinks) = (self.limits[layer], self.sinks.get(layer).map_or(&[][..], Vec::as_slice));
        self.pool.attend(pool, *isa, layer, qkv, layout, &rows, limits, sinks, out.values_mut());
        Ok(())
    }
}
