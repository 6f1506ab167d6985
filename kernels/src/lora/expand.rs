//! Product with B, sixteen outputs in the lanes: `out[m] = finish(head[m] + sum over r of B[r] *
//! sums[m][r])`.
//!
//! An output element is one chain of multiply-adds over the ranks, in ascending order, from the leading sum
//! or 0. The chain may therefore be split at any rank and continued elsewhere.

use std::{ops::Range, ptr};

use super::{
    layout::{MAX_RANK, MatrixLayout, RANK_BLOCK},
    matrix::FactorView,
    shrink::tile_holds,
    stored::StoredElement,
};
use crate::simd::{Kernel, LANES, Simd};

#[derive(Clone, Copy)]
pub(super) enum Finish {
    Store,
    Add,
}

pub(super) struct Expand<'a> {
    pub(super) layout: &'a MatrixLayout,
    pub(super) b: FactorView<'a>,
    pub(super) ranks: Range<usize>,
    /// Rank blocks that contain the ranks.
    pub(super) blocks: Range<usize>,
    pub(super) rows: usize,
    /// Results of `Shrink` for these blocks.
    pub(super) sums: *mut f32,
    /// `[rows, layout.rows]` or null.
    pub(super) head: *const f32,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    pub(super) finish: Finish,
}

const MAX_BLOCKS: usize = MAX_RANK / RANK_BLOCK;

struct TilePosition<X> {
    row: usize,
    panel: usize,
    /// Address of panel 0 of each rank block, or where it would be if the piece had it.
    blocks: *const *const u8,
    /// Number of panel groups from `panel` on.
    groups: usize,
    lanes: usize,
    sums: *const X,
    sums_stride: usize,
}

impl<X> Clone for TilePosition<X> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<X> Copy for TilePosition<X> {}

impl Expand<'_> {
    /// # Safety
    /// `b` is valid for the ranks, the other pointers for the rows.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd, B: StoredElement>(&self) {
        let sums_stride = self.blocks.len() * RANK_BLOCK;
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let sums = if self.blocks.is_empty() {
                self.sums.cast_const().cast()
            } else {
                let first = self.blocks.start * RANK_BLOCK;
                let ranks = self.ranks.start - first..self.ranks.end - first;
                B::shrunk::<S>(self.sums, sums_stride, self.rows, ranks)
            };
            let mut blocks = [ptr::null(); MAX_BLOCKS];
            for number in 0..self.b.cut().count {
                let outputs = self.b.cut().features(number, self.layout.rows);
                let panel = outputs.start / LANES;
                for (block, begin) in self.blocks.clone().zip(&mut blocks) {
                    let before = self.layout.b_bytes_before(block * RANK_BLOCK);
                    let piece = self.b.piece(block, number, before);
                    *begin = piece.wrapping_sub(panel * self.panel_bytes::<B>(block));
                }
                let blocks = blocks.as_ptr();
                let place =
                    TilePosition { row: 0, panel, blocks, groups: 1, lanes: LANES, sums, sums_stride };
                self.piece::<S, B>(place, outputs.len());
            }
        }
    }

    /// Computes all rows of a piece of `outputs` outputs.
    #[inline(always)]
    unsafe fn piece<S: Simd, B: StoredElement>(&self, mut place: TilePosition<B::Input>, outputs: usize) {
        let full = outputs / LANES;
        let groups = if const { S::TILE == 8 } { full / 4 } else { 0 };
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            if const { S::TILE == 8 } {
                self.panels::<S, B, 4>(place, groups);
            }
            place.panel += 4 * groups;
            self.panels::<S, B, 1>(place, full - 4 * groups);
            place.panel += full - 4 * groups;
            place.lanes = outputs % LANES;
            self.panels::<S, B, 1>(place, usize::from(place.lanes > 0));
        }
    }

    /// Returns the bytes from one panel of a rank block to the next.
    #[inline(always)]
    fn panel_bytes<B: StoredElement>(&self, block: usize) -> usize {
        let width = RANK_BLOCK.min(self.layout.rank - block * RANK_BLOCK);
        width.div_ceil(B::STEP) * LANES * B::LANE_BYTES
    }

    /// Computes all rows of `groups` groups of `V` panels. Many rows use a group while it is in the
    /// first-level cache; few rows compute all groups in one call.
    #[inline(always)]
    unsafe fn panels<S: Simd, B: StoredElement, const V: usize>(
        &self,
        first: TilePosition<B::Input>,
        groups: usize,
    ) {
        let at_once = if self.rows < 4 { groups.max(1) } else { 1 };
        for group in (0..groups).step_by(at_once) {
            let mut place = TilePosition { panel: first.panel + group * V, groups: at_once, ..first };
            while place.row < self.rows {
                let left = self.rows - place.row;
                place.row += if const { tile_holds::<S>(6, V) && V > 1 } && left >= 6 {
                    S::call(ExpandTile::<B, 6, V>(self, place))
                } else if const { tile_holds::<S>(4, V) } && left >= 4 {
                    S::call(ExpandTile::<B, 4, V>(self, place))
                } else if const { tile_holds::<S>(2, V) && V > 1 } && left >= 2 {
                    S::call(ExpandTile::<B, 2, V>(self, place))
                } else {
                    S::call(ExpandTile::<B, 1, V>(self, place))
                };
            }
        }
    }
}

