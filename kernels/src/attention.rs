//! Attention over paged keys and values with grouped heads.
//!
//! A block holds [`BLOCK_TOKENS`] positions of a sequence, for all layers:
//!
//! ```text
//! block = layers x kv_heads x { keys [head_dim, 16] | values [16, head_dim padded to 16] | scales }
//! ```
//!
//! Keys lie transposed, so a vector is one feature of sixteen positions and a score needs no horizontal sum. Scores are
//! taken for *spans* of positions at absolute multiples of their length, and each rescales the running sums once
//! (online softmax). Two spans are a *segment*, whose sums begin at nothing and are then joined in the order of positions
//! (FlashDecoding), so that threads can share a long context. A query's bits depend on its own keys and values alone: not on its neighbours in the tile, not on
//! how the prompt was cut into chunks, and not on what unused slots of a block hold.
//!
//! Bytes have a scale for each key and each value of a head ([`KvPrecision::Int8`]): a score is multiplied with its key's, a weight
//! with its value's.
//!
//! `layout` says where everything lies, `kv_dtype` as which numbers, `append` writes it, `attend` reads it, `sum` is what it
//! sums, `share` cuts what few queries have to read.

mod append;
mod attend;
mod kv_dtype;
mod layout;
mod share;
mod sum;

use std::{io, marker::PhantomData, sync::Arc};

pub use self::layout::{
    AttentionLimits, BLOCK_TOKENS, KvPrecision, KvRows, KvShape, MAX_HEAD_DIM, QkvLayout,
};
use self::{
    append::{Append, AppendAs},
    attend::{Attend, AttendIn, TileTarget, segments, tiles},
    share::SplitTiles,
};
use crate::{blocks::BlockMemory, isa::Isa, pool::ThreadPool};

/// A pool of KV blocks.
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    memory: Arc<BlockMemory>,
}

impl KvPool {
    /// A pool of `blocks` blocks.
    ///
    /// # Errors
    ///
    /// There is no memory.
    ///
    /// # Panics
    ///
    /// If the heads are wider than [`MAX_HEAD_DIM`].
    pub fn new(shape: KvShape, blocks: usize) -> io::Result<Self> {
        assert!(shape.head_dim <= MAX_HEAD_DIM, "heads of at most {MAX_HEAD_DIM}");
        Ok(Self { shape, memory: BlockMemory::new(shape.block_bytes(), blocks)? })
    }

    /// Its shape.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// What its blocks lie in, and may be lent from.
    #[must_use]
    pub fn memory(&self) -> &Arc<BlockMemory> {
        &self.memory
    }

    /// Copies what a block holds, [`KvShape::block_bytes`] bytes.
    ///
    /// # Panics
    ///
    /// If the block does not exist or is lent, or `bytes` is not one block's worth.
    pub fn read_block(&self, block: u32, bytes: &mut [u8]) {
        let from = self.block(block, bytes.len());
        // SAFETY: the block exists and is this pool's alone, whose writers need it exclusively.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Replaces what a block holds by what [`KvPool::read_block`] gave, of whatever pool of this shape.
    ///
    /// # Panics
    ///
    /// As [`KvPool::read_block`].
    pub fn write_block(&mut self, block: u32, bytes: &[u8]) {
        let to = self.block(block, bytes.len());
        // SAFETY: as above, and the pool is borrowed exclusively; whatever is written is a value.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn block(&self, block: u32, bytes: usize) -> *mut u8 {
        assert!(self.memory.is_own(block), "block {block} of {} that are not lent", self.memory.blocks());
        assert_eq!(bytes, self.memory.block_bytes(), "bytes of one block");
        self.memory.as_ptr().wrapping_add(block as usize * bytes)
    }

    /// Writes the keys and values of `qkv` to their sequences' blocks.
    ///
    /// # Panics
    ///
    /// If a sequence has too few blocks, a block does not exist, or the shapes do not fit together.
    pub fn append(&mut self, isa: Isa, layer: usize, qkv: &[f32], layout: QkvLayout, batch: &[KvRows<'_>]) {
        self.check(layer, qkv, layout, batch);
        let shape = self.shape;
        for &rows in batch {
            let append = Append { data: self.memory.as_ptr(), shape, layer, qkv, layout, rows };
            match shape.precision {
                KvPrecision::F32 => isa.dispatch(AppendAs::<f32>(append, PhantomData)),
                KvPrecision::F16 => isa.dispatch(AppendAs::<u16>(append, PhantomData)),
                KvPrecision::Int8 => isa.dispatch(AppendAs::<i8>(append, PhantomData)),
            }
        }
    }

    /// `out[row, head] = softmax(q · keys) values` over the row's position and those before it, within these
    /// `limits`. `out` has rows of `heads * head_dim`. Queries are scaled already.
    ///
    /// # Panics
    ///
    /// As [`KvPool::append`].
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
        out: &mut [f32],
    ) {
        let rows = self.check(layer, qkv, layout, batch);
        assert!(out.len() >= rows * layout.heads * layout.head_dim, "a row of out for each row of qkv");
        let window = limits.window.unwrap_or(usize::MAX);
        let (tiles, out) = (tiles(batch, layout), AttendOutPtr(out.as_mut_ptr()));
        let of = |i: usize| {
            let (tile, kv_head, out) = (tiles[i / layout.kv_heads], i % layout.kv_heads, &out);
            let (data, segments, to) = (self.memory.as_ptr(), segments(tile, window), TileTarget::Out(out.0));
            let (shape, cap) = (self.shape, limits.cap);
            Attend { data, shape, layer, qkv, layout, tile, kv_head, window, cap, segments, to }
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
        }
    }

    /// Checks what the kernels rely on; returns the number of rows.
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
