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
//! Each operation is in f32, to nearest even, and takes and gives denormals as zero. This is the arithmetic
//! of `TDPBF16PS`, so the matrix unit (`amx`) and vectors (`vectors`) give the same bits, for any batch.

mod amx;
mod vectors;

use self::{amx::AmxChunk, vectors::VectorChunk};
use super::{
    chunk::PanelChunk,
    part::{LinearPart, OutPtr, check_parts, for_each_chunk},
};
use crate::{
    activations::{ActivationForms, Activations},
    isa::{Isa, MatrixUnit},
    pool::ThreadPool,
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
    assert!(x.holds(ActivationForms::BF16_TILES), "activations were prepared as tiles of bf16");
    if rows == 0 {
        return;
    }
    let out = OutPtr(out.as_mut_ptr());
    let has_unit = isa.is_fast_at_bf16();
    for_each_chunk(pool, parts, panels_a_chunk, |part, first, last| {
        let out = &out;
        let matrix_unit = if has_unit { MatrixUnit::Amx } else { MatrixUnit::None };
        let chunk = PanelChunk { x, part, first, last, matrix_unit, out: out.0, stride };
        if has_unit {
            isa.dispatch(AmxChunk(chunk));
        } else {
            isa.dispatch(VectorChunk(chunk));
        }
    });
}

/// Returns the panels per chunk: four chunks per thread, in multiples of the panels that share activations.
fn panels_a_chunk(panels: usize, threads: usize) -> usize {
    panels.div_ceil(4 * threads).next_multiple_of(4)
}
