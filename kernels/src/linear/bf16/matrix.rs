//! Products of two matrices that are rounded to bf16 for this purpose: `c = a b`.
//!
//! The sums are those of [`linear_bf16`](super::linear_bf16): groups of 32 columns of `a`, in order.

use std::ops::Range;

use super::{Chunk, amx::PanelTiles, vectors::DecodedWeights};
use crate::{
    activations::{GROUP, SIDE, TileRow, TiledRows},
    isa::Isa,
    linear::{out_panels::OutPanels, part::OutPtr, transposed::SumFrom},
    simd::{LANES, Simd},
};

/// The factor `a`: rows in tiles of sixteen rows by 32 columns.
pub(crate) struct RowTiles {
    lines: Vec<TileRow>,
    rows: usize,
    groups: usize,
}

impl RowTiles {
    /// Makes room for `rows` rows of `columns`.
    pub(crate) fn new(rows: usize, columns: usize) -> Self {
        let lines = rows.next_multiple_of(SIDE) * columns.div_ceil(GROUP);
        Self { lines: vec![TileRow::default(); lines], rows: 0, groups: 0 }
    }

    fn shape(&mut self, rows: usize, columns: usize) {
        (self.rows, self.groups) = (rows, columns.div_ceil(GROUP));
        assert!(rows.next_multiple_of(SIDE) * self.groups <= self.lines.len(), "the tiles have room");
    }

    fn line(&mut self, row: usize, group: usize) -> &mut TileRow {
        &mut self.lines[(row / SIDE * self.groups + group) * SIDE + row % SIDE]
    }

    /// Rounds `rows` rows of `columns`; `row` returns one of them.
    #[inline(always)]
    pub(crate) fn fill<'a>(&mut self, rows: usize, columns: usize, row: impl Fn(usize) -> &'a [f32]) {
        self.shape(rows, columns);
        for m in 0..rows {
            let (whole, rest) = row(m)[..columns].as_chunks::<GROUP>();
            for (group, from) in whole.iter().enumerate() {
                self.line(m, group).round(from);
            }
            if !rest.is_empty() {
                let mut padded = [0.0; GROUP];
                padded[..rest.len()].copy_from_slice(rest);
                self.line(m, whole.len()).round(&padded);
            }
        }
    }

    /// Rounds the transpose of `rows` rows of `columns`; `row` returns one of them.
    #[inline(always)]
    pub(crate) fn fill_transposed<'a>(
        &mut self,
        rows: usize,
        columns: usize,
        row: impl Fn(usize) -> &'a [f32],
    ) {
        self.shape(columns, rows);
        for group in 0..self.groups {
            for column in 0..columns {
                let mut line = [0.0; GROUP];
                for (to, m) in line.iter_mut().zip(group * GROUP..rows) {
                    *to = row(m)[column];
                }
                self.line(column, group).round(&line);
            }
        }
    }

    fn tiled(&self) -> TiledRows<'_> {
        TiledRows::whole(&self.lines, self.rows, self.groups)
    }
}

/// Sixteen pairs of rows by sixteen columns.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct PairTile([[u32; LANES]; GROUP / 2]);

/// The factor `b`: pairs of rows in tiles of 32 rows by sixteen columns.
pub(crate) struct PairTiles {
    tiles: Vec<PairTile>,
    panels: usize,
    groups: usize,
}

impl PairTiles {
    /// Makes room for `rows` rows of `columns`.
    pub(crate) fn new(rows: usize, columns: usize) -> Self {
        let tiles = columns.div_ceil(LANES) * rows.div_ceil(GROUP);
        Self { tiles: vec![PairTile([[0; LANES]; GROUP / 2]); tiles], panels: 0, groups: 0 }
    }

    fn shape(&mut self, rows: usize, columns: usize) {
        (self.panels, self.groups) = (columns.div_ceil(LANES), rows.div_ceil(GROUP));
        assert!(self.panels * self.groups <= self.tiles.len(), "the tiles have room");
    }

