//! Long contexts of few queries, shared out among threads: a segment of a tile each, and joined when all are there.

use super::{
    attend::{Attend, TileTarget},
    sum::SoftmaxSum,
};
use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, Simd},
};

/// Tiles for each thread from which on they need not be cut.
const ENOUGH: usize = 8;

/// What threads do for some tiles.
pub(super) struct SplitTiles {
    /// A segment of a tile each.
    parts: Vec<TileSegment>,
    /// All segments of a tile that has several.
    cut: Vec<TileSegment>,
    room: Vec<f32>,
}

#[derive(Clone, Copy)]
struct TileSegment {
    tile: usize,
    segments: (usize, usize),
    /// In the room.
    at: usize,
}

struct SplitScratch(*mut f32);
// SAFETY: parts have ranges of their own.
unsafe impl Sync for SplitScratch {}

impl SplitTiles {
    /// Of so many tiles; nothing if each is better done as a whole.
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
        Some(Self { parts, cut, room: vec![0.0; used] })
    }

    /// Does what there is to do, each part by `one`.
    pub(super) fn run<'a>(
        mut self,
        pool: &mut ThreadPool,
        isa: Isa,
        attend: impl Fn(usize) -> Attend<'a> + Sync,
        one: impl Fn(Attend<'a>) + Sync,
    ) {
        let room = SplitScratch(self.room.as_mut_ptr());
        pool.run(self.parts.len(), |i| {
            let (TileSegment { tile, segments, at }, room) = (self.parts[i], &room);
            let whole = attend(tile);
            let to =
                if segments == whole.segments { whole.to } else { TileTarget::Part(room.0.wrapping_add(at)) };
            one(Attend { segments, to, ..whole });
        });
        pool.run(self.cut.len(), |i| {
            let (TileSegment { tile, at, .. }, room) = (self.cut[i], &room);
            isa.dispatch(JoinSegments { attend: attend(tile), parts: room.0.wrapping_add(at) });
        });
    }
}

/// Joins the parts of a tile, one for each of its segments, in their order.
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

/// What a segment of this tile is saved in.
fn numbers(attend: &Attend<'_>) -> usize {
    attend.rows() * SoftmaxSum::saved(attend.shape.padded())
}
