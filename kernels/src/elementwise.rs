//! Norms, rotary embedding and gating: what happens to a row between two linear layers.
//!
//! Each works on whole rows, one row after another, in lanes of a fixed order: a row's bits do not depend on the
//! other rows.

use crate::{
    isa::Isa,
    pool::Pool,
    simd::{Kernel, LANES, Simd},
};

/// Rows that are worth a second thread.
const ROWS_A_CHUNK: usize = 8;

/// Splits `rows` over the pool; `each` gets ranges of rows.
pub(crate) fn for_row_ranges(pool: &mut Pool, rows: usize, each: impl Fn(usize, usize) + Sync) {
    pool.run(rows.div_ceil(ROWS_A_CHUNK), |i| {
        each(i * ROWS_A_CHUNK, rows.min((i + 1) * ROWS_A_CHUNK));
    });
}

/// `residual += update` (if there is one), then `out = residual / rms(residual) * weight`.
///
/// All are `[rows, width]` with `width = weight.len()`; `rms(x) = sqrt(mean(x^2) + eps)`.
///
/// # Panics
///
/// If the shapes do not fit together.
pub fn add_norm(
    pool: &mut Pool,
    isa: Isa,
    residual: &mut [f32],
    update: Option<&[f32]>,
    norm: Norm<'_>,
    out: &mut [f32],
) {
    let width = norm.weight.len();
    assert_eq!(residual.len(), out.len(), "residual and out have the same rows");
    assert!(residual.len().is_multiple_of(width), "whole rows");
    assert!(update.is_none_or(|update| update.len() == out.len()), "update and out have the same rows");
    let job = AddNorm {
        residual: residual.as_mut_ptr(),
        update: update.map(<[f32]>::as_ptr),
        norm,
        out: out.as_mut_ptr(),
        rows: (0, 0),
    };
    for_row_ranges(pool, out.len() / width, |from, to| isa.dispatch(job.over(from, to)));
}

/// The constants of an RMS norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Multiplies each feature.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

#[derive(Clone, Copy)]
struct AddNorm<'a> {
    residual: *mut f32,
    update: Option<*const f32>,
    norm: Norm<'a>,
    out: *mut f32,
    rows: (usize, usize),
}
// SAFETY: threads are given disjoint ranges of rows of buffers that outlive the parallel region.
unsafe impl Sync for AddNorm<'_> {}

impl AddNorm<'_> {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for AddNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let width = self.norm.weight.len();
        for row in self.rows.0..self.rows.1 {
            // SAFETY: `add_norm` has checked the sizes; the row is this thread's alone.
            unsafe {
                let residual = self.residual.add(row * width);
                if let Some(update) = self.update {
                    add_row::<S>(residual, update.add(row * width), width);
                }
                norm_row::<S>(
                    residual,
                    self.norm.weight.as_ptr(),
                    self.norm.eps,
                    width,
                    self.out.add(row * width),
                );
            }
        }
    }
}

#[inline(always)]
unsafe fn add_row<S: Simd>(to: *mut f32, from: *const f32, width: usize) {
    let mut c = 0;
    while c < width {
        let n = LANES.min(width - c);
        // SAFETY: the caller's: both rows have `width` elements.
        unsafe {
            let sum = S::add(S::load_head(to.add(c), n), S::load_head(from.add(c), n));
            S::store_head(to.add(c), sum, n);
        }
        c += LANES;
    }
}

/// `out` may be `x`.
#[inline(always)]
unsafe fn norm_row<S: Simd>(x: *const f32, weight: *const f32, eps: f32, width: usize, out: *mut f32) {
    let mut squares = S::splat(0.0);
    let mut c = 0;
    while c < width {
        // SAFETY: the caller's: rows and weight have `width` elements.
        let v = unsafe { S::load_head(x.add(c), LANES.min(width - c)) };
        squares = S::fma(v, v, squares);
        c += LANES;
    }
    let scale = S::splat(1.0 / (S::sum(squares) / width as f32 + eps).sqrt());
    c = 0;
    while c < width {
        let n = LANES.min(width - c);
        // SAFETY: as above.
        unsafe {
            let v = S::mul(S::mul(S::load_head(x.add(c), n), scale), S::load_head(weight.add(c), n));
            S::store_head(out.add(c), v, n);
        }
        c += LANES;
    }
}