/// Product of `M` rows with a position's groups of `V` panels. Returns `M`.
struct ExpandTile<'a, B: StoredElement, const M: usize, const V: usize>(
    &'a Expand<'a>,
    TilePosition<B::Input>,
);

impl<B: StoredElement, const M: usize, const V: usize> Kernel for ExpandTile<'_, B, M, V> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self) -> usize {
        let Self(expand, first) = self;
        for group in 0..first.groups {
            let place = TilePosition { panel: first.panel + group * V, ..first };
            // SAFETY: the caller that made the tile guarantees its rows and panels.
            unsafe { Self(expand, place).group::<S>() };
        }
        M
    }
}

impl<B: StoredElement, const M: usize, const V: usize> ExpandTile<'_, B, M, V> {
    #[inline(always)]
    unsafe fn group<S: Simd>(&self) {
        let lanes = self.1.lanes;
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let mut totals = self.heads::<S>();
            for block in self.0.blocks.clone() {
                if lanes == LANES {
                    self.add_block::<S>(block, |from| B::load::<S>(from), &mut totals);
                } else {
                    self.add_block::<S>(block, |from| B::load_head::<S>(from, lanes), &mut totals);
                }
            }
            self.finish::<S>(totals);
        }
    }

    #[inline(always)]
    unsafe fn heads<S: Simd>(&self) -> [[S::F; V]; M] {
        let Self(expand, place) = self;
        if expand.head.is_null() {
            return [[S::splat(0.0); V]; M];
        }
        let stride = expand.layout.rows;
        // SAFETY: the caller guarantees that the leading sums have these rows and panels.
        unsafe {
            let head = expand.head.add(place.row * stride + place.panel * LANES);
            std::array::from_fn(|m| {
                std::array::from_fn(|v| S::load_head(head.add(m * stride + v * LANES), place.lanes))
            })
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, totals: [[S::F; V]; M]) {
        let Self(expand, place) = self;
        for (m, totals) in totals.into_iter().enumerate() {
            for (v, total) in totals.into_iter().enumerate() {
                // SAFETY: the caller guarantees that the output has these rows and panels.
                unsafe {
                    let to = expand.out.add((place.row + m) * expand.stride + (place.panel + v) * LANES);
                    let total = match expand.finish {
                        Finish::Store => total,
                        Finish::Add => S::add(S::load_head(to, place.lanes), total),
                    };
                    S::store_head(to, total, place.lanes);
                }
            }
        }
    }

    /// Continues the chains over the ranks of `block`.
    #[inline(always)]
    unsafe fn add_block<S: Simd>(
        &self,
        block: usize,
        load: impl Fn(*const u8) -> B::Weights<S>,
        totals: &mut [[S::F; V]; M],
    ) {
        let Self(expand, place) = self;
        let first = block * RANK_BLOCK;
        let width = RANK_BLOCK.min(expand.layout.rank - first);
        let start = expand.ranks.start.saturating_sub(first);
        let end = width.min(expand.ranks.end - first);
        let panel_bytes = expand.panel_bytes::<B>(block);
        // SAFETY: the caller guarantees that the block, the panels and the rows exist.
        unsafe {
            let begin = *place.blocks.add(block - expand.blocks.start);
            let b = begin.wrapping_add(place.panel * panel_bytes);
            let sums = place
                .sums
                .add(place.row * place.sums_stride + (block - expand.blocks.start) * RANK_BLOCK / B::STEP);
            for step in start / B::STEP..end.div_ceil(B::STEP) {
                let b = b.add(step * place.lanes * B::LANE_BYTES);
                let weights: [B::Weights<S>; V] = std::array::from_fn(|v| load(b.add(v * panel_bytes)));
                for (m, totals) in totals.iter_mut().enumerate() {
                    let x = B::factor::<S>(sums.add(m * place.sums_stride + step), LANES, LANES);
                    for (total, &weight) in totals.iter_mut().zip(&weights) {
                        *total = B::dot::<S>(*total, weight, x);
                    }
                }
            }
        }
    }
}
