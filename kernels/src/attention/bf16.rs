//! Attention with keys and values in bf16, in the order of the matrix unit.
//!
//! Queries, keys, values and softmax weights are rounded to bf16: to the nearest, ties to even; a NaN stays a
//! NaN; a magnitude below 2^-54 becomes zero. All other numbers are floats of 32 bits, and each operation is
//! rounded once. For a query `q`, a key `k` and the values `v`:
//!
//! ```text
//! score   for each group of 32 columns of the head, zeros beyond its end:
//!         e = 0; o = 0; for i in 0..16 { e = fma(q[2i], k[2i], e); o = fma(q[2i+1], k[2i+1], o) }
//!         score = score + (e + o)
//! weight  x = score - largest; 0 unless x >= -37, else 2^(x log2 e), rounded to bf16:
//!         n = round(x log2 e); f = fma(x, -log2 e, n)
//!         2^n * fma(fma(fma(C3, f, C2), f, C1), f, 1)      -0.055008933, 0.24221103, -0.693283
//! total   sixteen lanes; for each 32 positions, in lane i: total = (total + weight[2i+1]) + weight[2i]
//! values  for each block of 16 positions, in each column:
//!         e = 0; o = 0; for i in 0..8 { e = fma(weight[2i], v[2i], e); o = fma(weight[2i+1], v[2i+1], o) }
//!         sum = sum + (e + o)
//! ```
//!
//! `largest` is the largest score of the spans so far that is a number. Where a span raises it, the earlier
//! total and sums are multiplied by `e^(old - new)`, and sums that are denormals become zeros. Soft caps,
//! masks, sinks, spans and segments are those of the other precisions.
//!
//! These operations are the arithmetic of `TDPBF16PS`, which takes and gives denormals as zero. All products
//! are multiples of 2^-122, and so are their sums, so none is a denormal, and plain multiply-adds of vectors
//! give the bits of the unit. Only `sum + (e + o)` can be a denormal, since rescaled sums are multiples of
//! less.
//!
//! ```text
//! keys    [head_dim padded to 32 / 2][16 positions][2]     16 rows are a tile of 32 columns
//! values  [16 positions / 2][head_dim padded to 16][2]     8 rows of 16 columns are a tile
//! ```
//!
//! Slots of the last block beyond the sequence may hold anything. The scores of these slots are masked, and
//! the values of the block are read from a copy with zeros.
//!
//! - `append`: writes keys and values to blocks.
//! - `rows`: the rows of a tile and their memory.
//! - `softmax`: turns scores into weights.
//! - `amx`, `vectors`: products of a span.

mod amx;
mod append;
mod rows;
mod softmax;
mod vectors;

use std::ops::Range;

pub(super) use self::append::AppendBf16;
use self::{
    amx::UnitProducts,
    rows::{MAX_ROWS, TileMemory, TileRows},
    vectors::VectorProducts,
};
use super::{
    attend::{Attend, SEGMENT, SPAN},
    layout::{BLOCK_TOKENS, KvRows, QkvLayout},
    sum::SoftmaxSum,
};
use crate::simd::{Kernel, Simd, amx::attention::AmxAttention};

/// Number of tiles per thread from which tiles may be large.
const ENOUGH: usize = 4;
/// Minimum rows of a tile, unless a batch has fewer.
const MIN_ROWS: usize = 16;

/// Returns the rows of a tile: few enough that all threads get work, as many as share reads of the keys.
pub(super) fn tile_rows(batch: &[KvRows<'_>], layout: QkvLayout, threads: usize) -> usize {
    let group = layout.heads / layout.kv_heads;
    let tiles = |rows: usize| -> usize {
        batch.iter().map(|slice| (slice.rows * group).div_ceil(rows) * layout.kv_heads).sum()
    };
    let mut rows = MAX_ROWS;
    while rows > MIN_ROWS && tiles(rows) < ENOUGH * threads {
        rows /= 2;
    }
    rows
}

/// [`Attend`] over blocks of bf16.
pub(super) struct AttendBf16<'a> {
    pub(super) attend: Attend<'a>,
    /// Whether the matrix unit computes the products.
    pub(super) has_unit: bool,
}

