//! Linear layers whose activations are rounded to the weights' precision: as fast as the bytes arrive.

use super::{
    float,
    form::Packing,
    integer,
    part::{LinearPart, OutPtr, check_parts, for_each_part},
    tile::Tile,
};
use crate::{
    activations::Activations,
    isa::Isa,
    pool::Pool,
    simd::{Kernel, LANES, Simd},
};

/// Rows of activations that a panel meets before the next panel is loaded: they stay in the second-level cache.
const ROW_BLOCK: usize = 64;

/// Computes `parts` for every row of `x` into rows of `out` of `stride` elements, on all threads of `pool`.
/// `x` must have been prepared in the forms the matrices need.
///
/// # Panics
///
/// If the shapes do not fit together.
pub fn linear(
    pool: &mut Pool,
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
    let panels: usize = parts.iter().map(|part| part.matrix.panels()).sum();
    let chunk = panels_a_chunk(panels, rows, pool.threads());
    pool.run(panels.div_ceil(chunk), |i| {
        let out = &out;
        for_each_part(parts, i * chunk, panels.min((i + 1) * chunk), |part, first, last| {
            isa.dispatch(Chunk { x, part, first, last, out: out.0, stride });
        });
    });
}

/// Enough chunks that a late thread can be helped out, few enough that claiming them costs nothing.
fn panels_a_chunk(panels: usize, rows: usize, threads: usize) -> usize {
    let chunks = threads * if rows < ROW_BLOCK { 4 } else { 8 };
    panels.div_ceil(chunks).max(1)
}

/// Panels `first..last` of one part, for all rows.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    x: &'a Activations,
    part: LinearPart<'a>,
    first: usize,
    last: usize,
    out: *mut f32,
    stride: usize,
}

impl Kernel for Chunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let rows = self.x.rows();
        let mut from = 0;
        while from < rows {
            let to = rows.min(from + ROW_BLOCK);
            for panel in self.first..self.last {
                match self.part.matrix.packing() {
                    Packing::F32 => self.rows::<S, float::Unrounded<f32>>(panel, from, to),
                    Packing::F16 => self.rows::<S, float::Unrounded<u16>>(panel, from, to),
                    Packing::Bf16 => self.rows::<S, float::Bf16>(panel, from, to),
                    Packing::Four8 => self.rows::<S, integer::Four8>(panel, from, to),
                    Packing::FourMinimum => self.rows::<S, integer::FourMinimum>(panel, from, to),
                    Packing::Eight128 => self.rows::<S, integer::Eight128>(panel, from, to),
                    Packing::EightMinimum => self.rows::<S, integer::EightMinimum>(panel, from, to),
                    Packing::Eight128Halves => self.rows::<S, integer::Eight128Halves>(panel, from, to),
                }
            }
            from = to;
        }
    }
}

impl Chunk<'_> {
    #[inline(always)]
    fn rows<S: Simd, T: Tile>(&self, panel: usize, from: usize, to: usize) {
        let mut row = from;
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
    fn tile<S: Simd, T: Tile, const M: usize>(&self, panel: usize, row: usize) -> usize {
        let w = self.part.matrix;
        let feature = panel * LANES;
        let lanes = LANES.min(w.rows() - feature);
        // SAFETY: `linear` has checked that rows and panels exist and that columns lie within `out`; no other chunk
        // writes these columns.
        unsafe {
            let sums = T::dot::<S, M>(w, panel, self.x, row);
            let bias = self.part.bias.map(|bias| S::load_head(bias.as_ptr().add(feature), lanes));
            for (i, &sum) in sums.iter().enumerate() {
                let sum = bias.map_or(sum, |bias| S::add(sum, bias));
                let to = self.out.add((row + i) * self.stride + self.part.column + feature);
                S::store_head(to, sum, lanes);
            }
        }
        M
    }
}
