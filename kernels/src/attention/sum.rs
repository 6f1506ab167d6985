//! Running softmax sum of a query, which can be computed in parts.

use std::mem::MaybeUninit;

use super::layout::MAX_HEAD_DIM;
use crate::simd::{LANES, Simd};

/// Values weighted by `exp(score - largest)`, and the sum of the weights. The columns of the padded width are
/// initialized. Values come first: those of an array of sums are rows of a matrix of whole cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct SoftmaxSum {
    values: [MaybeUninit<f32>; MAX_HEAD_DIM],
    pub(super) largest: f32,
    pub(super) weight: f32,
}

impl SoftmaxSum {
    /// Returns the sum over no positions.
    #[inline(always)]
    pub(super) fn empty(padded: usize) -> Self {
        let mut values = [const { MaybeUninit::uninit() }; MAX_HEAD_DIM];
        values[..padded].fill(MaybeUninit::new(0.0));
        Self { values, largest: f32::NEG_INFINITY, weight: 0.0 }
    }

    /// Writes the sum over no positions.
    ///
    /// # Safety
    /// `to` is valid for a sum.
    #[inline(always)]
    pub(super) unsafe fn clear(to: *mut Self, padded: usize) {
        // SAFETY: the caller upholds this function's contract; the padded width is that of a head.
        unsafe {
            (&raw mut (*to).values).cast::<f32>().write_bytes(0, padded);
            (&raw mut (*to).largest).write(f32::NEG_INFINITY);
            (&raw mut (*to).weight).write(0.0);
        }
    }

    #[inline(always)]
    pub(super) fn values(&self) -> *const f32 {
        self.values.as_ptr().cast()
    }

    #[inline(always)]
    pub(super) fn values_mut(&mut self) -> *mut f32 {
        self.values.as_mut_ptr().cast()
    }

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
        self.map_values::<S>(padded, |values| S::mul(values, S::splat(by)));
    }

    /// Rescales the weights if `largest` differs from the largest score so far; denormal values become 0.
    #[inline(always)]
    pub(super) fn raise<S: Simd>(&mut self, largest: f32, padded: usize) {
        if largest != self.largest {
            self.rescale::<S>(largest, padded);
            self.map_values::<S>(padded, S::flushed);
        }
    }

    #[inline(always)]
    pub(super) fn map_values<S: Simd>(&mut self, padded: usize, map: impl Fn(S::F) -> S::F) {
        for at in (0..padded).step_by(LANES) {
            // SAFETY: the accesses cover whole vectors of an array of the widest head.
            unsafe {
                let p = self.values_mut().add(at);
                S::store(p, map(S::load(p)));
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
                let p = self.values_mut().add(at);
                let more = S::load(later.values().add(at));
                S::store(p, S::fused(more, S::splat(by), S::load(p)));
            }
        }
    }

    /// Returns the total of all weights with that of the sink, relative to the largest score without a sink.
    #[inline(always)]
    pub(super) fn total<S: Simd>(&self, sink: Option<f32>) -> f32 {
        match sink {
            None => self.weight,
            Some(sink) => self.weight + exp_one::<S>(sink - self.largest),
        }
    }

    /// Writes the values times `inverse`, the inverse of the total weight.
    ///
    /// # Safety
    /// `out` is valid for `head_dim` elements.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&self, inverse: f32, out: *mut f32, head_dim: usize) {
        let inverse = S::splat(inverse);
        for at in (0..head_dim).step_by(LANES) {
            // SAFETY: the caller guarantees `head_dim` elements of `out`; the array has at least as many.
            unsafe {
                let v = S::mul(S::load(self.values().add(at)), inverse);
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
            std::ptr::copy_nonoverlapping(self.values(), to, padded);
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
        let mut sum = Self::empty(padded);
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            std::ptr::copy_nonoverlapping(from, sum.values_mut(), padded);
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
    unsafe { S::store(lanes.as_mut_ptr(), S::exp_fused(S::splat(x))) };
    lanes[0]
}
