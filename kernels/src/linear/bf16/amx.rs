//! Products in bf16 on the matrix unit.
//!
//! Two panels and up to two tiles of rows are multiplied together, so that a tile is loaded for two products.
//! Panels of bf16 are tiles as they are stored. Other panels are unpacked into a ring in the first-level
//! cache, [`AHEAD`] groups before their use: the load of a tile that was just stored waits for the stores.
//!
//! More than two tiles of rows use the same unpacked weights, [`DEPTH`] groups at a time. Between these
//! blocks the sums are stored as they are, which does not change their bits.
//!
//! Measured with one thread: 19.5 ns to unpack a tile of integers, 5 ns to multiply one.

mod weights;

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

use self::weights::{TileWeights, with_tile_weights};
use super::super::{chunk::PanelChunk, part::blocks};
use crate::{
    activations::SIDE,
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

/// Maximum number of tiles of rows that use an unpacked panel, and their bytes, which stay in the
/// second-level cache.
const MAX_TILES: usize = 16;
const ROW_BYTES: usize = 1200 << 10;

const SUMS: usize = SIDE * LANES;

/// Panels of one part, for all rows.
pub(super) struct AmxChunk<'a>(pub(super) PanelChunk<'a>);

impl Kernel for AmxChunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        if S::BESIDE_MATRIX_UNIT {
            let tile_rows = self.0.x.tile_rows();
            // SAFETY: `linear_bf16` has checked that the unit may be used; this thread does not use it otherwise.
            let unit = unsafe { AmxBf16::lay_out(tile_rows) };
            with_tile_weights!(self.0.part.matrix.packing(), W => {
                S::call(Panels { chunk: &self.0, unit: &unit, weights: PhantomData::<W> });
            });
        }
    }
}

struct Panels<'a, W> {
    chunk: &'a PanelChunk<'a>,
    unit: &'a AmxBf16,
    weights: PhantomData<W>,
}

#[repr(align(64))]
struct Bf16Scratch {
    /// `[RING, 2]` tiles of weights.
    weights: [MaybeUninit<u8>; RING * 2 * TILE_BYTES],
    /// `[MAX_TILES, 2]` tiles of sums.
    sums: [MaybeUninit<f32>; MAX_TILES * 2 * SUMS],
}

impl<W: TileWeights> Kernel for Panels<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        if S::BESIDE_MATRIX_UNIT {
            let mut scratch = Bf16Scratch {
                weights: [const { MaybeUninit::uninit() }; _],
                sums: [const { MaybeUninit::uninit() }; _],
            };
            let x = self.chunk.x;
            let mut pending = Pending::NONE;
            let fitting = ROW_BYTES / (x.tile_groups() * SIDE * 64) / 2 * 2;
            for tiles in blocks(0..x.rows().div_ceil(x.tile_rows()), fitting.clamp(2, MAX_TILES)) {
                let mut panel = self.chunk.first;
                while panel < self.chunk.last {
                    let ring = if tiles.len() > 2 { RING } else { SHORT_RING };
                    let (scratch, pending) = (&mut scratch, &mut pending);
                    let mut pass = Pass::<W> { panels: &self, panel, ring, scratch, pending };
                    if self.chunk.last - panel >= 2 {
                        pass.run::<S, 2>(&tiles);
                        panel += 2;
                    } else {
                        pass.run::<S, 1>(&tiles);
                        panel += 1;
                    }
                }
            }
            pending.put::<S>(self.chunk, usize::MAX);
        }
    }
}

/// One or two panels with some tiles of rows.
struct Pass<'a, 'b, W> {
    panels: &'a Panels<'b, W>,
    panel: usize,
    ring: usize,
    scratch: &'a mut Bf16Scratch,
    pending: &'a mut Pending,
}

/// Complete sums that are not yet in the output. Reading them at once would wait for the unit, so they are
/// read while the unit computes the next sums.
struct Pending {
    sums: *const f32,
    panel: usize,
    panels: usize,
    first: usize,
    rows: usize,
    /// Rows that are in the output.
    done: usize,
}

impl Pending {
    const NONE: Self = Self { sums: std::ptr::null(), panel: 0, panels: 0, first: 0, rows: 0, done: 0 };

