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

use std::io;

pub use self::layout::{BLOCK_TOKENS, KvPrecision, KvRows, KvShape, MAX_HEAD_DIM, QkvLayout};
use self::{
    append::Append,
    attend::{Attend, AttendIn, tiles},
};
use crate::{buffer::Buffer, isa::Isa, pool::Pool};

/// A pool of KV blocks.
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    blocks: usize,
    data: Elements,
}

#[derive(Debug)]
enum Elements {
    F32(Buffer<f32>),
    F16(Buffer<u16>),
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
        let elements = shape.block_elements().checked_mul(blocks).ok_or(io::ErrorKind::OutOfMemory)?;
        let data = match shape.precision {
            KvPrecision::F32 => Elements::F32(Buffer::zeroed(elements)?),
            KvPrecision::F16 => Elements::F16(Buffer::zeroed(elements)?),
        };
        Ok(Self { shape, blocks, data })
    }

    /// Its shape.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
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
            match &mut self.data {
                Elements::F32(data) => {
                    isa.dispatch(Append { data: data.as_ptr(), shape, layer, qkv, layout, rows })
                }
                Elements::F16(data) => {
                    isa.dispatch(Append { data: data.as_ptr(), shape, layer, qkv, layout, rows })
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
            match &self.data {
                Elements::F32(data) => isa.dispatch(AttendIn { data: data.as_ptr(), attend }),
                Elements::F16(data) => isa.dispatch(AttendIn { data: data.as_ptr(), attend }),
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
            assert!(slice.blocks.iter().all(|&block| (block as usize) < self.blocks), "blocks of this pool");
        }
        rows
    }
}

struct OutPtr(*mut f32);
// SAFETY: tiles write disjoint elements of a buffer that outlives the parallel region.
unsafe impl Sync for OutPtr {}
