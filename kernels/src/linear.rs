//! Linear layers: `out = x · Wᵀ (+ bias)` with packed weights.
//!
//! ```text
//! W is [out, in]; sixteen rows of it make a panel, and a lane of a vector is a row of the panel:
//!
//!            lane 0           lane 1               lane 15
//! step 0   w[0][0..4]       w[1][0..4]     ...   w[15][0..4]      one vector = 16 rows x 4 bytes
//! step 1   w[0][4..8]       w[1][4..8]     ...   w[15][4..8]
//! ```
//!
//! A step of integer weights is four elements of each row, of bf16 two, of floats one. The activations' element(s)
//! are broadcast, so an output is summed in one lane, over `in` from first to last: its bits depend on its weights
//! and its activations alone, never on the batch, the thread or the shape of the tile that computed it.
//!
//! [`linear`] rounds activations to the weights' precision, as fast as the bytes arrive. [`linear_unrounded`] leaves them
//! as they are and [`linear_transposed`] is its backward pass: both over the same values of the same panels.

mod float;
mod integer;
mod pack;
mod transposed;
mod unrounded;
mod values;

use std::{mem::MaybeUninit, ops::Range};

use crate::{
    activations::Activations,
    isa::{Isa, Kernel},
    pool::Pool,
    simd::{LANES, Simd},
};
use pack::Packing;
pub use pack::{PackError, PackedMatrix};
pub use transposed::linear_transposed;
pub use unrounded::linear_unrounded;

/// Rows of activations that a panel meets before the next panel is loaded: they stay in the second-level cache.
const ROW_BLOCK: usize = 64;

/// A matrix and where its outputs go in a row of `out`.
#[derive(Debug, Clone, Copy)]
pub struct LinearPart<'a> {
    /// The weights.
    pub matrix: &'a PackedMatrix,
    /// Added to the outputs, one an output feature.
    pub bias: Option<&'a [f32]>,
    /// Column of `out` of the first output feature.
    pub column: usize,
}

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

/// Panics unless `parts` have rows of `width` elements and lie side by side in rows of `stride` outputs.
fn check_parts(parts: &[LinearPart<'_>], width: usize, stride: usize) {
    for part in parts {
        assert_eq!(part.matrix.columns(), width, "weights and activations have the same inner width");
        assert!(part.column + part.matrix.rows() <= stride, "the part's outputs lie within a row of out");
        assert!(part.bias.is_none_or(|bias| bias.len() == part.matrix.rows()), "one bias an output feature");
    }
    let in_order = |pair: &[LinearPart<'_>]| pair[0].column + pair[0].matrix.rows() <= pair[1].column;
    assert!(parts.windows(2).all(in_order), "parts write disjoint columns, in ascending order");
}

/// `range` in blocks of `step`; the last may be smaller.
#[inline(always)]
fn blocks(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(step).map(move |start| start..range.end.min(start + step))
}

/// Room on the stack for decoded values, from the start of a cache line.
#[repr(align(64))]
struct Room<const N: usize>([MaybeUninit<f32>; N]);

impl<const N: usize> Room<N> {
    #[inline(always)]
    fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; N])
    }

    #[inline(always)]
    fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// Enough chunks that a late thread can be helped out, few enough that claiming them costs nothing.
fn panels_a_chunk(panels: usize, rows: usize, threads: usize) -> usize {
    let chunks = threads * if rows < ROW_BLOCK { 4 } else { 8 };
    panels.div_ceil(chunks).max(1)
}

/// Calls `each` with the parts' own panel ranges that make up the range `first..last` over all of them.
fn for_each_part<'a>(
    parts: &[LinearPart<'a>],
    first: usize,
    last: usize,
    mut each: impl FnMut(LinearPart<'a>, usize, usize),
) {
    let mut base = 0;
    for part in parts {
        let end = base + part.matrix.panels();
        let (from, to) = (first.max(base), last.min(end));
        if from < to {
            each(*part, from - base, to - base);
        }
        base = end;
    }
}

struct OutPtr(*mut f32);
// SAFETY: chunks write disjoint columns of a buffer that outlives the parallel region.
unsafe impl Sync for OutPtr {}

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
                match self.part.matrix.packing {
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

/// How sums over a panel are taken for one packing.
trait Tile {
    /// The dot products of `M` rows of `x`, from `row` on, with the sixteen rows of `panel`.
    ///
    /// # Safety
    ///
    /// `panel` and the rows exist, and `x` was prepared in the packing's form.
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M];
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
