//! Linear layers in bf16: activations and weights are rounded to bf16, sums have 32 bits.
//!
//! ```text
//! weight        fma(code, scale, offset) in f32 as `values` decodes it, rounded half up:
//!               (bits + 0x8000) >> 16; an f32 or f16 weight is rounded alike; bf16 is taken as stored
//! activation    rounded to the nearest, ties to even
//! ```
//!
//! An infinite value stays infinite and a NaN a NaN. Columns beyond the end of a row, up to a multiple of 32,
//! are zeros. One output is a sum over groups of 32 columns, in the order of `in`:
//!
//! ```text
//! e = 0; o = 0; for k in 0..16 { e = fma(x[2k], w[2k], e); o = fma(x[2k+1], w[2k+1], o) }
//! sum = sum + (e + o)        and after the last group (+ bias)
//! ```
//!
//! The gradient at the inputs is the same sum over groups of 32 outputs of each part, in the order of the
//! parts: `x` is then a row of gradients, and the outputs beyond the last of a part are zeros.
//!
//! Each operation is in f32, to nearest even, and takes and gives denormals as zero. These rules are the
//! arithmetic of `TDPBF16PS`, so the matrix unit (`amx`) and vectors (`vectors`) give the same bits, for any
//! batch.

mod amx;
mod matrix;
mod stacked;
mod vectors;

pub(crate) use self::matrix::{MatrixProduct, PairFactor, PairTiles, RowTiles};

use std::ops::Range;

use self::{
    amx::AmxChunk,
    stacked::StackedParts,
    vectors::{DecodedWeights, VectorChunk},
};
use super::{
    out_panels::OutPanels,
    part::{LinearPart, OutPtr, check_parts, for_each_chunk},
    transposed::SumFrom,
};
use crate::{
    activations::{ActivationForms, Activations, Rounding, TiledRows},
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES},
};

/// Computes `parts` for every row of `x` in bf16 into rows of `out` of `stride` elements, on all threads of
/// `pool`. `x` must have been prepared in the form [`ActivationForms::BF16_TILES`].
///
/// # Panics
/// Panics if the shapes do not match.
pub fn linear_bf16(
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
    let x = x.tiled();
    if rows == 0 {
        return;
    }
    let out = OutPtr(out.as_mut_ptr());
    for_each_chunk(pool, parts, panels_a_chunk, |part, first, last| {
        let out = OutPanels::of_part(&part, &out, stride);
        Chunk { x, weights: part.matrix, panels: first..last, from: SumFrom::Zero, out }.run(isa);
    });
}

/// Computes the gradient at the inputs of `parts` in bf16 for every row of `g`, which has a column for each
/// output; `out` is `[rows, columns]`. Without parts it is the initial value of the sums.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn linear_transposed_bf16(
    pool: &mut ThreadPool,
    isa: Isa,
    g: &mut Activations,
    parts: &[LinearPart<'_>],
    from: SumFrom,
    out: &mut [f32],
) {
    let Some(columns) = parts.first().map(|part| part.matrix.columns()) else {
        return if from == SumFrom::Zero {
            out.fill(0.0)
        };
    };
    check_parts(parts, columns, g.width());
    let rows = g.rows();
    assert_eq!(out.len(), rows * columns, "out is {rows} rows of {columns}");
    if rows == 0 {
        return;
    }
    let mut aligned = Activations::default();
    let weights = StackedParts(parts);
    let (g, first) = match weights.first_group(g.width()) {
        Some(first) => (g, first),
        None => {
            weights.align(g, &mut aligned);
            (&mut aligned, 0)
        }
    };
    g.prepare(pool, isa, ActivationForms::BF16_TILES, Rounding::INT8);
    let x = g.tiled().columns(first, weights.groups());
    let out = OutPtr(out.as_mut_ptr());
    let panels = columns.div_ceil(LANES);
    let chunk = panels_a_chunk(panels, pool.threads());
    pool.run(panels.div_ceil(chunk), |i| {
        let panels = i * chunk..panels.min((i + 1) * chunk);
        Chunk { x, weights, panels, from, out: OutPanels::of_rows(&out, columns, columns) }.run(isa);
    });
}

/// Returns the panels per chunk: four chunks per thread, in multiples of the panels that share activations.
fn panels_a_chunk(panels: usize, threads: usize) -> usize {
    panels.div_ceil(4 * threads).next_multiple_of(4)
}

/// Work of one thread: `panels` of sixteen outputs each, for all rows of `x`.
struct Chunk<'a, W> {
    x: TiledRows<'a>,
    /// A packed matrix, or [`StackedParts`] for a gradient.
    weights: W,
    /// The first is even.
    panels: Range<usize>,
    from: SumFrom,
    out: OutPanels<'a>,
}

impl<'a, W: DecodedWeights> Chunk<'a, W>
where
    AmxChunk<'a, W>: Kernel<Output = ()>,
{
    fn run(self, isa: Isa) {
        if isa.is_fast_at_bf16() {
            isa.dispatch(AmxChunk(self));
        } else {
            isa.dispatch(VectorChunk(self));
        }
    }
}