impl Kernel for AttendBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut memory = TileMemory::new();
        let rows = self.attend.rows();
        for first in (0..rows).step_by(MAX_ROWS) {
            let tile = TileRows::new(self.attend, first, MAX_ROWS.min(rows - first), &mut memory);
            if S::BESIDE_MATRIX_UNIT && self.has_unit {
                // SAFETY: `attend` has checked that the unit may be used; this thread does not use it otherwise.
                let unit = unsafe { AmxAttention::lay_out(tile.unit_rows()) };
                S::call(TileSums { tile: &tile, products: &UnitProducts(unit) });
            } else {
                S::call(TileSums { tile: &tile, products: &VectorProducts });
            }
        }
    }
}

/// Products of all rows of a tile with the blocks of a span.
trait SpanProducts {
    /// Computes the scores of the positions of `blocks`.
    ///
    /// # Safety
    /// The blocks exist and lie within one span, and the queries are gathered.
    unsafe fn score<S: Simd>(&self, tile: &TileRows<'_>, blocks: Range<usize>);

    /// Adds `weights * values` of the positions of `blocks` to the sums.
    ///
    /// # Safety
    /// The blocks exist and lie within one span; weights and sums of all rows are initialized.
    unsafe fn mix<S: Simd>(&self, tile: &TileRows<'_>, blocks: Range<usize>, sums: *mut SoftmaxSum);
}

/// Sums of all rows of a tile over its segments.
struct TileSums<'a, 'b, P> {
    tile: &'a TileRows<'b>,
    products: &'a P,
}

impl<P: SpanProducts> Kernel for TileSums<'_, '_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let tile = self.tile;
        let (begin, end) = tile.attend.segments;
        tile.gather();
        self.segment::<S>(begin, tile.sums);
        for segment in begin + 1..end {
            self.segment::<S>(segment, tile.more_sums);
            for row in 0..tile.rows {
                // SAFETY: `segment` has initialized the sums of all rows.
                unsafe { (*tile.sums.add(row)).join::<S>(&*tile.more_sums.add(row), tile.padded) };
            }
        }
        for row in 0..tile.rows {
            // SAFETY: `segment` has initialized the sums of all rows.
            tile.attend.put::<S>(tile.first + row, unsafe { &*tile.sums.add(row) });
        }
    }
}

impl<P: SpanProducts> TileSums<'_, '_, P> {
    /// Sums the positions of `segment` that the rows see.
    #[inline(always)]
    fn segment<S: Simd>(&self, segment: usize, sums: *mut SoftmaxSum) {
        let tile = self.tile;
        tile.clear(sums);
        let begin = tile.visible.start.max(segment * SEGMENT);
        let end = tile.visible.end.min((segment + 1) * SEGMENT);
        let mut span = begin / SPAN * SPAN;
        while span < end {
            let blocks = span.max(begin) / BLOCK_TOKENS..end.min(span + SPAN).div_ceil(BLOCK_TOKENS);
            // SAFETY: the rows see positions of these blocks, so the blocks exist. `clear` has initialized the sums,
            // `soften` initializes the weights.
            unsafe {
                self.products.score::<S>(tile, blocks.clone());
                for row in 0..tile.rows {
                    tile.soften::<S>(row, &blocks, &mut *sums.add(row));
                }
                self.products.mix::<S>(tile, blocks, sums);
            }
            span += SPAN;
        }
        for row in 0..tile.rows {
            // A sum of -0 becomes 0 if a neighbour in the tile sees one more block, so each becomes 0.
            // SAFETY: `clear` has initialized the sums.
            unsafe { (*sums.add(row)).map_values::<S>(tile.padded, |v| S::add(v, S::splat(0.0))) };
        }
    }
}
