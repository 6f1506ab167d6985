//! Attention over paged keys and values with grouped heads.
//!
//! A block holds [`BLOCK_TOKENS`] positions of a sequence, for all layers:
//!
//! ```text
//! block = layers x kv_heads x { keys [head_dim, 16] | values [16, head_dim padded to 16] }
//! ```
//!
//! Keys lie transposed, so a vector is one feature of sixteen positions and a score needs no horizontal sum. Scores are
//! taken for *spans* of positions at absolute multiples of their length, and each rescales the running sums once
//! (online softmax). A query's bits depend on its own keys and values alone: not on its neighbours in the tile, not on
//! how the prompt was cut into chunks, and not on what unused slots of a block hold.
//!
//! `layout` says where everything lies, `append` writes it, `attend` reads it.

mod append;
mod attend;
mod layout;

use std::{io, sync::Arc};

pub use self::layout::{BLOCK_TOKENS, KvPrecision, KvRows, KvShape, MAX_HEAD_DIM, QkvLayout};
use self::{
    append::Append,
    attend::{Attend, AttendIn, tiles},
};
use crate::{blocks::BlockMemory, isa::Isa, pool::Pool};

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
            let data = self.memory.as_ptr();
            match shape.precision {
                KvPrecision::F32 => {
                    isa.dispatch(Append::<f32> { data: data.cast(), shape, layer, qkv, layout, rows })
                }
                KvPrecision::F16 => {
                    isa.dispatch(Append::<u16> { data: data.cast(), shape, layer, qkv, layout, rows })
                }
            }
        }
    }

    /// `out[row, head] = softmax(q · keys) values` over the row's position and those before it, as far back as `window`
    /// reaches. `out` has rows of `heads * head_dim`. Queries are scaled already.
    ///
    /// # Panics
    ///
    /// As [`KvPool::append`].
    #[allow(clippy::too_many_arguments, reason = "one operation; its operands are what they are")]
    pub fn attend(
        &self,
        pool: &mut Pool,
        isa: Isa,
        layer: usize,
        qkv: &[f32],
        layout: QkvLayout,
        batch: &[KvRows<'_>],
        window: Option<usize>,
        out: &mut [f32],
    ) {
        let rows = self.check(layer, qkv, layout, batch);
        assert!(out.len() >= rows * layout.heads * layout.head_dim, "a row of out for each row of qkv");
        let tiles = tiles(batch, layout);
        let out = OutPtr(out.as_mut_ptr());
        let window = window.unwrap_or(usize::MAX);
        pool.run(tiles.len() * layout.kv_heads, |i| {
            let (tile, kv_head, out) = (tiles[i / layout.kv_heads], i % layout.kv_heads, &out);
            let attend = Attend { shape: self.shape, layer, qkv, layout, tile, kv_head, window, out: out.0 };
            let data = self.memory.as_ptr();
            match self.shape.precision {
                KvPrecision::F32 => isa.dispatch(AttendIn::<f32> { data: data.cast(), attend }),
                KvPrecision::F16 => isa.dispatch(AttendIn::<u16> { data: data.cast(), attend }),
            }
        });
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

struct OutPtr(*mut f32);
// SAFETY: tiles write disjoint elements of a buffer that outlives the parallel region.
unsafe impl Sync for OutPtr {}
