//! Norms, rotary embedding and gating: operations on a row between two linear layers.
//!
//! Each operates on whole rows, in lanes of a fixed order: a row's bits do not depend on other rows.
//!
//! - `gate`: the gate of the feed-forward block.
//! - `cap`: a soft cap on values.
//! - `softmax`: probabilities of a few choices.

mod cap;
mod gate;
mod softmax;

pub(crate) use self::cap::{cap_slope, capped, capped_fused, for_ranges};
pub use self::{
    cap::cap_in_place,
    gate::{Gate, gate_mul},
    softmax::softmax_in_place,
};

use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Minimum number of rows per thread.
const ROWS_A_CHUNK: usize = 8;

/// Splits `rows` among the threads of the pool; `each` gets ranges of rows.
pub(crate) fn for_row_ranges(pool: &mut ThreadPool, rows: usize, each: impl Fn(usize, usize) + Sync) {
    pool.run(rows.div_ceil(ROWS_A_CHUNK), |i| {
        each(i * ROWS_A_CHUNK, rows.min((i + 1) * ROWS_A_CHUNK));
    });
}

/// Computes `residual += update` (if there is an update), then `out = residual / rms(residual) * weight`.
///
/// All are `[rows, width]` with `width = weight.len()`; `rms(x) = sqrt(mean(x^2) + eps)`.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn add_norm(
    pool: &mut ThreadPool,
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

/// Parameters of an RMS norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Factor of each feature.
    pub weight: &'a [f32],
    /// Constant added to the mean square.
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
// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
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
            // SAFETY: `add_norm` has checked the sizes; no other thread has the row.
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
        // SAFETY: the caller guarantees that both rows have `width` elements.
        unsafe {
            let sum = S::add(S::load_head(to.add(c), n), S::load_head(from.add(c), n));
            S::store_head(to.add(c), sum, n);
        }
        c += LANES;
    }
}

/// Normalizes a row; `out` may be `x`.
#[inline(always)]
unsafe fn norm_row<S: Simd>(x: *const f32, weight: *const f32, eps: f32, width: usize, out: *mut f32) {
    let mut squares = S::splat(0.0);
    let mut c = 0;
    while c < width {
        // SAFETY: the caller guarantees that rows and weight have `width` elements.
        let v = unsafe { S::load_head(x.add(c), LANES.min(width - c)) };
        squares = S::fma(v, v, squares);
        c += LANES;
    }
    let scale = S::splat(1.0 / (S::sum(squares) / width as f32 + eps).sqrt());
    c = 0;
    while c < width {
        let n = LANES.min(width - c);
        // SAFETY: the caller guarantees that rows and weight have `width` elements.
        unsafe {
            let v = S::mul(S::mul(S::load_head(x.add(c), n), scale), S::load_head(weight.add(c), n));
            S::store_head(out.add(c), v, n);
        }
        c += LANES;
    }
}

/// Computes `x = x / rms(x) * weight` for rows of `weight.len()` elements.
///
/// # Panics
/// Panics if the length is not a multiple of the row width.
pub fn norm_in_place(pool: &mut ThreadPool, isa: Isa, x: &mut [f32], norm: Norm<'_>) {
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
// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
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
            // SAFETY: `norm_in_place` has checked the size; no other thread has the row.
            unsafe {
                let x = self.x.add(row * weight.len());
                norm_row::<S>(x, weight.as_ptr(), eps, weight.len(), x);
            }
        }
    }
}

/// Heads of a row to normalize and rotate.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// Column of the first head.
    pub column: usize,
    /// Number of consecutive heads.
    pub count: usize,
    /// Norm before the rotation: of each head (Qwen3, Gemma 3), or of several at once, by its width (OLMo 2).
    pub norm: Option<Norm<'a>>,
    /// Factor of the result (`1 / sqrt(head_dim)` for queries).
    pub scale: f32,
}

