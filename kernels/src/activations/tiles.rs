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

/// Rows in tiles of bf16, as products read them.
#[derive(Clone, Copy)]
pub(crate) struct TiledRows<'a> {
    pub(super) lines: &'a [TileRow],
    pub(super) rows: usize,
    /// Sixteen, or the number of rows when they were rounded if that was smaller.
    pub(super) tile_rows: usize,
    /// Groups of the lines, of which these rows are `groups` from `first_group` on.
    pub(super) line_groups: usize,
    pub(super) first_group: usize,
    pub(super) groups: usize,
}

impl<'a> TiledRows<'a> {
    /// Takes `rows` rows of `groups` groups in tiles of sixteen rows.
    pub(crate) fn whole(lines: &'a [TileRow], rows: usize, groups: usize) -> Self {
        Self { lines, rows, tile_rows: SIDE, line_groups: groups, first_group: 0, groups }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the rows of a tile, 1 to 16.
    #[inline(always)]
    pub(crate) fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(self.tile_rows)
    }

    #[inline(always)]
    pub(crate) fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the first row of `group` of a tile. The next rows follow, and after them the next group.
    #[inline(always)]
    pub(crate) fn tile(&self, tile: usize, group: usize) -> *const TileRow {
        let group = tile * self.line_groups + self.first_group + group;
        self.lines.as_ptr().wrapping_add(group * self.tile_rows)
    }

    /// Returns a group of a row.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize, group: usize) -> &[u16; GROUP] {
        let tile = (row / SIDE * self.line_groups + self.first_group + group) * self.tile_rows;
        &self.lines[tile + row % SIDE].0
    }

    /// Takes `groups` groups from `first` on.
    pub(crate) fn columns(self, first: usize, groups: usize) -> Self {
        debug_assert!(first + groups <= self.groups, "the rows have the groups");
        Self { first_group: self.first_group + first, groups, ..self }
    }
}

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
                            to.round(&*from.cast::<[f32; GROUP]>());
                        } else {
                            let mut padded = [0.0; GROUP];
                            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), columns);
                            to.round(&padded);
                        }
                    }
                }
            }
        }
    }
}

// Integers, which the compiler turns into vectors: the instruction of AVX-512 loses subnormal values.
impl TileRow {
    /// Returns lines as words of 32 bits, two bf16 each.
    pub(super) fn words(lines: &[Self]) -> &[f32] {
        // SAFETY: a line is 64 bytes without padding, and any 32 bits are an f32.
        unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * (GROUP / 2)) }
    }

    /// Returns lines as words of 32 bits to be written.
    pub(super) fn words_mut(lines: &mut [Self]) -> &mut [f32] {
        // SAFETY: as in `words`, and any bits are a bf16.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * (GROUP / 2)) }
    }

    /// Rounds 32 columns to bf16.
    #[inline(always)]
    pub(crate) fn round(&mut self, from: &[f32; GROUP]) {
        let mut k = 0;
        while k < GROUP {
            self.0[k] = Self::rounded(from[k]) as u16;
            k += 1;
        }
    }

    /// Returns the bits of the nearest bf16, ties to even; a NaN stays a NaN.
    #[inline(always)]
    pub(crate) fn rounded(value: f32) -> u32 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        if is_nan { bits >> 16 | 0x40 } else { rounded }
    }
}
