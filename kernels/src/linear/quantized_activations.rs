//! Linear layers whose activations are rounded to the weights' precision, at memory speed.

use std::{marker::PhantomData, ops::Range};

use super::{
    amx::{AmxPanels, MAX_ROWS},
    chunk::PanelChunk,
    float,
    form::Packing,
    out_panels::OutPanels,
    packings::{self, IntegerPacking},
    part::{LinearPart, OutPtr, blocks, check_parts, for_each_chunk},
    tile::PanelDot,
};
use crate::{
    activations::{Activations, SIDE},
    isa::{Isa, MatrixUnit},
    pool::ThreadPool,
    simd::{Kernel, Simd, amx::Tiles},
};

/// Rows that one panel multiplies before the next panel is loaded; they stay in the second-level cache.
const ROW_BLOCK: usize = MAX_ROWS;

/// Computes `parts` for every row of `x` into rows of `out` of `stride` elements, on all threads of `pool`.
/// `x` must have been prepared in the forms that the matrices need.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn linear(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &Activations,
    parts: &[LinearPart<'_>],
    out: &mut [f32],
    stride: usize,
) {
    let rows = x.rows();
    assert!(out.len() >= rows * stride, "out holds {rows} rows of {stride}");
    check_parts(parts, x.width(), stride);
    for part in parts {
        assert!(x.holds(part.matrix.forms()), "activations were prepared in the form of the weights");
    }
    let out = OutPtr(out.as_mut_ptr());
    let matrix_unit = isa.matrix_unit();
    let chunk = |panels, threads| panels_a_chunk(panels, rows, threads);
    for_each_chunk(pool, parts, chunk, |part, first, last| {
        let out = OutPanels::of_part(&part, &out, stride);
        isa.dispatch(PanelChunk { x, part, first, last, matrix_unit, out });
    });
}

/// Returns the panels per chunk: enough chunks to balance a late thread, yet few enough to claim cheaply.
fn panels_a_chunk(panels: usize, rows: usize, threads: usize) -> usize {
    let chunks = threads * if rows < ROW_BLOCK { 4 } else { 8 };
    panels.div_ceil(chunks).max(1)
}

impl Kernel for PanelChunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let are_worth_it = self.x.rows() >= SIDE && self.part.matrix.forms().bytes;
        // SAFETY: the set of `linear` says that the unit may be used, and this thread does not use it otherwise.
        let tiles = (S::BESIDE_MATRIX_UNIT && self.matrix_unit == MatrixUnit::Amx && are_worth_it)
            .then(|| unsafe { Tiles::lay_out() });
        let tiles = tiles.as_ref();
        for rows in blocks(0..self.x.rows(), ROW_BLOCK) {
            for panel in self.first..self.last {
                let rows = rows.clone();
                match self.part.matrix.packing() {
                    Packing::F32 => self.rows::<S, float::FloatPanels<f32>>(panel, rows),
                    Packing::F16 => self.rows::<S, float::FloatPanels<u16>>(panel, rows),
                    Packing::Bf16 => self.rows::<S, float::Bf16>(panel, rows),
                    Packing::Four8 => self.integers::<S, packings::Four8>(panel, rows, tiles),
                    Packing::FourMinimum => self.integers::<S, packings::FourMinimum>(panel, rows, tiles),
                    Packing::FourE2m1 => self.integers::<S, packings::FourE2m1>(panel, rows, tiles),
                    Packing::Five16 => self.integers::<S, packings::Five16>(panel, rows, tiles),
                    Packing::FiveMinimum => self.integers::<S, packings::FiveMinimum>(panel, rows, tiles),
                    Packing::Six32Halves => self.integers::<S, packings::Six32Halves>(panel, rows, tiles),
                    Packing::Eight128 => self.integers::<S, packings::Eight128>(panel, rows, tiles),
                }
            }
        }
    }
}

impl PanelChunk<'_> {
    /// Computes rows that fill tiles on the matrix unit if there is one, and the other rows without it.
    #[inline(always)]
    fn integers<S: Simd, P: IntegerPacking>(&self, panel: usize, rows: Range<usize>, tiles: Option<&Tiles>) {
        let mut rest = rows.clone();
        if let Some(tiles) = tiles.filter(|_| S::BESIDE_MATRIX_UNIT && rows.len() >= SIDE) {
            rest.start = rows.end - rows.len() % SIDE;
            S::call(AmxPanels::<P> {
                chunk: self,
                tiles,
                panel,
                rows: rows.start..rest.start,
                packing: PhantomData,
            });
        }
        self.rows::<S, P>(panel, rest);
    }

    #[inline(always)]
    fn rows<S: Simd, T: PanelDot>(&self, panel: usize, rows: Range<usize>) {
        let Range { start: mut row, end: to } = rows;
        while row < to {
            row += match S::TILE.min(to - row) {
                8.. => self.tile::<S, T, 8>(panel, row),
                4.. => self.tile::<S, T, 4>(panel, row),
                2.. => self.tile::<S, T, 2>(panel, row),
                _ => self.tile::<S, T, 1>(panel, row),
            };
        }
    }

    #[inline(always)]
    fn tile<S: Simd, T: PanelDot, const M: usize>(&self, panel: usize, row: usize) -> usize {
        // SAFETY: `linear` has checked that rows and panels exist.
        let sums = unsafe { T::dot::<S, M>(self.part.matrix, panel, self.x, row) };
        for (i, &sum) in sums.iter().enumerate() {
            self.out.put::<S>(panel, row + i, sum);
        }
        M
    }
}
