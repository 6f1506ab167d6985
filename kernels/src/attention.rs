//! Attention over the paged KV cache, with grouped heads.
//!
//! A block holds [`BLOCK_TOKENS`] positions of a sequence, for all layers:
//!
//! ```text
//! block = layers x kv_heads x { keys [head_dim, 16] | values [16, head_dim padded to 16] | scales }
//! ```
//!
//! [`KvPrecision::Bf16`] has a layout and an arithmetic of its own, which `bf16` defines.
//!
//! Keys are stored transposed: a vector is one feature of sixteen positions, so a score needs no horizontal
//! sum. Scores are computed for *spans* of positions at absolute multiples of their length, and each span
//! rescales the running sums once (online softmax). Two spans form a *segment*. Each segment's sums start at
//! zero and are joined in the order of positions (FlashDecoding), so that threads can share a long context.
//!
//! A query's bits depend only on its own keys and values. Neighbours in the tile, the chunks of the prompt
//! and the contents of unused slots do not change them.
//!
//! A head may have a *sink*: one more score of the softmax, without a value. The sink only enlarges the total
//! by which the finished sum is divided, so it does not depend on spans and segments.
//!
//! With [`KvPrecision::Int8`] each key and each value of a head has a scale: a score is multiplied by its
//! key's scale, a weight by its value's scale.
//!
//! - `layout`: layout of blocks and rows.
//! - `kv_dtype`: element types of the KV cache.
//! - `append`: writes keys and values to blocks.
//! - `attend`: computes attention from blocks.
//! - `sum`: the running softmax sum of a query.
//! - `bf16_rounding`: rounding to the bf16 values that attention multiplies.
//! - `bf16`: keys and values in bf16, multiplied by the matrix unit or by vectors with the same bits.
//! - `split_kv`: splits long contexts of few queries among threads.

mod append;
mod attend;
mod bf16;
mod bf16_rounding;
mod kv_dtype;
mod layout;
mod split_kv;
mod sum;

use std::{io, marker::PhantomData, sync::Arc};

pub use self::layout::{
    AttentionLimits, BLOCK_TOKENS, KvPrecision, KvRows, KvShape, MAX_HEAD_DIM, QkvLayout,
};
use self::{
    append::{Append, AppendAs},
    attend::{Attend, AttendIn, TILE_ROWS, TileTarget, segments, tiles},
    bf16::{AppendBf16, AttendBf16},
    split_kv::SplitTiles,
};
use crate::{blocks::BlockMemory, isa::Isa, pool::ThreadPool};

/// A pool of KV blocks of one shape.
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    memory: Arc<BlockMemory>,
}

impl KvPool {
    /// Allocates a pool of `blocks` blocks.
    ///
    /// # Errors
    /// Fails if the memory cannot be allocated.
    ///
    /// # Panics
    /// Panics if the heads are wider than [`MAX_HEAD_DIM`].
    pub fn new(shape: KvShape, blocks: usize) -> io::Result<Self> {
        assert!(shape.head_dim <= MAX_HEAD_DIM, "heads of at most {MAX_HEAD_DIM}");
        Ok(Self { shape, memory: BlockMemory::new(shape.block_bytes(), blocks)? })
    }

    /// Returns the shape of all blocks.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the memory of the blocks, which may also lend blocks to adapters.
    #[must_use]
    pub fn memory(&self) -> &Arc<BlockMemory> {
        &self.memory
    }

