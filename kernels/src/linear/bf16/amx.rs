//! Products in bf16 on the matrix unit.
//!
//! Two panels and up to two tiles of rows are multiplied together, so that a tile is loaded for two products.
//! Panels of bf16 are tiles as they are stored. Other panels are unpacked into a ring in the first-level
//! cache, [`AHEAD`] groups before their use: the load of a tile that was just stored waits for the stores.
//!
//! More than two tiles of rows use the same unpacked weights, [`DEPTH`] groups at a time. Between these
//! blocks the sums are stored as they are, which does not change their bits. Groups whose activations do not
//! fit the second-level cache are divided into spans, between which `out` keeps the sums.
//!
//! Measured with one thread: 19.5 ns to unpack a tile of integers, 5 ns to multiply one.

mod transposed;
mod weights;

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

pub(super) use self::weights::PanelTiles;

use self::weights::{PackedTiles, with_packing};
use super::Chunk;
use crate::{
    activations::SIDE,
    linear::{pack::PackedMatrix, part::blocks, transposed::SumFrom},
    simd::{
        Kernel, LANES, Simd,
        amx::{
            bf16::{AmxBf16, TILE_BYTES},
            prefetch_to_write,
        },
    },
};

/// Groups of columns that all tiles of rows multiply before the next groups.
const DEPTH: usize = 8;
/// Groups that are unpacked ahead.
const AHEAD: usize = 2;
const RING: usize = DEPTH + AHEAD;
/// Groups in the ring if one pass over them is all: so few that activations leave them in the cache.
const SHORT_RING: usize = 4;

/// Maximum number of tiles of rows that use an unpacked panel, and the bytes of the groups that they use in
/// one span, which stay in the second-level cache.
const MAX_TILES: usize = 64;
const SPAN_BYTES: usize = 1200 << 10;

const SUMS: usize = SIDE * LANES;

pub(super) struct AmxChunk<'a, W>(pub(super) Chunk<'a, W>);

impl Kernel for AmxChunk<'_, &PackedMatrix> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let w = self.0.weights;
        with_packing!(w.packing(), P => {
            let weights = PackedTiles::<P>(w, PhantomData);
            S::call(SpanSums { chunk: &self.0, weights });
        });
    }
}

impl<W: PanelTiles> Kernel for AmxChunk<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        S::call(SpanSums { chunk: &self.0, weights: self.0.weights });
    }
}

/// All sums of a chunk, with the tiles of its weights.
struct SpanSums<'a, 'b, W, T> {
    chunk: &'a Chunk<'b, W>,
    weights: T,
}

#[repr(align(64))]
struct Bf16Scratch {
    /// `[RING, 2]` tiles of weights.
    weights: [MaybeUninit<u8>; RING * 2 * TILE_BYTES],
    /// `[MAX_TILES, 2]` tiles of sums.
    sums: [MaybeUninit<f32>; MAX_TILES * 2 * SUMS],
}

impl<W, T: PanelTiles> Kernel for SpanSums<'_, '_, W, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        if S::BESIDE_MATRIX_UNIT {
            let mut scratch = Bf16Scratch {
                weights: [const { MaybeUninit::uninit() }; _],
                sums: [const { MaybeUninit::uninit() }; _],
            };
            let x = self.chunk.x;
            // SAFETY: `Chunk::run` has checked that the unit may be used; this thread does not use it otherwise.
            let unit = unsafe { AmxBf16::lay_out(x.tile_rows()) };
            let mut pending = Pending::NONE;
            for tiles in blocks(0..x.tiles(), MAX_TILES) {
                for span in blocks(0..x.groups(), span_groups(x.groups(), tiles.len())) {
                    for panels in blocks(self.chunk.panels.clone(), 2) {
                        let ring = if tiles.len() > 2 { RING } else { SHORT_RING };
                        let mut pass = Pass {
                            sums: &self,
                            unit: &unit,
                            panel: panels.start,
                            span: span.clone(),
                            ring,
                            scratch: &mut scratch,
                            pending: &mut pending,
                        };
                        if panels.len() == 2 {
                            pass.run::<S, 2>(&tiles);
                        } else {
                            pass.run::<S, 1>(&tiles);
                        }
                    }
                }
            }
            pending.put::<S, W>(self.chunk, usize::MAX);
        }
    }
}

