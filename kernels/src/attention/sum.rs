//! Running softmax sum of a query, which can be computed in parts.

use super::layout::MAX_HEAD_DIM;
use crate::simd::{LANES, Simd};

/// Values weighted by `exp(score - largest)`, and the sum of the weights.
#[derive(Clone, Copy)]
pub(super) struct SoftmaxSum {
    pub(super) largest: f32,
    pub(super) weight: f32,
    pub(super) values: [f32; MAX_HEAD_DIM],
}

impl SoftmaxSum {
    /// The sum over no positions.
    pub(super) const EMPTY: Self =
        Self { largest: f32::NEG_INFINITY, weight: 0.0, values: [0.0; MAX_HEAD_DIM] };

    /// Returns the number of `f32` values that [`SoftmaxSum::save`] writes for values of this padded width.
    pub(super) fn saved(padded: usize) -> usize {
        padded + 2
    }

    /// Rescales the weights to a new largest score.
    #[inline(always)]
    pub(super) fn rescale<S: Simd>(&mut self, largest: f32, padded: usize) {
        let by = exp_one::<S>(self.largest - largest);
        self.largest = largest;
        self.weight *= by;
        for at in (0..padded).step_by(LANES) {
            // SAFETY: the accesses cover whole vectors of an array of the widest head.
            unsafe {
                let p = self.values.as_mut_ptr().add(at);
                S::store(p, S::mul(S::load(p), S::splat(by)));
            }
        }
    }

    #[inline(always)]
    pub(super) fn join<S: Simd>(&mut self, later: &Self, padded: usize) {
        if later.largest == f32::NEG_INFINITY {
            return;
        }
        if self.largest == f32::NEG_INFINITY {
            *self = *later;
            return;
        }
        self.rescale::<S>(self.largest.max(later.largest), padded);
        let by = exp_one::<S>(later.largest - self.largest);
        self.weight += later.weight * by;
        for at in (0..padded).step_by(LANES) {
            // SAFETY: the accesses cover whole vectors of arrays of the widest head.
            unsafe {
                let p = self.values.as_mut_ptr().add(at);
                let more = S::load(later.values.as_ptr().add(at));
                S::store(p, S::fma(more, S::splat(by), S::load(p)));
            }
        }
    }

    /// Writes the weighted mean of the values.
    ///
    /// # Safety
    /// `out` is valid for `head_dim` elements.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&self, out: *mut f32, head_dim: usize) {
        let inverse = S::splat(1.0 / self.weight);
        for at in (0..head_dim).step_by(LANES) {
            // SAFETY: the caller guarantees `head_dim` elements of `out`; the array has at least as many.
            unsafe {
                let v = S::mul(S::load(self.values.as_ptr().add(at)), inverse);
                S::store_head(out.add(at), v, LANES.min(head_dim - at));
            }
        }
    }

    /// Saves the sum for [`SoftmaxSum::load`].
    ///
    /// # Safety
    /// `to` is valid for [`SoftmaxSum::saved`] elements.
    #[inline(always)]
    pub(super) unsafe fn save(&self, to: *mut f32, padded: usize) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            std::ptr::copy_nonoverlapping(self.values.as_ptr(), to, padded);
            to.add(padded).write(self.largest);
            to.add(padded + 1).write(self.weight);
        }
    }

    /// Loads a sum that was saved.
    ///
    /// # Safety
    /// [`SoftmaxSum::save`] has written `from`, for values of the same padded width.
    #[inline(always)]
    pub(super) unsafe fn load(from: *const f32, padded: usize) -> Self {
        let mut sum = Self::EMPTY;
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            std::ptr::copy_nonoverlapping(from, sum.values.as_mut_ptr(), padded);
            sum.largest = from.add(padded).read();
            sum.weight = from.add(padded + 1).read();
        }
        sum
    }
}

#[inline(always)]
fn exp_one<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: the access covers one whole vector of the array.
    unsafe { S::store(lanes.as_mut_ptr(), S::exp(S::splat(x))) };
    lanes[0]
}
