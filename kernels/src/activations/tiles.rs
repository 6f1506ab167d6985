//! Rounds rows of activations to tiles of bf16.
//!
//! ```text
//! [rows / 16, groups, 16] of 32 bf16      fewer than sixteen rows: [groups, rows]
//! ```
//!
//! A tile is sixteen rows of a group of 32 columns. Missing rows of the last tile and missing columns of the
//! last group are zeros.

use super::{GROUP, SIDE};
use crate::simd::{Kernel, Simd};

/// A row of a tile: 32 columns of bf16 in a cache line.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(64))]
pub(crate) struct TileRow(pub(crate) [u16; GROUP]);

/// Rounds the tiles of rows from `first` to `last`.
#[derive(Clone, Copy)]
pub(super) struct RoundToTiles {
    pub(super) floats: *const f32,
    pub(super) tiles: *mut TileRow,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) first: usize,
    pub(super) last: usize,
}

// SAFETY: each thread gets a disjoint range of tiles; the buffers outlive the parallel region.
unsafe impl Sync for RoundToTiles {}

impl RoundToTiles {
    pub(super) fn over(&self, first: usize, last: usize) -> Self {
        Self { first, last, ..*self }
    }
}

impl Kernel for RoundToTiles {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (groups, tile_rows) = (self.width.div_ceil(GROUP), SIDE.min(self.rows));
        for tile in self.first..self.last {
            for m in 0..tile_rows {
                let row = tile * tile_rows + m;
                for group in 0..groups {
                    let at = (tile * groups + group) * tile_rows + m;
                    let columns = if row < self.rows { GROUP.min(self.width - group * GROUP) } else { 0 };
                    // SAFETY: `Activations` has sized both buffers, and no other thread has this tile.
                    unsafe {
                        let from = self.floats.wrapping_add(row * self.width + group * GROUP);
                        let to = &mut *self.tiles.add(at);
                        if columns == GROUP {
                            round(&*from.cast::<[f32; GROUP]>(), to);
                        } else {
                            let mut padded = [0.0; GROUP];
                            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), columns);
                            round(&padded, to);
                        }
                    }
                }
            }
        }
    }
}

/// Rounds to the nearest bf16, ties to even; a NaN stays a NaN.
// Integers, which the compiler turns into vectors: the instruction of AVX-512 loses subnormal values.
#[inline(always)]
fn round(from: &[f32; GROUP], to: &mut TileRow) {
    let mut k = 0;
    while k < GROUP {
        let bits = from[k].to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        to.0[k] = if is_nan { bits >> 16 | 0x40 } else { rounded } as u16;
        k += 1;
    }
}