/// Returns the groups of a span for `tiles` tiles of rows. Two tiles keep their sums in registers to the end.
fn span_groups(groups: usize, tiles: usize) -> usize {
    if tiles <= 2 {
        return groups.max(1);
    }
    let most = SPAN_BYTES / (tiles * SIDE * 64);
    let spans = groups.div_ceil(most).max(1);
    groups.div_ceil(spans).next_multiple_of(DEPTH)
}

/// One or two panels with some tiles of rows, over the groups of a span.
struct Pass<'a, 'b, 'c, W, T> {
    sums: &'a SpanSums<'b, 'c, W, T>,
    unit: &'a AmxBf16,
    panel: usize,
    span: Range<usize>,
    ring: usize,
    scratch: &'a mut Bf16Scratch,
    pending: &'a mut Pending,
}

/// Sums of a pass that are not yet in the output. Reading them at once would wait for the unit, so they are
/// read while the unit computes the next sums.
struct Pending {
    sums: *const f32,
    /// True if no span follows.
    are_complete: bool,
    panel: usize,
    panels: usize,
    first: usize,
    rows: usize,
    /// Rows that are in the output.
    done: usize,
}

impl Pending {
    const NONE: Self =
        Self { sums: std::ptr::null(), are_complete: true, panel: 0, panels: 0, first: 0, rows: 0, done: 0 };

    /// Writes up to `count` rows to the output.
    #[inline(always)]
    fn put<S: Simd, W>(&mut self, chunk: &Chunk<'_, W>, count: usize) {
        let end = self.rows.min(self.done.saturating_add(count));
        while self.done < end {
            let m = self.done;
            let mut p = 0;
            while p < self.panels {
                // SAFETY: the sums of two tiles of rows with two panels each lie here.
                let sum = unsafe { S::load(self.sums.add((m / SIDE * 2 + p) * SUMS + m % SIDE * LANES)) };
                if self.are_complete {
                    chunk.out.put::<S>(self.panel + p, self.first + m, sum);
                } else {
                    chunk.out.keep::<S>(self.panel + p, self.first + m, sum);
                }
                p += 1;
            }
            self.done += 1;
        }
    }
}

