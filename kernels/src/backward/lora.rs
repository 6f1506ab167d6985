//! Gradients of low-rank deltas `y += scale * B (A x)`, from `g`, the gradient at `y`:
//!
//! ```text
//! h = scale * g B      gradient of A += hᵀ x      of B += gᵀ (scale * A x)      at x += h A
//! ```

use std::ops::Range;

use super::{
    SUM_ROWS,
    attention::SequenceRows,
    product::{SmallProduct, Strided, WriteMode},
};
use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Rows, and columns, that a thread takes at a time.
const ROWS_A_CHUNK: usize = 32;
const COLUMNS_A_CHUNK: usize = 192;

/// The two factors of one adapted linear layer.
#[derive(Debug, Clone, Copy)]
pub struct Factors<'a> {
    /// Rank, shared by both factors.
    pub rank: usize,
    /// Factor of the whole delta.
    pub scale: f32,
    /// Factor A, `[rank, inputs]`, row-major.
    pub a: &'a [f32],
    /// Factor B, `[outputs, rank]`, row-major.
    pub b: &'a [f32],
}

impl Factors<'_> {
    fn inputs(&self) -> usize {
        self.a.len() / self.rank
    }

    fn outputs(&self) -> usize {
        self.b.len() / self.rank
    }
}

/// Inputs of an adapted layer, and the gradient at its outputs.
#[derive(Debug, Clone, Copy)]
pub struct DeltaGradient<'a> {
    /// Inputs of the layer, `[rows, inputs]`.
    pub x: &'a [f32],
    /// Gradient at the outputs: rows of `stride` elements, with this layer's outputs from `column` on.
    pub g: &'a [f32],
    /// Number of elements per row of `g`.
    pub stride: usize,
    /// Column of the layer's first output.
    pub column: usize,
}

/// Gradients of both factors, summed over calls.
#[derive(Debug)]
pub struct FactorGradients<'a> {
    /// Gradient of A, `[rank, inputs]`.
    pub a: &'a mut [f32],
    /// Gradient of B, `[outputs, rank]`.
    pub b: &'a mut [f32],
}

/// Intermediate values between the two factors; callers reuse the memory between calls.
#[derive(Debug, Default)]
pub struct LoraScratch {
    /// `[inputs, rank]`, multiplied by the scale.
    a_transposed: Vec<f32>,
    /// `[rows, rank]`: `scale * A x`.
    shrunk: Vec<f32>,
    /// `[rows, rank]`: `scale * g B`.
    h: Vec<f32>,
}

impl LoraScratch {
    fn fit(&mut self, factors: Factors<'_>, rows: usize) {
        let (rank, inputs) = (factors.rank, factors.inputs());
        self.a_transposed.resize(inputs * rank, 0.0);
        for (r, row) in factors.a.chunks_exact(inputs).enumerate() {
            for (k, &value) in row.iter().enumerate() {
                self.a_transposed[k * rank + r] = value * factors.scale;
            }
        }
        self.shrunk.resize(rows * rank, 0.0);
        self.h.resize(rows * rank, 0.0);
    }
}

/// Adds the gradients over the rows of all `sequences`, in order, to `gradients`. Adds the gradient at the
/// inputs of all rows to `gx`, `[rows, inputs]`.
///
/// # Panics
/// Panics if the shapes do not match.
#[allow(clippy::too_many_arguments, reason = "one operation; its operands are what they are")]
pub fn lora_gradients(
    pool: &mut ThreadPool,
    isa: Isa,
    factors: Factors<'_>,
    reached: DeltaGradient<'_>,
    sequences: &[SequenceRows],
    scratch: &mut LoraScratch,
    gradients: &mut FactorGradients<'_>,
    gx: Option<&mut [f32]>,
) {
    let (rank, inputs, outputs) = (factors.rank, factors.inputs(), factors.outputs());
    let rows = reached.x.len() / inputs;
    assert_eq!(reached.x.len(), rows * inputs, "whole rows of x");
    assert!(reached.g.len() >= rows * reached.stride, "a row of g for each of x");
    assert!(reached.column + outputs <= reached.stride, "the outputs lie within a row of g");
    assert_eq!(gradients.a.len(), rank * inputs, "a gradient for each element of A");
    assert_eq!(gradients.b.len(), outputs * rank, "a gradient for each element of B");
    assert!(sequences.iter().all(|sequence| sequence.first + sequence.count <= rows), "the rows exist");
    assert!(gx.as_ref().is_none_or(|gx| gx.len() == rows * inputs), "a row of gx for each of x");
    scratch.fit(factors, rows);
    let job = LoraGradientJob {
        factors,
        reached,
        sequences,
        a_transposed: &scratch.a_transposed,
        shrunk: scratch.shrunk.as_mut_ptr(),
        h: scratch.h.as_mut_ptr(),
        gx: gx.map(<[f32]>::as_mut_ptr),
        to_a: gradients.a.as_mut_ptr(),
        to_b: gradients.b.as_mut_ptr(),
    };
    pool.run(rows.div_ceil(ROWS_A_CHUNK), |i| {
        let first = i * ROWS_A_CHUNK;
        isa.dispatch(MiddleChunk { job: &job, first, count: ROWS_A_CHUNK.min(rows - first) });
    });
    let of_a = inputs.div_ceil(COLUMNS_A_CHUNK);
    pool.run(of_a + outputs.div_ceil(COLUMNS_A_CHUNK), |i| match i.checked_sub(of_a) {
        None => isa.dispatch(GradientOfA { job: &job, inputs: chunk(i, inputs) }),
        Some(i) => isa.dispatch(GradientOfB { job: &job, outputs: chunk(i, outputs) }),
    });
}