    /// Writes up to `count` rows to the output.
    #[inline(always)]
    fn put<S: Simd>(&mut self, chunk: &PanelChunk<'_>, count: usize) {
        let end = self.rows.min(self.done.saturating_add(count));
        while self.done < end {
            let m = self.done;
            let mut p = 0;
            while p < self.panels {
                // SAFETY: the sums of two tiles of rows with two panels each lie here.
                let sum = unsafe { S::load(self.sums.add((m / SIDE * 2 + p) * SUMS + m % SIDE * LANES)) };
                chunk.put::<S>(self.panel + p, self.first + m, sum);
                p += 1;
            }
            self.done += 1;
        }
    }
}

impl<W: TileWeights> Pass<'_, '_, W> {
    #[inline(always)]
    fn run<S: Simd, const P: usize>(&mut self, tiles: &Range<usize>) {
        let groups = self.panels.chunk.x.tile_groups();
        let mut group = 0;
        while group < AHEAD.min(groups) {
            self.unpack::<P>(group);
            group += 1;
        }
        // Two tiles of rows keep their sums in registers to the end.
        let depth = if tiles.len() > 2 { DEPTH } else { groups };
        for block in blocks(0..groups, depth) {
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
        let w = self.panels.chunk.part.matrix;
        let to = self.slot(group);
        // SAFETY: panels and group exist, and the ring has room for both tiles.
        unsafe {
            W::unpack(w, self.panel, group, P, to);
            if P == 2 {
                W::unpack(w, self.panel + 1, group, P, to.wrapping_add(TILE_BYTES));
            }
        }
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
        let Panels { chunk, unit, .. } = self.panels;
        let x = chunk.x;
        let groups = x.tile_groups();
        let sums = self.scratch.sums.as_mut_ptr().cast::<f32>().wrapping_add(index * 2 * SUMS);
        let tile_lines = x.tile_rows();
        let first = x.tiles.as_ptr().wrapping_add(tile * groups * tile_lines);
        let second = first.wrapping_add(groups * tile_lines);
        // SAFETY: tiles, panels and groups exist, the registers are configured, and the scratch has room.
        unsafe {
            if block.start == 0 {
                unit.clear::<R, P>();
            } else {
                unit.load_sums::<R, P>(sums);
            }
            let mut group = block.start;
            while group < block.end {
                if index == 0 && group + AHEAD < groups {
                    self.unpack::<P>(group + AHEAD);
                }
                self.pending.put::<S>(chunk, 2 * SIDE / DEPTH);
                if block.end == groups && block.end - group <= DEPTH {
                    self.prefetch_outputs::<R, P>(tile, DEPTH - (block.end - group));
                }
                let slot = self.slot(group).cast_const();
                let tile_of = |p: usize| {
                    W::tile(chunk.part.matrix, self.panel + p, group)
                        .unwrap_or(slot.wrapping_add(p * TILE_BYTES))
                };
                // A missing second panel is not read.
                let w = [tile_of(0), tile_of(P - 1)];
                let at = group * tile_lines;
                unit.add_products::<R, P>([first.wrapping_add(at).cast(), second.wrapping_add(at).cast()], w);
                group += 1;
            }
            self.pending.put::<S>(chunk, usize::MAX);
            unit.store_sums::<R, P>(sums);
            if block.end == groups {
                let first = tile * tile_lines;
                let rows = (R * tile_lines).min(x.rows() - first);
                *self.pending = Pending { sums, panel: self.panel, panels: P, first, rows, done: 0 };
            }
        }
        R
    }

    /// Prefetches the outputs of a share of the rows of `R` tiles, for writing, `step` of [`DEPTH`] steps.
    #[inline(always)]
    fn prefetch_outputs<const R: usize, const P: usize>(&self, tile: usize, step: usize) {
        const { assert!(SIDE.is_multiple_of(DEPTH)) };
        let chunk = self.panels.chunk;
        let share = SIDE / DEPTH * R;
        let first = tile * SIDE + step * share;
        let share = share.min(chunk.x.rows().saturating_sub(first));
        let column = chunk.part.column + self.panel * LANES;
        let mut m = 0;
        while m < share {
            let to = chunk.out.wrapping_add((first + m) * chunk.stride + column);
            prefetch_to_write(to.cast());
            prefetch_to_write(to.wrapping_add(P * LANES - 1).cast());
            m += 1;
        }
    }
}
