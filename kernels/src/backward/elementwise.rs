//! Gradients of norms, rotary embedding and gating.

use crate::{
    elementwise::{Gate, Heads, Norm, Rotation, cap_slope, for_ranges, for_row_ranges, scale_rest},
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Adds the gradient at `x` to `gradient`; `g` is that at `norm(x)`. All are `[rows, norm.weight.len()]`.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn norm_gradient(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &[f32],
    g: &[f32],
    norm: Norm<'_>,
    gradient: &mut [f32],
) {
    let width = norm.weight.len();
    assert!(x.len().is_multiple_of(width), "whole rows");
    assert_eq!(x.len(), g.len(), "x and g have the same rows");
    assert_eq!(x.len(), gradient.len(), "x and its gradient have the same rows");
    let job =
        NormGradient { x: x.as_ptr(), g: g.as_ptr(), norm, gradient: gradient.as_mut_ptr(), rows: (0, 0) };
    for_row_ranges(pool, x.len() / width, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct NormGradient<'a> {
    x: *const f32,
    g: *const f32,
    norm: Norm<'a>,
    gradient: *mut f32,
    rows: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
unsafe impl Sync for NormGradient<'_> {}

impl NormGradient<'_> {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for NormGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let width = self.norm.weight.len();
        for row in self.rows.0..self.rows.1 {
            // SAFETY: `norm_gradient` has checked the sizes; no other thread has the row.
            unsafe {
                let at = |values: *const f32| values.add(row * width);
                let to = self.gradient.add(row * width);
                NormRow::of::<S>(at(self.x), at(self.g), self.norm, width).each::<S>(|c, n, v| {
                    S::store_head(to.add(c), S::add(S::load_head(to.add(c), n), v), n);
                });
            }
        }
    }
}

/// Gradient of one row's norm: `s w g - x s^3 mean(w g x)` with `s = 1 / rms(x)`.
struct NormRow {
    x: *const f32,
    g: *const f32,
    weight: *const f32,
    width: usize,
    scale: f32,
    /// `s^3 mean(w g x)`.
    shrink: f32,
}

impl NormRow {
    /// # Safety
    /// `x`, `g` and the weight have `width` elements.
    #[inline(always)]
    unsafe fn of<S: Simd>(x: *const f32, g: *const f32, norm: Norm<'_>, width: usize) -> Self {
        let weight = norm.weight.as_ptr();
        let (mut squares, mut along) = (S::splat(0.0), S::splat(0.0));
        for c in (0..width).step_by(LANES) {
            let n = LANES.min(width - c);
            // SAFETY: the caller upholds this function's contract.
            unsafe {
                let x = S::load_head(x.add(c), n);
                squares = S::fma(x, x, squares);
                let g = S::mul(S::load_head(g.add(c), n), S::load_head(weight.add(c), n));
                along = S::fma(g, x, along);
            }
        }
        let scale = 1.0 / (S::sum(squares) / width as f32 + norm.eps).sqrt();
        let shrink = scale * scale * scale * (S::sum(along) / width as f32);
        Self { x, g, weight, width, scale, shrink }
    }

    /// Calls `put` with a column, the number of lanes, and their gradients.
    ///
    /// # Safety
    /// The pointers passed to [`Self::of`] are still valid.
    #[inline(always)]
    unsafe fn each<S: Simd>(&self, mut put: impl FnMut(usize, usize, S::F)) {
        let (scale, shrink) = (S::splat(self.scale), S::splat(-self.shrink));
        for c in (0..self.width).step_by(LANES) {
            let n = LANES.min(self.width - c);
            // SAFETY: the caller upholds this function's contract.
            unsafe {
                let g = S::mul(S::load_head(self.g.add(c), n), S::load_head(self.weight.add(c), n));
                let x = S::load_head(self.x.add(c), n);
                put(c, n, S::fma(x, shrink, S::mul(g, scale)));
            }
        }
    }
}

/// Computes the gradient at `[gate | up]`, `[rows, 2 * width]`, from `g` at `gate * sigmoid(z(gate)) * up`.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn gate_mul_gradient(
    pool: &mut ThreadPool,
    isa: Isa,
    gate: Gate,
    gate_up: &[f32],
    g: &[f32],
    width: usize,
    gradient: &mut [f32],
) {
    assert!(g.len().is_multiple_of(width), "whole rows");
    assert_eq!(gate_up.len(), 2 * g.len(), "two inputs an output");
    assert_eq!(gradient.len(), gate_up.len(), "a gradient for each input");
    let job = GateMulGradient {
        gate,
        gate_up: gate_up.as_ptr(),
        g: g.as_ptr(),
        width,
        gradient: gradient.as_mut_ptr(),
        rows: (0, 0),
    };
    for_row_ranges(pool, g.len() / width, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct GateMulGradient {
    gate: Gate,
    gate_up: *const f32,
    g: *const f32,
    width: usize,
    gradient: *mut f32,
    rows: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
unsafe impl Sync for GateMulGradient {}

impl GateMulGradient {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for GateMulGradient {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (one, zero) = (S::splat(1.0), S::splat(0.0));
        for row in self.rows.0..self.rows.1 {
            for c in (0..self.width).step_by(LANES) {
                let n = LANES.min(self.width - c);
                let (gate_at, up_at) = (2 * row * self.width + c, (2 * row + 1) * self.width + c);
                // SAFETY: `gate_mul_gradient` has checked the sizes; no other thread has the row.
                unsafe {
                    let gate = S::load_head(self.gate_up.add(gate_at), n);
                    let up = S::load_head(self.gate_up.add(up_at), n);
                    let g = S::load_head(self.g.add(row * self.width + c), n);
                    let inputs = [gate, up];
                    let [gate, up] = self.gate.limited::<S>(gate, up);
                    let argument = self.gate.argument::<S>(gate);
                    let sigmoid = S::div(one, S::add(one, S::exp(S::sub(zero, argument))));
                    let open = S::mul(gate, sigmoid);
                    // (x sigmoid(z))' = sigmoid + x sigmoid (1 - sigmoid) z'
                    let closing = S::mul(S::sub(one, sigmoid), self.gate.slope::<S>(gate));
                    let slope = S::fma(open, closing, sigmoid);
                    let gradients = [S::mul(S::mul(g, up), slope), S::mul(g, open)];
                    let [of_gate, of_up] = self.gate.within_limits::<S>(inputs, gradients);
                    S::store_head(self.gradient.add(gate_at), of_gate, n);
                    S::store_head(self.gradient.add(up_at), of_up, n);
                }
            }
        }
    }
}

/// Turns `g`, the gradient at the output of [`cap_in_place`](crate::elementwise::cap_in_place), into the
/// gradient at its input, in place.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn cap_gradient(pool: &mut ThreadPool, isa: Isa, capped: &[f32], g: &mut [f32], cap: f32) {
    assert_eq!(capped.len(), g.len(), "a gradient for each element");
    let job = CapGradient { capped: capped.as_ptr(), g: g.as_mut_ptr(), cap, elements: (0, 0) };
    for_ranges(pool, g.len(), |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct CapGradient {
    capped: *const f32,
    g: *mut f32,
    cap: f32,
    elements: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of elements; the buffers outlive the parallel region.
unsafe impl Sync for CapGradient {}

impl CapGradient {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { elements: (from, to), ..*self }
    }
}

impl Kernel for CapGradient {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (from, to) = self.elements;
        for at in (from..to).step_by(LANES) {
            let n = LANES.min(to - at);
            // SAFETY: `cap_gradient` has checked the sizes; no other thread has the elements.
            unsafe {
                let (slope, g) =
                    (cap_slope::<S>(S::load_head(self.capped.add(at), n), self.cap), self.g.add(at));
                S::store_head(g, S::mul(S::load_head(g, n), slope), n);
            }
        }
    }
}

/// Turns the gradient at the output heads of [`rotate`](crate::elementwise::rotate) into the gradient at its
/// input heads, in place.
///
/// `x` are the input rows, read only where heads are normalized. `g` and `x` have rows of `stride` elements.
///
/// # Panics
/// Panics if the shapes do not match.
#[allow(clippy::too_many_arguments, reason = "one operation on one buffer; a struct would only rename them")]
pub fn rotate_gradient(
    pool: &mut ThreadPool,
    isa: Isa,
    g: &mut [f32],
    x: &[f32],
    stride: usize,
    head_dim: usize,
    by: Rotation<'_>,
    heads: &[Heads<'_>],
) {
    let rows = g.len() / stride;
    let half = by.check(head_dim, rows);
    for group in heads {
        assert!(group.column + group.count * head_dim <= stride, "heads lie within a row");
        group.check_norm(head_dim);
        assert!(group.norm.is_none() || x.len() >= g.len(), "normed heads have their inputs");
    }
    let job = RotateGradient {
        g: g.as_mut_ptr(),
        x: x.as_ptr(),
        stride,
        head_dim,
        half,
        cos: by.cos.as_ptr(),
        sin: by.sin.as_ptr(),
        heads,
        rows: (0, 0),
    };
    for_row_ranges(pool, rows, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct RotateGradient<'a> {
    g: *mut f32,
    x: *const f32,
    stride: usize,
    head_dim: usize,
    half: usize,
    cos: *const f32,
    sin: *const f32,
    heads: &'a [Heads<'a>],
    rows: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
unsafe impl Sync for RotateGradient<'_> {}

impl RotateGradient<'_> {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { rows: (from, to), ..*self }
    }
}

impl Kernel for RotateGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let head_dim = self.head_dim;
        for row in self.rows.0..self.rows.1 {
            for group in self.heads {
                for head in 0..group.count {
                    let at = row * self.stride + group.column + head * head_dim;
                    // SAFETY: `rotate_gradient` has checked that heads and angles exist; no other thread has the row.
                    unsafe {
                        let g = self.g.add(at);
                        let (cos, sin) = (self.cos.add(row * self.half), self.sin.add(row * self.half));
                        rotate_back::<S>(g, cos, sin, self.half, group.scale);
                        scale_rest::<S>(g, 2 * self.half, head_dim, group.scale);
                    }
                }
                let Some(norm) = group.norm else { continue };
                let width = norm.weight.len();
                for first in (0..group.count * head_dim).step_by(width) {
                    let at = row * self.stride + group.column + first;
                    // SAFETY: `rotate_gradient` has checked that heads and rows of `x` exist; no other thread has the
                    // row.
                    unsafe {
                        let g = self.g.add(at);
                        NormRow::of::<S>(self.x.add(at), g, norm, width)
                            .each::<S>(|c, n, v| S::store_head(g.add(c), v, n));
                    }
                }
            }
        }
    }
}

/// Applies the transposed rotation and the scale: `(a, b) -> (a cos + b sin, b cos - a sin)`.
#[inline(always)]
unsafe fn rotate_back<S: Simd>(g: *mut f32, cos: *const f32, sin: *const f32, half: usize, scale: f32) {
    let scale = S::splat(scale);
    for c in (0..half).step_by(LANES) {
        let n = LANES.min(half - c);
        // SAFETY: the caller guarantees that the head has `2 * half` elements and the angles `half`.
        unsafe {
            let (a, b) = (S::load_head(g.add(c), n), S::load_head(g.add(half + c), n));
            let (cos, sin) = (S::load_head(cos.add(c), n), S::load_head(sin.add(c), n));
            let first = S::fma(a, cos, S::mul(b, sin));
            let second = S::sub(S::mul(b, cos), S::mul(a, sin));
            S::store_head(g.add(c), S::mul(first, scale), n);
            S::store_head(g.add(half + c), S::mul(second, scale), n);
        }
    }
}