impl Heads<'_> {
    /// Checks that the norm covers whole heads, and the same number of heads each time.
    pub(crate) fn check_norm(&self, head_dim: usize) {
        let fits =
            |width: usize| width.is_multiple_of(head_dim) && (self.count * head_dim).is_multiple_of(width);
        assert!(self.norm.is_none_or(|norm| fits(norm.weight.len())), "a norm of whole heads");
    }
}

/// Angles of the rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Number of leading features of a head that are rotated; even.
    pub width: usize,
    /// Cosines of the angles, `[rows, width / 2]`.
    pub cos: &'a [f32],
    /// Sines of the angles, `[rows, width / 2]`.
    pub sin: &'a [f32],
}

impl Rotation<'_> {
    /// Checks the rotation for `rows` rows of heads of `head_dim`; returns half of its width.
    pub(crate) fn check(&self, head_dim: usize, rows: usize) -> usize {
        let half = self.width / 2;
        assert!(self.width.is_multiple_of(2) && self.width <= head_dim, "features of a head, two by two");
        assert!(
            self.cos.len() >= rows * half && self.sin.len() >= rows * half,
            "an angle for each row and frequency"
        );
        half
    }
}

/// Rotates heads in place: `(a, b) -> (a cos - b sin, b cos + a sin)` for the halves `a`, `b` of each head's
/// rotated features. `x` has rows of `stride` elements.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn rotate(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &mut [f32],
    stride: usize,
    head_dim: usize,
    by: Rotation<'_>,
    heads: &[Heads<'_>],
) {
    let rows = x.len() / stride;
    let half = by.check(head_dim, rows);
    let (cos, sin) = (by.cos.as_ptr(), by.sin.as_ptr());
    for group in heads {
        assert!(group.column + group.count * head_dim <= stride, "heads lie within a row");
        group.check_norm(head_dim);
    }
    let job = Rotate { x: x.as_mut_ptr(), stride, head_dim, half, cos, sin, heads, rows: (0, 0) };
    for_row_ranges(pool, rows, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct Rotate<'a> {
    x: *mut f32,
    stride: usize,
    head_dim: usize,
    half: usize,
    cos: *const f32,
    sin: *const f32,
    heads: &'a [Heads<'a>],
    rows: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
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
        let head_dim = self.head_dim;
        for row in self.rows.0..self.rows.1 {
            for group in self.heads {
                if let Some(Norm { weight, eps }) = group.norm {
                    for at in (0..group.count * head_dim).step_by(weight.len()) {
                        // SAFETY: `rotate` has checked that the heads exist; no other thread has the row.
                        unsafe {
                            let x = self.x.add(row * self.stride + group.column + at);
                            norm_row::<S>(x, weight.as_ptr(), eps, weight.len(), x);
                        }
                    }
                }
                for head in 0..group.count {
                    // SAFETY: `rotate` has checked that heads and angles exist; no other thread has the row.
                    unsafe {
                        let x = self.x.add(row * self.stride + group.column + head * head_dim);
                        let (cos, sin) = (self.cos.add(row * self.half), self.sin.add(row * self.half));
                        rotate_head::<S>(x, cos, sin, self.half, group.scale);
                        scale_rest::<S>(x, 2 * self.half, head_dim, group.scale);
                    }
                }
            }
        }
    }
}

#[inline(always)]
pub(crate) unsafe fn scale_rest<S: Simd>(x: *mut f32, from: usize, to: usize, scale: f32) {
    for c in (from..to).step_by(LANES) {
        let n = LANES.min(to - c);
        // SAFETY: the caller guarantees that the head has `to` elements.
        unsafe { S::store_head(x.add(c), S::mul(S::load_head(x.add(c), n), S::splat(scale)), n) };
    }
}

#[inline(always)]
unsafe fn rotate_head<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, half: usize, scale: f32) {
    let scale = S::splat(scale);
    let mut c = 0;
    while c < half {
        let n = LANES.min(half - c);
        // SAFETY: the caller guarantees that the head has `2 * half` elements and the angles `half`.
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
