//! Long contexts of few queries, shared out among threads: a segment of a tile each, and joined when all are there.

use super::{
    attend::{Attend, To},
    sum::Sum,
};
use crate::{
    isa::Isa,
    pool::Pool,
    simd::{Kernel, Simd},
};

/// Tiles for each thread from which on they need not be cut.
const ENOUGH: usize = 8;

/// What threads do for some tiles.
pub(super) struct Shares {
    /// A segment of a tile each.
    parts: Vec<Part>,
    /// All segments of a tile that has several.
    cut: Vec<Part>,
    room: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Part {
    tile: usize,
    segments: (usize, usize),
    /// In the room.
    at: usize,
}

struct Room(*mut f32);
// SAFETY: parts have ranges of their own.
unsafe impl Sync for Room {}

impl Shares {
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
                cut.push(Part { tile, segments: (begin, end), at: used });
            }
            for segment in begin..end {
                parts.push(Part { tile, segments: (segment, segment + 1), at: used });
                used += numbers(&attend(tile));
            }
        }
        Some(Self { parts, cut, room: vec![0.0; used] })
    }

    /// Does what there is to do, each part by `one`.
    pub(super) fn run<'a>(
        mut self,
        pool: &mut Pool,
        isa: Isa,
        attend: impl Fn(usize) -> Attend<'a> + Sync,
        one: impl Fn(Attend<'a>) + Sync,
    ) {
        let room = Room(self.room.as_mut_ptr());
        pool.run(self.parts.len(), |i| {
            let (Part { tile, segments, at }, room) = (self.parts[i], &room);
            let whole = attend(tile);
            let to = if segments == whole.segments { whole.to } else { To::Part(room.0.wrapping_add(at)) };
            one(Attend { segments, to, ..whole });
        });
        pool.run(self.cut.len(), |i| {
            let (Part { tile, at, .. }, room) = (self.cut[i], &room);
            isa.dispatch(Join { attend: attend(tile), parts: room.0.wrapping_add(at) });
        });
    }
}

/// Joins the parts of a tile, one for each of its segments, in their order.
struct Join<'a> {
    attend: Attend<'a>,
    parts: *const f32,
}

impl Kernel for Join<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (rows, padded) = (self.attend.rows(), self.attend.shape.padded());
        let part = |segment: usize, row: usize| {
            // SAFETY: every segment of the tile has been saved, for every row.
            unsafe { Sum::load(self.parts.add((segment * rows + row) * Sum::saved(padded)), padded) }
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
    attend.rows() * Sum::saved(attend.shape.padded())
}
