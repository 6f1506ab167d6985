//! Products of a span by vectors, with the bits of the matrix unit.

use std::ops::Range;

use super::{
    SpanProducts,
    rows::{PAIRS, TileRows},
};
use crate::{
    attention::{attend::SPAN, layout::BLOCK_TOKENS, sum::SoftmaxSum},
    simd::{LANES, Simd},
};

pub(super) struct VectorProducts;

impl SpanProducts for VectorProducts {
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, tile: &TileRows<'_>, blocks: Range<usize>) {
        for block in blocks {
            let mut row = 0;
            while row < tile.rows {
                // SAFETY: the caller upholds the same contract.
                row += unsafe {
                    match (S::TILE, tile.rows - row) {
                        (8.., 6..) => score_rows::<S, 6>(tile, block, row),
                        (4.., 2..) => score_rows::<S, 2>(tile, block, row),
                        _ => score_rows::<S, 1>(tile, block, row),
                    }
                };
            }
        }
    }

    #[inline(always)]
    unsafe fn mix<S: Simd>(&self, tile: &TileRows<'_>, blocks: Range<usize>, sums: *mut SoftmaxSum) {
        let mut row = 0;
        while row < tile.rows {
            // SAFETY: the caller upholds the same contract.
            row += unsafe {
                match (S::TILE, tile.rows - row) {
                    (8.., 6..) => mix_rows::<S, 6>(tile, &blocks, row, sums),
                    (4.., 2..) => mix_rows::<S, 2>(tile, &blocks, row, sums),
                    _ => mix_rows::<S, 1>(tile, &blocks, row, sums),
                }
            };
        }
    }
}

/// Chains of the even and of the odd products of `R` rows.
struct Chains<S: Simd, const R: usize> {
    even: [S::F; R],
    odd: [S::F; R],
}

impl<S: Simd, const R: usize> Chains<S, R> {
    #[inline(always)]
    fn new() -> Self {
        Self { even: [S::splat(0.0); R], odd: [S::splat(0.0); R] }
    }

    /// Adds the products of sixteen pairs at `pairs` with one pair of row `r` at `of_row(r)`.
    #[inline(always)]
    unsafe fn add(&mut self, pairs: *const u32, of_row: impl Fn(usize) -> *const u32) {
        // SAFETY: the caller guarantees sixteen pairs, and one for each row.
        unsafe {
            let [even, odd] = S::widen_bf16(S::load_bytes(pairs.cast()));
            for r in 0..R {
                let pair = of_row(r).read();
                self.even[r] = S::fused(S::splat(f32::from_bits(pair << 16)), even, self.even[r]);
                self.odd[r] = S::fused(S::splat(f32::from_bits(pair & 0xffff_0000)), odd, self.odd[r]);
            }
        }
    }

    #[inline(always)]
    fn sum(&self, r: usize) -> S::F {
        S::add(self.even[r], self.odd[r])
    }
}

/// Scores of `R` rows with a block; returns `R`.
#[inline(always)]
unsafe fn score_rows<S: Simd, const R: usize>(tile: &TileRows<'_>, block: usize, row: usize) -> usize {
    let mut sums = [S::splat(0.0); R];
    // SAFETY: the caller guarantees the block and the queries; the scores have room for each row and position.
    unsafe {
        for group in 0..tile.groups {
            let mut chains = Chains::<S, R>::new();
            let keys = tile.keys(block).add(group * PAIRS * BLOCK_TOKENS);
            let queries: [_; R] = std::array::from_fn(|r| tile.query(row + r, group).cast_const());
            for pair in 0..PAIRS {
                chains.add(keys.add(pair * BLOCK_TOKENS), |r| queries[r].add(pair));
            }
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = S::add(*sum, chains.sum(r));
            }
        }
        for (r, &sum) in sums.iter().enumerate() {
            S::store(tile.scores(row + r).add(block * BLOCK_TOKENS % SPAN), sum);
        }
    }
    R
}

/// Mixes values for `R` rows; returns `R`.
#[inline(always)]
unsafe fn mix_rows<S: Simd, const R: usize>(
    tile: &TileRows<'_>,
    blocks: &Range<usize>,
    row: usize,
    sums: *mut SoftmaxSum,
) -> usize {
    for column in (0..tile.padded).step_by(LANES) {
        // SAFETY: the caller guarantees the blocks, and weights and sums of all rows.
        unsafe {
            let at: [_; R] = std::array::from_fn(|r| (*sums.add(row + r)).values_mut().add(column));
            let mut sums = at.map(|at| S::load(at));
            for block in blocks.clone() {
                let mut chains = Chains::<S, R>::new();
                let values = tile.values(block).add(column);
                let weights: [_; R] = std::array::from_fn(|r| {
                    tile.weights(row + r).add(block * BLOCK_TOKENS % SPAN).cast::<u32>()
                });
                for pair in 0..BLOCK_TOKENS / 2 {
                    chains.add(values.add(pair * tile.padded), |r| weights[r].add(pair));
                }
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = S::flushed(S::add(*sum, chains.sum(r)));
                }
            }
            for (r, &sum) in sums.iter().enumerate() {
                S::store(at[r], sum);
            }
        }
    }
    R
}
