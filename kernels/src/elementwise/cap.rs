//! Soft cap: values stay within `-cap..=cap`, and small values are nearly unchanged.

use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Minimum number of elements per thread.
const CHUNK: usize = 1 << 12;

/// Splits `elements` among the threads of the pool; `each` gets ranges of elements.
pub(crate) fn for_ranges(pool: &mut ThreadPool, elements: usize, each: impl Fn(usize, usize) + Sync) {
    pool.run(elements.div_ceil(CHUNK), |i| each(i * CHUNK, elements.min((i + 1) * CHUNK)));
}

/// Computes `cap * tanh(x / cap)`.
#[inline(always)]
pub(crate) fn capped<S: Simd>(x: S::F, cap: f32) -> S::F {
    capped_by::<S>(x, cap, S::exp)
}

/// Computes [`capped`] with the same bits on every set.
#[inline(always)]
pub(crate) fn capped_fused<S: Simd>(x: S::F, cap: f32) -> S::F {
    capped_by::<S>(x, cap, S::exp_fused)
}

#[inline(always)]
fn capped_by<S: Simd>(x: S::F, cap: f32, exp: impl Fn(S::F) -> S::F) -> S::F {
    let one = S::splat(1.0);
    // tanh z = 1 - 2 / (1 + e^2z)
    let above = S::add(one, exp(S::mul(x, S::splat(2.0 / cap))));
    S::mul(S::sub(one, S::div(S::splat(2.0), above)), S::splat(cap))
}

/// Returns the derivative of [`capped`], computed from its result.
#[inline(always)]
pub(crate) fn cap_slope<S: Simd>(capped: S::F, cap: f32) -> S::F {
    let tanh = S::mul(capped, S::splat(1.0 / cap));
    S::sub(S::splat(1.0), S::mul(tanh, tanh))
}

/// Computes `x = cap * tanh(x / cap)`.
pub fn cap_in_place(pool: &mut ThreadPool, isa: Isa, x: &mut [f32], cap: f32) {
    let job = Cap { x: x.as_mut_ptr(), cap, elements: (0, 0) };
    for_ranges(pool, x.len(), |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct Cap {
    x: *mut f32,
    cap: f32,
    elements: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of elements; the buffer outlives the parallel region.
unsafe impl Sync for Cap {}

impl Cap {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { elements: (from, to), ..*self }
    }
}

impl Kernel for Cap {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (from, to) = self.elements;
        for at in (from..to).step_by(LANES) {
            let n = LANES.min(to - at);
            // SAFETY: the elements exist, and no other thread has them.
            unsafe {
                let x = self.x.add(at);
                S::store_head(x, capped::<S>(S::load_head(x, n), self.cap), n);
            }
        }
    }
}