    /// Rounds `rows` rows of `columns`; `row` returns one of them.
    #[inline(always)]
    pub(crate) fn fill<'a>(&mut self, rows: usize, columns: usize, row: impl Fn(usize) -> &'a [f32]) {
        self.shape(rows, columns);
        let sixteen = |m: usize, panel: usize| {
            let mut lanes = [0.0; LANES];
            if m < rows {
                let from = &row(m)[panel * LANES..columns.min((panel + 1) * LANES)];
                lanes[..from.len()].copy_from_slice(from);
            }
            lanes
        };
        for pair in 0..self.groups * GROUP / 2 {
            for panel in 0..self.panels {
                let (first, second) = (sixteen(2 * pair, panel), sixteen(2 * pair + 1, panel));
                let tile = &mut self.tiles[panel * self.groups + pair / (GROUP / 2)];
                round_pairs(&first, &second, &mut tile.0[pair % (GROUP / 2)]);
            }
        }
    }

    /// Rounds the transpose of `rows` rows of `columns`; `row` returns one of them.
    #[inline(always)]
    pub(crate) fn fill_transposed<'a>(
        &mut self,
        rows: usize,
        columns: usize,
        row: impl Fn(usize) -> &'a [f32],
    ) {
        self.shape(columns, rows);
        for panel in 0..self.panels {
            for pair in 0..self.groups * GROUP / 2 {
                let [mut first, mut second] = [[0.0; LANES]; 2];
                for (lane, m) in (panel * LANES..rows.min((panel + 1) * LANES)).enumerate() {
                    let from = row(m);
                    first[lane] = from.get(2 * pair).copied().unwrap_or(0.0);
                    second[lane] = from.get(2 * pair + 1).copied().unwrap_or(0.0);
                }
                let tile = &mut self.tiles[panel * self.groups + pair / (GROUP / 2)];
                round_pairs(&first, &second, &mut tile.0[pair % (GROUP / 2)]);
            }
        }
    }

    /// Returns the part from `row`, a multiple of 32, and `column`, a multiple of 16, on.
    pub(crate) fn from(&self, row: usize, column: usize) -> PairFactor<'_> {
        debug_assert!(row.is_multiple_of(GROUP) && column.is_multiple_of(LANES), "whole tiles");
        PairFactor { tiles: self, first_panel: column / LANES, first_group: row / GROUP }
    }
}

#[inline(always)]
fn round_pairs(first: &[f32; LANES], second: &[f32; LANES], to: &mut [u32; LANES]) {
    for (to, (&first, &second)) in to.iter_mut().zip(first.iter().zip(second)) {
        *to = TileRow::rounded(first) | TileRow::rounded(second) << 16;
    }
}

/// Part of the factor `b`.
#[derive(Clone, Copy)]
pub(crate) struct PairFactor<'a> {
    tiles: &'a PairTiles,
    first_panel: usize,
    first_group: usize,
}

impl PairFactor<'_> {
    #[inline(always)]
    fn pairs(&self, panel: usize, group: usize) -> &[[u32; LANES]; GROUP / 2] {
        let tile = (self.first_panel + panel) * self.tiles.groups + self.first_group + group;
        &self.tiles.tiles[tile].0
    }
}

impl PanelTiles for PairFactor<'_> {
    #[inline(always)]
    fn tile(self, panel: usize, group: usize) -> Option<*const u8> {
        Some(self.pairs(panel, group).as_ptr().cast())
    }

    #[inline(always)]
    unsafe fn unpack<const P: usize>(self, _panel: usize, _group: usize, _to: *mut u8) {}
}

impl DecodedWeights for PairFactor<'_> {
    #[inline(always)]
    unsafe fn decode<S: Simd>(self, panel: usize, columns: Range<usize>, to: *mut f32) {
        for group in columns.start / GROUP..columns.end / GROUP {
            let to = to.wrapping_add((group * GROUP - columns.start) * LANES);
            for (pair, words) in self.pairs(panel, group).iter().enumerate() {
                for (lane, word) in words.iter().enumerate() {
                    // SAFETY: the caller guarantees the room.
                    unsafe {
                        to.add(2 * pair * LANES + lane).write(f32::from_bits(word << 16));
                        to.add((2 * pair + 1) * LANES + lane).write(f32::from_bits(word & 0xffff_0000));
                    }
                }
            }
        }
    }
}

/// A product `c = a b`, or `c += a b` with [`SumFrom::Out`].
pub(crate) struct MatrixProduct<'a> {
    pub(crate) a: &'a RowTiles,
    /// As many rows as `a` has columns.
    pub(crate) b: PairFactor<'a>,
    pub(crate) from: SumFrom,
    pub(crate) c: *mut f32,
    /// Distance of the rows of `c`.
    pub(crate) stride: usize,
    pub(crate) columns: usize,
}

impl MatrixProduct<'_> {
    /// # Safety
    /// The elements of `c` exist, and no other thread uses them.
    pub(crate) unsafe fn run(self, isa: Isa) {
        let out = OutPanels::of_rows(&OutPtr(self.c), self.stride, self.columns);
        let panels = 0..self.columns.div_ceil(LANES);
        assert!(
            self.b.first_panel + panels.end <= self.b.tiles.panels
                && self.b.first_group + self.a.groups <= self.b.tiles.groups,
            "b has the rows and columns"
        );
        Chunk { x: self.a.tiled(), weights: self.b, panels, from: self.from, out }.run(isa);
    }
}
