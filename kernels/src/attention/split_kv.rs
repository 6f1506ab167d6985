//! Splits long contexts of few queries among threads: each sums one segment, and the segments are joined.

use super::{
    attend::{Attend, TileTarget},
    sum::SoftmaxSum,
};
use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, Simd},
};

/// Number of tiles per thread from which tiles are not split.
const ENOUGH: usize = 8;

/// Work of all threads for a few tiles with long contexts.
pub(super) struct SplitTiles {
    /// One entry for each segment of each tile.
    parts: Vec<TileSegment>,
    /// One entry, over all segments, for each tile that has several.
    cut: Vec<TileSegment>,
    scratch: Vec<f32>,
}

#[derive(Clone, Copy)]
struct TileSegment {
    tile: usize,
    segments: (usize, usize),
    /// Offset of the segment's sums in `scratch`, in elements.
    at: usize,
}

struct SplitScratch(*mut f32);
// SAFETY: each part writes a range of its own.
unsafe impl Sync for SplitScratch {}

impl SplitTiles {
    /// Splits `tiles` tiles; returns `None` if computing each tile as a whole is faster.
    pub(super) fn new<'a>(
        tiles: usize,
        threads: usize,
        attend: impl Fn(usize) -> Attend<'a>,
    ) -> Option<Self> {
        let segments = |tile| attend(tile).segments;
        if tiles >= ENOUGH * threads || (0..tiles).all(|tile| segments(tile).1 - segments(tile).0 <= 1) {
            return None;
        }
        let (mut parts, mut cut, mut used) = (Vec::new(), Vec::new(), 0);
        for tile in 0..tiles {
            let (begin, end) = segments(tile);
            if end - begin > 1 {
                cut.push(TileSegment { tile, segments: (begin, end), at: used });
            }
            for segment in begin..end {
                parts.push(TileSegment { tile, segments: (segment, segment + 1), at: used });
                used += numbers(&attend(tile));
            }
        }
        Some(Self { parts, cut, scratch: vec![0.0; used] })
    }

    /// Computes all parts with `one`, then joins the tiles that were split.
    pub(super) fn run<'a>(
        mut self,
        pool: &mut ThreadPool,
        isa: Isa,
        attend: impl Fn(usize) -> Attend<'a> + Sync,
        one: impl Fn(Attend<'a>) + Sync,
    ) {
        let scratch = SplitScratch(self.scratch.as_mut_ptr());
        pool.run(self.parts.len(), |i| {
            let (TileSegment { tile, segments, at }, scratch) = (self.parts[i], &scratch);
            let whole = attend(tile);
            let to = if segments == whole.segments {
                whole.to
            } else {
                TileTarget::Part(scratch.0.wrapping_add(at))
            };
            one(Attend { segments, to, ..whole });
        });
        pool.run(self.cut.len(), |i| {
            let (TileSegment { tile, at, .. }, scratch) = (self.cut[i], &scratch);
            isa.dispatch(JoinSegments { attend: attend(tile), parts: scratch.0.wrapping_add(at) });
        });
    }
}

/// Joins the sums of a tile's segments, in their order.
struct JoinSegments<'a> {
    attend: Attend<'a>,
    parts: *const f32,
}

impl Kernel for JoinSegments<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (rows, padded) = (self.attend.rows(), self.attend.shape.padded());
        let part = |segment: usize, row: usize| {
            // SAFETY: every segment of the tile has been saved, for every row.
            unsafe {
                SoftmaxSum::load(self.parts.add((segment * rows + row) * SoftmaxSum::saved(padded)), padded)
            }
        };
        for row in 0..rows {
            let mut sum = part(0, row);
            for segment in 1..self.attend.segments.1 - self.attend.segments.0 {
                sum.join::<S>(&part(segment, row), padded);
            }
            self.attend.put::<S>(row, &sum);
        }
    }
}

/// Returns the number of `f32` values that one saved segment of the tile takes.
fn numbers(attend: &Attend<'_>) -> usize {
    attend.rows() * SoftmaxSum::saved(attend.shape.padded())
}
