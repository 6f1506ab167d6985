//! Keys and values in blocks of memory of this process.

use std::{convert::Infallible, io};

use kernels::{
    Activations,
    attention::{KvPool, KvShape, QkvLayout},
};

use crate::{
    cpu::{Compute, RowTable},
    forward::KvStore,
};

/// A pool of KV blocks; who owns which block is the caller's business.
#[derive(Debug)]
pub struct PagedKv {
    pool: KvPool,
    blocks: usize,
    window: Option<usize>,
}

impl PagedKv {
    /// Takes memory for `blocks` blocks. With a `window`, a token sees that many positions at most.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn new(shape: KvShape, blocks: usize, window: Option<usize>) -> io::Result<Self> {
        Ok(Self { pool: KvPool::new(shape, blocks)?, blocks, window })
    }

    /// Blocks there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
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
        self.pool.attend(pool, *isa, layer, qkv, layout, &rows, self.window, out.values_mut());
        Ok(())
    }
}