/// `x = x / rms(x) * weight` for rows of `weight.len()`.
///
/// # Panics
///
/// If these are not whole rows.
pub fn norm_in_place(pool: &mut Pool, isa: Isa, x: &mut [f32], norm: Norm<'_>) {
    assert!(x.len().is_multiple_of(norm.weight.len()), "whole rows");
    let rows = x.len() / norm.weight.len();
    let job = NormInPlace { x: x.as_mut_ptr(), norm, rows: (0, 0) };
    for_row_ranges(pool, rows, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct NormInPlace<'a> {
    x: *mut f32,
    norm: Norm<'a>,
    rows: (usize, usize),
}
// SAFETY: threads are given disjoint ranges of rows of buffers that outlive the parallel region.
unsafe impl Sync for NormInPlace<'_> {}

impl NormInPlace<'_> {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for NormInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Norm { weight, eps } = self.norm;
        for row in self.rows.0..self.rows.1 {
            // SAFETY: `norm_in_place` has checked the size; the row is this thread's alone.
            unsafe {
                let x = self.x.add(row * weight.len());
                norm_row::<S>(x, weight.as_ptr(), eps, weight.len(), x);
            }
        }
    }
}

/// What a gate lets through: `gate * sigmoid(z(gate))`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gate {
    /// `z(x) = x`.
    #[default]
    Silu,
    /// `z(x) = 2 √(2/π) (x + 0.044715 x³)`: the Gaussian error unit, by its approximation with a hyperbolic tangent.
    GeluTanh,
}

/// `2 √(2/π)`, and its share of the cube.
pub(crate) const GELU_LINEAR: f32 = 1.595_769;
pub(crate) const GELU_CUBIC: f32 = GELU_LINEAR * 0.044_715;

impl Gate {
    /// `z(x)`.
    #[inline(always)]
    pub(crate) fn argument<S: Simd>(self, x: S::F) -> S::F {
        match self {
            Self::Silu => x,
            Self::GeluTanh => {
                let square = S::mul(x, x);
                S::mul(x, S::fma(square, S::splat(GELU_CUBIC), S::splat(GELU_LINEAR)))
            }
        }
    }

    /// `z'(x)`.
    #[inline(always)]
    pub(crate) fn slope<S: Simd>(self, x: S::F) -> S::F {
        match self {
            Self::Silu => S::splat(1.0),
            Self::GeluTanh => {
                let square = S::mul(x, x);
                S::fma(square, S::splat(3.0 * GELU_CUBIC), S::splat(GELU_LINEAR))
            }
        }
    }
}

/// `out = gate * sigmoid(z(gate)) * up` for rows `[gate | up]` of `2 * width`.
///
/// # Panics
///
/// If the shapes do not fit together.
pub fn gate_mul(pool: &mut Pool, isa: Isa, gate: Gate, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "two inputs an output");
    assert!(out.len().is_multiple_of(width), "whole rows");
    let job = GateMul { gate, gate_up: gate_up.as_ptr(), out: out.as_mut_ptr(), width, rows: (0, 0) };
    for_row_ranges(pool, out.len() / width, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct GateMul {
    gate: Gate,
    gate_up: *const f32,
    out: *mut f32,
    width: usize,
    rows: (usize, usize),
}
// SAFETY: threads are given disjoint ranges of rows of buffers that outlive the parallel region.
unsafe impl Sync for GateMul {}

impl GateMul {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for GateMul {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for row in self.rows.0..self.rows.1 {
            let mut c = 0;
            while c < self.width {
                let n = LANES.min(self.width - c);
                // SAFETY: `gate_mul` has checked the sizes; the row is this thread's alone.
                unsafe {
                    let gate = S::load_head(self.gate_up.add(2 * row * self.width + c), n);
                    let up = S::load_head(self.gate_up.add((2 * row + 1) * self.width + c), n);
                    let one = S::splat(1.0);
                    let denominator =
                        S::add(one, S::exp(S::sub(S::splat(0.0), self.gate.argument::<S>(gate))));
                    S::store_head(
                        self.out.add(row * self.width + c),
                        S::mul(S::div(gate, denominator), up),
                        n,
                    );
                }
                c += LANES;
            }
        }
    }
}

/// Heads of a row that are normed and rotated.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// Column of the first head.
    pub column: usize,
    /// Heads.
    pub count: usize,
    /// Norm of each head before its rotation (Qwen3, Gemma 3).
    pub norm: Option<Norm<'a>>,
    /// Multiplies the result (`1 / sqrt(head_dim)` for queries).
    pub scale: f32,
}