/// Returns the columns of chunk `i` of a matrix of `columns` columns.
fn chunk(i: usize, columns: usize) -> Range<usize> {
    i * COLUMNS_A_CHUNK..columns.min((i + 1) * COLUMNS_A_CHUNK)
}

struct LoraGradientJob<'a> {
    factors: Factors<'a>,
    reached: DeltaGradient<'a>,
    sequences: &'a [SequenceRows],
    a_transposed: &'a [f32],
    shrunk: *mut f32,
    h: *mut f32,
    gx: Option<*mut f32>,
    to_a: *mut f32,
    to_b: *mut f32,
}
// SAFETY: each thread writes its own rows, then its own columns; the buffers outlive the parallel regions.
unsafe impl Sync for LoraGradientJob<'_> {}

impl LoraGradientJob<'_> {
    /// Returns the row ranges that form one sum each, in order.
    #[inline(always)]
    fn sums(&self) -> impl Iterator<Item = SequenceRows> {
        self.sequences.iter().flat_map(|sequence| {
            (0..sequence.count).step_by(SUM_ROWS).map(|first| SequenceRows {
                first: sequence.first + first,
                count: SUM_ROWS.min(sequence.count - first),
            })
        })
    }

    #[inline(always)]
    fn g(&self, row: usize, output: usize) -> *const f32 {
        self.reached.g.as_ptr().wrapping_add(row * self.reached.stride + self.reached.column + output)
    }
}

/// Computes the intermediate values, and the gradient at the inputs, of some rows.
struct MiddleChunk<'a> {
    job: &'a LoraGradientJob<'a>,
    first: usize,
    count: usize,
}

impl Kernel for MiddleChunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self {
            job: &LoraGradientJob { factors, reached, a_transposed, shrunk, h, gx, .. },
            first,
            count,
        } = self;
        let (rank, inputs, outputs) = (factors.rank, factors.inputs(), factors.outputs());
        // SAFETY: `lora_gradients` has checked the shapes; no other thread has these rows.
        unsafe {
            let x = Strided::rows(reached.x.as_ptr().add(first * inputs), inputs);
            let to_rank = |a: Strided, b: &[f32], c: *mut f32, k: usize| SmallProduct {
                a,
                b: b.as_ptr(),
                b_stride: rank,
                c: c.add(first * rank),
                c_stride: rank,
                m: count,
                n: rank,
                k,
                into: WriteMode::Place,
            };
            to_rank(x, a_transposed, shrunk, inputs).run::<S>();
            let g = Strided::rows(self.job.g(first, 0), reached.stride);
            to_rank(g, factors.b, h, outputs).run::<S>();
            let h = h.add(first * rank);
            let scale = S::splat(factors.scale);
            for c in (0..count * rank).step_by(LANES) {
                let n = LANES.min(count * rank - c);
                S::store_head(h.add(c), S::mul(S::load_head(h.add(c), n), scale), n);
            }
            let Some(gx) = gx else { return };
            let to_inputs = SmallProduct {
                a: Strided::rows(h, rank),
                b: factors.a.as_ptr(),
                b_stride: inputs,
                c: gx.add(first * inputs),
                c_stride: inputs,
                m: count,
                n: inputs,
                k: rank,
                into: WriteMode::Sum,
            };
            to_inputs.run::<S>();
        }
    }
}

struct GradientOfA<'a> {
    job: &'a LoraGradientJob<'a>,
    inputs: Range<usize>,
}

impl Kernel for GradientOfA<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { job: &LoraGradientJob { factors, reached, h, to_a, .. }, inputs } = self;
        let (rank, width) = (factors.rank, factors.inputs());
        for rows in self.job.sums() {
            // SAFETY: `lora_gradients` has checked the shapes; no other thread has these columns.
            unsafe {
                let product = SmallProduct {
                    a: Strided::transposed(h.add(rows.first * rank), rank),
                    b: reached.x.as_ptr().add(rows.first * width + inputs.start),
                    b_stride: width,
                    c: to_a.add(inputs.start),
                    c_stride: width,
                    m: rank,
                    n: inputs.len(),
                    k: rows.count,
                    into: WriteMode::Sum,
                };
                product.run::<S>();
            }
        }
    }
}

struct GradientOfB<'a> {
    job: &'a LoraGradientJob<'a>,
    outputs: Range<usize>,
}

impl Kernel for GradientOfB<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { job: &LoraGradientJob { factors, reached, shrunk, to_b, .. }, outputs } = self;
        let rank = factors.rank;
        for rows in self.job.sums() {
            // SAFETY: `lora_gradients` has checked the shapes; no other thread has these rows of B.
            unsafe {
                let product = SmallProduct {
                    a: Strided::transposed(self.job.g(rows.first, outputs.start), reached.stride),
                    b: shrunk.add(rows.first * rank),
                    b_stride: rank,
                    c: to_b.add(outputs.start * rank),
                    c_stride: rank,
                    m: outputs.len(),
                    n: rank,
                    k: rows.count,
                    into: WriteMode::Sum,
                };
                product.run::<S>();
            }
        }
    }
}
