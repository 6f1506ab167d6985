//! Rows of a tile (tokens x heads of a group) that are computed together, and their memory.

use std::{mem::MaybeUninit, ops::Range};

use crate::{
    attention::{
        attend::{Attend, SEGMENT, SPAN},
        bf16_rounding::to_bf16,
        layout::{BLOCK_TOKENS, MAX_HEAD_DIM},
        sum::SoftmaxSum,
    },
    simd::{GROUP, LANES},
};

/// Maximum rows that are computed together.
pub(super) const MAX_ROWS: usize = 64;

/// Rows of a tile of the matrix unit.
pub(super) const SIDE: usize = 16;

/// Elements between rows of scores, and of weights. Rows at multiples of 1 KB would share few sets of the
/// cache.
pub(super) const SCORE_STRIDE: usize = SPAN + LANES;
pub(super) const WEIGHT_STRIDE: usize = SPAN + 2 * LANES;

/// Pairs of columns in a group.
pub(super) const PAIRS: usize = GROUP / 2;

/// Memory of a tile, whose parts are whole cache lines.
#[repr(C, align(64))]
pub(super) struct TileMemory {
    queries: [MaybeUninit<u32>; MAX_ROWS * MAX_HEAD_DIM / 2],
    scores: [MaybeUninit<f32>; MAX_ROWS * SCORE_STRIDE],
    weights: [MaybeUninit<u16>; MAX_ROWS * WEIGHT_STRIDE],
    last_values: [MaybeUninit<u32>; BLOCK_TOKENS / 2 * MAX_HEAD_DIM],
    sums: [[MaybeUninit<SoftmaxSum>; MAX_ROWS]; 2],
}

impl TileMemory {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            queries: [const { MaybeUninit::uninit() }; _],
            scores: [const { MaybeUninit::uninit() }; _],
            weights: [const { MaybeUninit::uninit() }; _],
            last_values: [const { MaybeUninit::uninit() }; _],
            sums: [const { [const { MaybeUninit::uninit() }; _] }; _],
        }
    }
}

/// Up to [`MAX_ROWS`] rows of a tile.
pub(super) struct TileRows<'a> {
    pub(super) attend: Attend<'a>,
    /// First row in the tile of `attend`, and number of rows.
    pub(super) first: usize,
    pub(super) rows: usize,
    /// Groups of 32 columns of a head, and the columns of a value with padding.
    pub(super) groups: usize,
    pub(super) padded: usize,
    /// Positions that any of the rows sees.
    pub(super) visible: Range<usize>,
    /// `[rows / 16, groups, 16, 16]` pairs of columns.
    queries: *mut u32,
    /// `[rows, SCORE_STRIDE]`: scores of a span.
    scores: *mut f32,
    /// `[rows, WEIGHT_STRIDE]`: weights of a span in bf16.
    weights: *mut u16,
    /// Values of the last block, with zeros beyond the sequence.
    last_values: *mut u32,
    /// `[rows]`: sums of all segments so far, and of one more.
    pub(super) sums: *mut SoftmaxSum,
    pub(super) more_sums: *mut SoftmaxSum,
}

impl<'a> TileRows<'a> {
    #[inline(always)]
    pub(super) fn new(attend: Attend<'a>, first: usize, rows: usize, memory: &'a mut TileMemory) -> Self {
        let [sums, more_sums] = &mut memory.sums;
        Self {
            attend,
            first,
            rows,
            groups: attend.shape.padded_key() / GROUP,
            padded: attend.shape.padded(),
            // The first row sees the earliest position, the last row the latest.
            visible: attend.query(first).visible.0..attend.query(first + rows - 1).visible.1,
            queries: memory.queries.as_mut_ptr().cast(),
            scores: memory.scores.as_mut_ptr().cast(),
            weights: memory.weights.as_mut_ptr().cast(),
            last_values: memory.last_values.as_mut_ptr().cast(),
            sums: sums.as_mut_ptr().cast(),
            more_sums: more_sums.as_mut_ptr().cast(),
        }
    }

    /// Returns the rows of a tile of the matrix unit.
    #[inline(always)]
    pub(super) fn unit_rows(&self) -> usize {
        self.rows.min(SIDE)
    }