/// Rotates heads in place: `(a, b) -> (a cos - b sin, b cos + a sin)` for the halves `a`, `b` of each head.
///
/// `x` has rows of `stride`; `cos` and `sin` have rows of `head_dim / 2`, one a row of `x`.
///
/// # Panics
///
/// If the shapes do not fit together.
#[allow(clippy::too_many_arguments, reason = "one operation on one buffer; a struct would only rename them")]
pub fn rotate(
    pool: &mut Pool,
    isa: Isa,
    x: &mut [f32],
    stride: usize,
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
    heads: &[Heads<'_>],
) {
    let rows = x.len() / stride;
    let half = head_dim / 2;
    assert!(cos.len() >= rows * half && sin.len() >= rows * half, "an angle for each row and frequency");
    for group in heads {
        assert!(group.column + group.count * head_dim <= stride, "heads lie within a row");
        assert!(group.norm.is_none_or(|norm| norm.weight.len() == head_dim), "a weight a feature of a head");
    }
    let job =
        Rotate { x: x.as_mut_ptr(), stride, half, cos: cos.as_ptr(), sin: sin.as_ptr(), heads, rows: (0, 0) };
    for_row_ranges(pool, rows, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct Rotate<'a> {
    x: *mut f32,
    stride: usize,
    half: usize,
    cos: *const f32,
    sin: *const f32,
    heads: &'a [Heads<'a>],
    rows: (usize, usize),
}
// SAFETY: threads are given disjoint ranges of rows of buffers that outlive the parallel region.
unsafe impl Sync for Rotate<'_> {}

impl Rotate<'_> {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let head_dim = 2 * self.half;
        for row in self.rows.0..self.rows.1 {
            for group in self.heads {
                for head in 0..group.count {
                    // SAFETY: `rotate` has checked that heads and angles exist; the row is this thread's alone.
                    unsafe {
                        let x = self.x.add(row * self.stride + group.column + head * head_dim);
                        if let Some(norm) = group.norm {
                            norm_row::<S>(x, norm.weight.as_ptr(), norm.eps, head_dim, x);
                        }
                        let (cos, sin) = (self.cos.add(row * self.half), self.sin.add(row * self.half));
                        rotate_head::<S>(x, cos, sin, self.half, group.scale);
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn rotate_head<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, half: usize, scale: f32) {
    let scale = S::splat(scale);
    let mut c = 0;
    while c < half {
        let n = LANES.min(half - c);
        // SAFETY: the caller's: the head has `2 * half` elements, the angles `half`.
        unsafe {
            let (a, b) = (S::load_head(x.add(c), n), S::load_head(x.add(half + c), n));
            let (cos, sin) = (S::load_head(cos.add(c), n), S::load_head(sin.add(c), n));
            let first = S::sub(S::mul(a, cos), S::mul(b, sin));
            let second = S::fma(a, sin, S::mul(b, cos));
            S::store_head(x.add(c), S::mul(first, scale), n);
            S::store_head(x.add(half + c), S::mul(second, scale), n);
        }
        c += LANES;
    }
}
