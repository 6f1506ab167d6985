//! Integer panels times many rows on a matrix unit. Codes are unpacked once for all rows; the unit returns
//! integer sums of groups through memory that stays in the first-level cache.
//!
//! While the unit computes one group, the sums of an earlier group are added to the float sums, by the same
//! operations in the same order as in `integer`. Both methods therefore give the same bits.

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

use super::{
    chunk::PanelChunk,
    packings::{GROUP_BYTES, IntegerPacking},
    part::{DecodeScratch, blocks},
    rows::{QuantizedRows, joined},
};
use crate::{
    activations::SIDE,
    simd::{Kernel, LANES, Simd, amx::Tiles},
};

/// Groups whose codes are unpacked at once: 24 KB.
const DEPTH: usize = 48;

/// Groups that the unit runs ahead: loading a tile and reading its sums takes as long as adding 4 groups.
const AHEAD: usize = 4;

/// Buffers for integer sums: of the groups that the unit is ahead, and of the group that is added.
const TURNS: usize = 8;

const SUMS: usize = SIDE * LANES;

/// Maximum number of rows per pass over unpacked codes.
pub(super) const MAX_ROWS: usize = 64;

/// Computes `panel` for `rows`, a multiple of sixteen, at most [`MAX_ROWS`].
pub(super) struct AmxPanels<'a, P> {
    pub(super) chunk: &'a PanelChunk<'a>,
    pub(super) tiles: &'a Tiles,
    pub(super) panel: usize,
    pub(super) rows: Range<usize>,
    pub(super) packing: PhantomData<P>,
}

#[repr(align(64))]
struct TileScratch {
    codes: [MaybeUninit<u8>; DEPTH * GROUP_BYTES],
    /// Integer sums of groups, `[TURNS, high and low bytes, parts]`.
    whole: [MaybeUninit<i32>; TURNS * 4 * SUMS],
    /// Float sums of rows between two blocks of groups.
    sums: DecodeScratch<{ MAX_ROWS * LANES }>,
}

impl<P: IntegerPacking> Kernel for AmxPanels<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        debug_assert!(self.rows.len() <= MAX_ROWS && self.rows.len().is_multiple_of(SIDE));
        let mut desk = TileScratch {
            codes: [const { MaybeUninit::uninit() }; _],
            whole: [const { MaybeUninit::uninit() }; _],
            sums: DecodeScratch::new(),
        };
        for groups in blocks(0..self.chunk.x.groups(), DEPTH) {
            self.unpack::<S>(&groups, &mut desk);
            for row in self.rows.clone().step_by(SIDE) {
                self.tile::<S>(row, &groups, &mut desk);
            }
        }
    }
}

impl<P: IntegerPacking> AmxPanels<'_, P> {
    #[inline(always)]
    fn unpack<S: Simd>(&self, groups: &Range<usize>, desk: &mut TileScratch) {
        let mut to = desk.codes.as_mut_ptr().cast::<u8>();
        for group in groups.clone() {
            // SAFETY: panel and group exist, and there is room for `DEPTH` groups.
            unsafe {
                for step in P::codes::<S>(self.chunk.part.matrix, self.panel, group) {
                    S::store_bytes(to, step);
                    to = to.add(GROUP_BYTES / 8);
                }
            }
        }
    }

    /// Computes integer sums of sixteen rows of bytes with a group of codes.
    ///
    /// # Safety
    /// The conditions of [`Tiles::dot_halves`] hold.
    #[inline(always)]
    unsafe fn dot(&self, x: *const i8, codes: *const u8, sums: *mut i32) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            if P::PARTS == 2 {
                self.tiles.dot_halves(x, codes, sums);
            } else {
                self.tiles.dot_group(x, codes, sums);
            }
        }
    }

    /// Computes sixteen rows from `row` on, over some groups.
    #[inline(always)]
    fn tile<S: Simd>(&self, row: usize, groups: &Range<usize>, desk: &mut TileScratch) {
        let x = QuantizedRows::of::<P>(self.chunk.x, row);
        let (codes, whole) = (desk.codes.as_ptr().cast::<u8>(), desk.whole.as_mut_ptr().cast::<i32>());
        let kept = desk.sums.as_mut_ptr().wrapping_add((row - self.rows.start) * LANES);
        let w = self.chunk.part.matrix;
        let mut sums = [S::splat(0.0); SIDE];
        // SAFETY: rows, groups and panel exist, the tile registers are configured, and `desk` has room for all codes
        // and sums.
        unsafe {
            if groups.start > 0 {
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(kept.add(m * LANES));
                }
            }
            let turn = |group: usize| whole.add(group % TURNS * 2 * P::PARTS * SUMS);
            let dot = |group: usize| {
                let codes = codes.add((group - groups.start) * GROUP_BYTES);
                self.dot(x.bytes(group, 0), codes, turn(group));
                if x.wide(group) != 0 {
                    self.dot(x.low(group, 0), codes, turn(group).add(P::PARTS * SUMS));
                }
            };
            (groups.start..groups.end.min(groups.start + AHEAD)).for_each(dot);
            for group in groups.clone() {
                if group + AHEAD < groups.end {
                    dot(group + AHEAD);
                }
                let whole = turn(group).cast_const();
                if x.wide(group) == 0 {
                    self.add::<S, 1>(&x, group, whole, &mut sums);
                } else {
                    self.add::<S, 2>(&x, group, whole, &mut sums);
                }
            }
            for (m, &sum) in sums.iter().enumerate() {
                if groups.end == x.groups {
                    self.chunk.out.put::<S>(self.panel, row + m, S::mul(sum, S::splat(w.unit())));
                } else {
                    S::store(kept.add(m * LANES), sum);
                }
            }
        }
    }

    /// Adds the integer sums of a group to the float sums; with `BYTES` 2, some rows are wide.
    ///
    /// # Safety
    /// Rows and group exist, and `whole` points to their sums.
    #[inline(always)]
    unsafe fn add<S: Simd, const BYTES: usize>(
        &self,
        x: &QuantizedRows,
        group: usize,
        whole: *const i32,
        sums: &mut [S::F; SIDE],
    ) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let numbers = P::numbers::<S>(self.chunk.part.matrix, self.panel, group);
            let wide = x.wide(group);
            for (m, sum) in sums.iter_mut().enumerate() {
                let mut parts = x.starts::<S, P>(group, m);
                for (part, start) in parts.iter_mut().enumerate().take(P::PARTS) {
                    let high = whole.add(part * SUMS + m * LANES);
                    let mut whole = S::load_i32(high);
                    if BYTES == 2 && wide >> m & 1 != 0 {
                        whole = joined::<S>(whole, S::load_i32(high.add(P::PARTS * SUMS)));
                    }
                    *start = if P::HAS_ZERO { S::add_i32(whole, *start) } else { whole };
                }
                *sum = x.add::<S, P>(parts, numbers, (group, m), *sum);
            }
        }
    }
}