    /// Returns the rows of all tiles of the unit; those after the last row are zeros.
    #[inline(always)]
    pub(super) fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(self.unit_rows())
    }

    /// Returns the pairs of columns of a group of a query; the rows of a tile are 16 pairs apart.
    #[inline(always)]
    pub(super) fn query(&self, row: usize, group: usize) -> *mut u32 {
        self.queries.wrapping_add(((row / SIDE * self.groups + group) * SIDE + row % SIDE) * PAIRS)
    }

    #[inline(always)]
    pub(super) fn scores(&self, row: usize) -> *mut f32 {
        self.scores.wrapping_add(row * SCORE_STRIDE)
    }

    #[inline(always)]
    pub(super) fn weights(&self, row: usize) -> *mut u16 {
        self.weights.wrapping_add(row * WEIGHT_STRIDE)
    }

    /// Returns the keys of a block: 16 pairs of columns of its positions for each pair.
    #[inline(always)]
    pub(super) fn keys(&self, block: usize) -> *const u32 {
        self.attend.keys(block).cast()
    }

    /// Returns the values of a block, 8 rows of `padded` pairs of positions.
    #[inline(always)]
    pub(super) fn values(&self, block: usize) -> *const u32 {
        if block == self.attend.positions() / BLOCK_TOKENS {
            self.last_values
        } else {
            self.stored_values(block)
        }
    }

    #[inline(always)]
    fn stored_values(&self, block: usize) -> *const u32 {
        self.keys(block).wrapping_add(self.attend.shape.key_elements() / 2)
    }

    /// Rounds the queries, and copies the values of a last block that is not full.
    #[inline(always)]
    pub(super) fn gather(&self) {
        for row in 0..self.padded_rows() {
            for group in 0..self.groups {
                let (columns, from) = if row < self.rows {
                    let query = self.attend.query(self.first + row).q;
                    let left = self.attend.layout.head_dim - group * GROUP;
                    (GROUP.min(left), query.wrapping_add(group * GROUP))
                } else {
                    (0, std::ptr::null())
                };
                // SAFETY: a query has `head_dim` columns; the memory has room for each group of each row.
                unsafe { round_group(from, columns, self.query(row, group).cast()) };
            }
        }
        for row in self.rows..self.padded_rows() {
            // SAFETY: the memory has room for the weights of each row.
            unsafe { self.weights(row).write_bytes(0, SPAN) };
        }
        let positions = self.attend.positions();
        if !positions.is_multiple_of(BLOCK_TOKENS) && positions <= self.attend.segments.1 * SEGMENT {
            self.copy_last_values(positions / BLOCK_TOKENS, positions % BLOCK_TOKENS);
        }
    }

    /// Copies the values of the first `count` positions of a block, and zeros for the others.
    #[inline(always)]
    fn copy_last_values(&self, block: usize, count: usize) {
        let from = self.stored_values(block);
        for pair in 0..BLOCK_TOKENS / 2 {
            let mask = match count.saturating_sub(2 * pair) {
                0 => 0,
                1 => 0xffff,
                _ => u32::MAX,
            };
            for at in pair * self.padded..(pair + 1) * self.padded {
                // SAFETY: the block has values for 8 pairs of positions, and the copy has room for as many.
                unsafe { self.last_values.add(at).write(*from.add(at) & mask) };
            }
        }
    }

    /// Sets the sums of all rows to those over no positions.
    #[inline(always)]
    pub(super) fn clear(&self, sums: *mut SoftmaxSum) {
        for row in 0..self.padded_rows() {
            // SAFETY: the memory has room for a sum of each row.
            unsafe { SoftmaxSum::clear(sums.add(row), self.padded) };
        }
    }
}

/// Rounds the first `columns` of a group; the others are zeros.
#[inline(always)]
unsafe fn round_group(from: *const f32, columns: usize, to: *mut u16) {
    // SAFETY: the caller guarantees `columns` numbers and room for a group.
    unsafe {
        if columns == GROUP {
            return round_all(&*from.cast(), to);
        }
        let mut group = [0.0; GROUP];
        std::ptr::copy_nonoverlapping(from, group.as_mut_ptr(), columns);
        round_all(&group, to);
    }
}

// A loop over arrays, which the compiler turns into vectors.
#[inline(always)]
unsafe fn round_all(from: &[f32; GROUP], to: *mut u16) {
    let mut k = 0;
    while k < GROUP {
        // SAFETY: the caller guarantees room for a group.
        unsafe { to.add(k).write(to_bf16(from[k])) };
        k += 1;
    }
}
