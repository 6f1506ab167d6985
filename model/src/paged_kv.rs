//! Keys and values in blocks of memory of this process.

use std::io;

use kernels::attention::{KvPool, KvRows, KvShape, QkvLayout};

use crate::forward::{Compute, KvStore};

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

impl KvStore for PagedKv {
    fn append(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        qkv: &[f32],
        layout: QkvLayout,
        rows: &[KvRows<'_>],
    ) {
        self.pool.append(compute.isa, layer, qkv, layout, rows);
    }

    fn attend(
        &self,
        compute: &mut Compute,
        layer: usize,
        qkv: &[f32],
        layout: QkvLayout,
        rows: &[KvRows<'_>],
        out: &mut [f32],
    ) {
        self.pool.attend(&mut compute.pool, compute.isa, layer, qkv, layout, rows, self.window, out);
    }
}