impl<W, T: PanelTiles> Pass<'_, '_, '_, W, T> {
    #[inline(always)]
    fn run<S: Simd, const P: usize>(&mut self, tiles: &Range<usize>) {
        let span = self.span.clone();
        let mut group = span.start;
        while group < span.end.min(span.start + AHEAD) {
            self.unpack::<P>(group);
            group += 1;
        }
        let depth = if tiles.len() > 2 { DEPTH } else { span.len() };
        for block in blocks(span, depth) {
            let mut tile = tiles.start;
            while tile < tiles.end {
                let index = tile - tiles.start;
                tile += if tiles.end - tile >= 2 {
                    self.block::<S, 2, P>(tile, index, &block)
                } else {
                    self.block::<S, 1, P>(tile, index, &block)
                };
            }
        }
    }

    #[inline(always)]
    fn unpack<const P: usize>(&mut self, group: usize) {
        let to = self.slot(group);
        // SAFETY: panels and group exist, and the ring has room for both tiles.
        unsafe { self.sums.weights.unpack::<P>(self.panel, group, to) };
    }

    #[inline(always)]
    fn slot(&mut self, group: usize) -> *mut u8 {
        let slot = if self.ring == RING { group % RING } else { group % SHORT_RING };
        self.scratch.weights.as_mut_ptr().cast::<u8>().wrapping_add(slot * 2 * TILE_BYTES)
    }

    /// Adds the products of `block` for `R` tiles of rows from `tile` on, which is tile `index` of this pass.
    /// The first tiles of a pass unpack the weights for all.
    #[inline(always)]
    fn block<S: Simd, const R: usize, const P: usize>(
        &mut self,
        tile: usize,
        index: usize,
        block: &Range<usize>,
    ) -> usize {
        let SpanSums { chunk, weights, .. } = self.sums;
        let (x, unit, end) = (chunk.x, self.unit, self.span.end);
        let sums = self.scratch.sums.as_mut_ptr().cast::<f32>().wrapping_add(index * 2 * SUMS);
        // SAFETY: tiles, panels and groups exist, the registers are configured, and the scratch has room.
        unsafe {
            if block.start > self.span.start {
                unit.load_sums::<R, P>(sums);
            } else if block.start == 0 && chunk.from == SumFrom::Zero {
                unit.clear::<R, P>();
            } else {
                self.load_kept::<S, R, P>(tile, sums);
            }
            let mut group = block.start;
            while group < block.end {
                if index == 0 && group + AHEAD < end {
                    self.unpack::<P>(group + AHEAD);
                }
                self.pending.put::<S, W>(chunk, 2 * SIDE / DEPTH);
                if block.end == end && block.end - group <= DEPTH {
                    self.prefetch_outputs::<R, P>(tile, DEPTH - (block.end - group));
                }
                let slot = self.slot(group).cast_const();
                let tile_of = |p: usize| {
                    weights.tile(self.panel + p, group).unwrap_or(slot.wrapping_add(p * TILE_BYTES))
                };
                // A missing second tile is not read.
                let w = [tile_of(0), tile_of(P - 1)];
                let x = [x.tile(tile, group).cast(), x.tile(tile + R - 1, group).cast()];
                unit.add_products::<R, P>(x, w);
                group += 1;
            }
            self.pending.put::<S, W>(chunk, usize::MAX);
            unit.store_sums::<R, P>(sums);
            if block.end == end {
                let first = tile * x.tile_rows();
                let rows = (R * x.tile_rows()).min(x.rows() - first);
                let are_complete = end == x.groups();
                *self.pending =
                    Pending { sums, are_complete, panel: self.panel, panels: P, first, rows, done: 0 };
            }
        }
        R
    }

    /// Loads the sums that `out` keeps of `R` tiles of rows, by way of `sums`.
    ///
    /// # Safety
    /// The tiles exist, and `sums` has room for their sums.
    #[inline(always)]
    unsafe fn load_kept<S: Simd, const R: usize, const P: usize>(&mut self, tile: usize, sums: *mut f32) {
        let chunk = self.sums.chunk;
        self.pending.put::<S, W>(chunk, usize::MAX);
        let first = tile * chunk.x.tile_rows();
        let rows = (R * chunk.x.tile_rows()).min(chunk.x.rows() - first);
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            for m in 0..rows {
                for p in 0..P {
                    let kept = chunk.out.kept::<S>(self.panel + p, first + m);
                    S::store(sums.add((m / SIDE * 2 + p) * SUMS + m % SIDE * LANES), kept);
                }
            }
            self.unit.load_sums::<R, P>(sums);
        }
    }

    /// Prefetches the outputs of a share of the rows of `R` tiles, for writing, `step` of [`DEPTH`] steps.
    #[inline(always)]
    fn prefetch_outputs<const R: usize, const P: usize>(&self, tile: usize, step: usize) {
        const { assert!(SIDE.is_multiple_of(DEPTH)) };
        let chunk = self.sums.chunk;
        let share = SIDE / DEPTH * R;
        let first = tile * SIDE + step * share;
        let share = share.min(chunk.x.rows().saturating_sub(first));
        let mut m = 0;
        while m < share {
            let (to, _) = chunk.out.place(self.panel, first + m);
            prefetch_to_write(to.cast());
            prefetch_to_write(to.wrapping_add(P * LANES - 1).cast());
            m += 1;
        }
    }
}
