//! Products of a span on the matrix unit.
//!
//! Up to four tiles of sums are computed together: tiles of rows that share each load of keys and values, or,
//! for few rows, blocks or columns that share each load of queries and weights.
//!
//! Measured with a prompt of 2048 tokens: weights take half of the time, scores and values a sixth each.
//! Products between the rows of weights, to be executed beside the vectors, were slower by a tenth.

use std::ops::Range;

use super::{
    SpanProducts,
    rows::{PAIRS, SCORE_STRIDE, SIDE, TileRows, WEIGHT_STRIDE},
};
use crate::{
    attention::{attend::SPAN, layout::BLOCK_TOKENS, sum::SoftmaxSum},
    simd::{LANES, Simd, amx::attention::AmxAttention, prefetch},
};

/// Blocks between a prefetch and its use.
const AHEAD: usize = 4;

const CACHE_LINE: usize = 64;

pub(super) struct UnitProducts(pub(super) AmxAttention);

impl SpanProducts for UnitProducts {
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, tile: &TileRows<'_>, blocks: Range<usize>) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match tile.padded_rows().div_ceil(SIDE) {
                1 => self.score_rows::<1, 4>(tile, blocks),
                2 => self.score_rows::<2, 2>(tile, blocks),
                3 => self.score_rows::<3, 1>(tile, blocks),
                _ => self.score_rows::<4, 1>(tile, blocks),
            }
        }
    }

    #[inline(always)]
    unsafe fn mix<S: Simd>(&self, tile: &TileRows<'_>, blocks: Range<usize>, sums: *mut SoftmaxSum) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match tile.padded_rows().div_ceil(SIDE) {
                1 => self.mix_rows::<1, 4>(tile, &blocks, sums),
                2 => self.mix_rows::<2, 2>(tile, &blocks, sums),
                3 => self.mix_rows::<3, 1>(tile, &blocks, sums),
                _ => self.mix_rows::<4, 1>(tile, &blocks, sums),
            }
        }
    }
}

impl UnitProducts {
    /// Scores of `R` tiles of rows, `B` blocks together.
    #[inline(always)]
    unsafe fn score_rows<const R: usize, const B: usize>(&self, tile: &TileRows<'_>, blocks: Range<usize>) {
        let mut block = blocks.start;
        while block < blocks.end {
            // SAFETY: the caller guarantees the blocks.
            block += unsafe {
                if blocks.end - block >= B {
                    self.score_blocks::<R, B>(tile, block)
                } else {
                    self.score_blocks::<R, 1>(tile, block)
                }
            };
        }
    }

    /// Scores of `R` tiles of rows with the `B` blocks from `block` on; returns `B`.
    #[inline(always)]
    unsafe fn score_blocks<const R: usize, const B: usize>(
        &self,
        tile: &TileRows<'_>,
        block: usize,
    ) -> usize {
        let unit = &self.0;
        for b in 0..B {
            prefetch_block(tile, block + b + AHEAD);
        }
        (0..R * B).for_each(|sum| unit.clear(sum));
        for group in 0..tile.groups {
            for b in 0..B {
                // SAFETY: the caller guarantees the blocks and the queries.
                unsafe {
                    unit.load_keys(tile.keys(block + b).add(group * PAIRS * BLOCK_TOKENS).cast());
                    for r in 0..R {
                        // The queries of one tile of rows stay in their register.
                        if R > 1 || b == 0 {
                            unit.load_queries(tile.query(r * SIDE, group).cast());
                        }
                        unit.add_scores(r * B + b);
                    }
                }
            }
        }
        for r in 0..R {
            for b in 0..B {
                let to = tile.scores(r * SIDE).wrapping_add((block + b) * BLOCK_TOKENS % SPAN);
                // SAFETY: the scores have room for each row and position of a span.
                unsafe { unit.store_sum(r * B + b, to, size_of::<f32>() * SCORE_STRIDE) };
            }
        }
        B
    }

    /// Mixes values for `R` tiles of rows, `C` vectors of columns together.
    #[inline(always)]
    unsafe fn mix_rows<const R: usize, const C: usize>(
        &self,
        tile: &TileRows<'_>,
        blocks: &Range<usize>,
        sums: *mut SoftmaxSum,
    ) {
        let mut column = 0;
        while column < tile.padded {
            // SAFETY: the caller upholds the same contract.
            column += unsafe {
                if tile.padded - column >= C * LANES {
                    self.mix_columns::<R, C>(tile, blocks, sums, column)
                } else {
                    self.mix_columns::<R, 1>(tile, blocks, sums, column)
                }
            };
        }
    }

    /// Mixes `C` vectors of columns from `column` on; returns their columns.
    #[inline(always)]
    unsafe fn mix_columns<const R: usize, const C: usize>(
        &self,
        tile: &TileRows<'_>,
        blocks: &Range<usize>,
        sums: *mut SoftmaxSum,
        column: usize,
    ) -> usize {
        let unit = &self.0;
        // SAFETY: the caller guarantees the blocks, and weights and sums of all rows.
        unsafe {
            // The values of a sum come first.
            let sums_at = |r: usize, c: usize| sums.add(r * SIDE).cast::<f32>().add(column + c * LANES);
            for r in 0..R {
                (0..C).for_each(|c| unit.load_sum(r * C + c, sums_at(r, c), size_of::<SoftmaxSum>()));
            }
            for block in blocks.clone() {
                let (values, at) = (tile.values(block), block * BLOCK_TOKENS % SPAN);
                for c in 0..C {
                    unit.load_values(values.add(column + c * LANES).cast(), size_of::<u32>() * tile.padded);
                    for r in 0..R {
                        // The weights of one tile of rows stay in their register.
                        if R > 1 || c == 0 {
                            unit.load_weights(
                                tile.weights(r * SIDE).add(at),
                                size_of::<u16>() * WEIGHT_STRIDE,
                            );
                        }
                        unit.add_values(r * C + c);
                    }
                }
            }
            for r in 0..R {
                (0..C).for_each(|c| unit.store_sum(r * C + c, sums_at(r, c), size_of::<SoftmaxSum>()));
            }
        }
        C * LANES
    }
}

/// Prefetches keys and values of a block: the hardware prefetcher cannot predict the next blocks.
#[inline(always)]
fn prefetch_block(tile: &TileRows<'_>, block: usize) {
    if block * BLOCK_TOKENS >= tile.visible.end {
        return;
    }
    let from = tile.keys(block).cast::<u8>();
    for at in (0..tile.attend.shape.head_bytes()).step_by(CACHE_LINE) {
        prefetch(from.wrapping_add(at));
    }
}