    /// Copies the [`KvShape::block_bytes`] bytes of `block` to `bytes`.
    ///
    /// # Panics
    /// Panics if the block does not exist or is lent, or `bytes` is not one block long.
    pub fn read_block(&self, block: u32, bytes: &mut [u8]) {
        let from = self.block(block, bytes.len());
        // SAFETY: the block exists and is owned by this pool; writers need `&mut self`, so no write is concurrent.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Overwrites a block with bytes that [`KvPool::read_block`] returned, from any pool of this shape.
    ///
    /// # Panics
    /// Panics under the conditions of [`KvPool::read_block`].
    pub fn write_block(&mut self, block: u32, bytes: &[u8]) {
        let to = self.block(block, bytes.len());
        // SAFETY: the block exists and is owned by this pool, which is borrowed exclusively; every bit pattern is a
        // valid value.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn block(&self, block: u32, bytes: usize) -> *mut u8 {
        assert!(self.memory.is_own(block), "block {block} of {} that are not lent", self.memory.blocks());
        assert_eq!(bytes, self.memory.block_bytes(), "bytes of one block");
        self.memory.as_ptr().wrapping_add(block as usize * bytes)
    }

    /// Writes the keys and values of `qkv` to the blocks of their sequences.
    ///
    /// # Panics
    /// Panics if a sequence has too few blocks, a block does not exist, or the shapes do not match.
    pub fn append(&mut self, isa: Isa, layer: usize, qkv: &[f32], layout: QkvLayout, batch: &[KvRows<'_>]) {
        self.check(layer, qkv, layout, batch);
        let shape = self.shape;
        for &rows in batch {
            let append = Append { data: self.memory.as_ptr(), shape, layer, qkv, layout, rows };
            match shape.precision {
                KvPrecision::F32 => isa.dispatch(AppendAs::<f32>(append, PhantomData)),
                KvPrecision::F16 => isa.dispatch(AppendAs::<u16>(append, PhantomData)),
                KvPrecision::Int8 => isa.dispatch(AppendAs::<i8>(append, PhantomData)),
                KvPrecision::Bf16 => isa.dispatch(AppendBf16(append)),
            }
        }
    }

    /// Computes `out[row, head] = softmax(q · keys) values` over the row's position and earlier ones within
    /// `limits`. `sinks` is empty, or has one for each query head. `out` has rows of `heads * head_dim`.
    /// Queries are already scaled.
    ///
    /// # Panics
    /// Panics under the conditions of [`KvPool::append`], or if only some heads have a sink.
    #[allow(clippy::too_many_arguments, reason = "one operation; its operands are what they are")]
    pub fn attend(
        &self,
        pool: &mut ThreadPool,
        isa: Isa,
        layer: usize,
        qkv: &[f32],
        layout: QkvLayout,
        batch: &[KvRows<'_>],
        limits: AttentionLimits,
        sinks: &[f32],
        out: &mut [f32],
    ) {
        let rows = self.check(layer, qkv, layout, batch);
        assert!(sinks.is_empty() || sinks.len() == layout.heads, "a sink for each head, or none");
        assert!(out.len() >= rows * layout.heads * layout.head_dim, "a row of out for each row of qkv");
        let window = limits.window.unwrap_or(usize::MAX);
        let tile_rows = match self.shape.precision {
            KvPrecision::Bf16 => bf16::tile_rows(batch, layout, pool.threads()),
            _ => TILE_ROWS,
        };
        let (tiles, out) = (tiles(batch, layout, tile_rows), AttendOutPtr(out.as_mut_ptr()));
        let of = |i: usize| {
            let (tile, kv_head, out) = (tiles[i / layout.kv_heads], i % layout.kv_heads, &out);
            let (data, segments, to) = (self.memory.as_ptr(), segments(tile, window), TileTarget::Out(out.0));
            let (shape, cap) = (self.shape, limits.cap);
            Attend { data, shape, layer, qkv, layout, tile, kv_head, window, cap, sinks, segments, to }
        };
        let count = tiles.len() * layout.kv_heads;
        match SplitTiles::new(count, pool.threads(), of) {
            Some(shares) => shares.run(pool, isa, of, |part| self.attend_one(isa, part)),
            None => pool.run(count, |i| self.attend_one(isa, of(i))),
        }
    }

    fn attend_one(&self, isa: Isa, attend: Attend<'_>) {
        match self.shape.precision {
            KvPrecision::F32 => isa.dispatch(AttendIn::<f32>(attend, PhantomData)),
            KvPrecision::F16 => isa.dispatch(AttendIn::<u16>(attend, PhantomData)),
            KvPrecision::Int8 => isa.dispatch(AttendIn::<i8>(attend, PhantomData)),
            KvPrecision::Bf16 => isa.dispatch(AttendBf16 { attend, has_unit: isa.is_fast_at_bf16() }),
        }
    }

    /// Checks the conditions that the kernels rely on and returns the number of rows.
    fn check(&self, layer: usize, qkv: &[f32], layout: QkvLayout, batch: &[KvRows<'_>]) -> usize {
        assert!(layer < self.shape.layers, "layer {layer}");
        assert_eq!(
            (layout.kv_heads, layout.head_dim),
            (self.shape.kv_heads, self.shape.head_dim),
            "the pool's heads"
        );
        assert!(layout.heads.is_multiple_of(layout.kv_heads), "whole groups of heads");
        let rows = qkv.len() / layout.stride();
        let in_order = |pair: &[KvRows<'_>]| pair[0].first_row + pair[0].rows <= pair[1].first_row;
        assert!(batch.windows(2).all(in_order), "slices have rows of their own, in ascending order");
        for slice in batch {
            assert!(slice.first_row + slice.rows <= rows, "the slice's rows exist");
            assert!(slice.position + slice.rows <= slice.blocks.len() * BLOCK_TOKENS, "enough blocks");
            assert!(
                slice.blocks.iter().all(|&block| self.memory.is_own(block)),
                "blocks of this pool, not lent"
            );
        }
        rows
    }
}

struct AttendOutPtr(*mut f32);
// SAFETY: tiles write disjoint elements of a buffer that outlives the parallel region.
unsafe impl Sync for AttendOutPtr {}
