//! Softmax over a few choices per row, as the router of a mixture of experts needs it.

use super::for_row_ranges;
use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Replaces each row of `width` elements by `e^x / Σ e^x`, after subtracting the largest. The sum runs from
/// the first element to the last, so a row's bits do not depend on other rows.
///
/// # Panics
/// Panics if the length of `rows` is not a multiple of `width`, or `width` is 0.
pub fn softmax_in_place(pool: &mut ThreadPool, isa: Isa, rows: &mut [f32], width: usize) {
    assert!(width > 0 && rows.len().is_multiple_of(width), "whole rows");
    let job = Softmax { rows: rows.as_mut_ptr(), width, range: (0, 0) };
    for_row_ranges(pool, rows.len() / width, |from, to| isa.dispatch(job.over(from, to)));
}

#[derive(Clone, Copy)]
struct Softmax {
    rows: *mut f32,
    width: usize,
    range: (usize, usize),
}
// SAFETY: each thread gets a disjoint range of rows; the buffer outlives the parallel region.
unsafe impl Sync for Softmax {}

impl Softmax {
    fn over(&self, from: usize, to: usize) -> Self {
        Self { range: (from, to), ..*self }
    }
}

impl Kernel for Softmax {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for row in self.range.0..self.range.1 {
            // SAFETY: the row exists, and no other thread has it.
            let row = unsafe { std::slice::from_raw_parts_mut(self.rows.add(row * self.width), self.width) };
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for some in row.chunks_mut(LANES) {
                let (at, count) = (some.as_mut_ptr(), some.len());
                // SAFETY: `count` lanes exist.
                unsafe {
                    let below = S::sub(S::load_head(at, count), S::splat(largest));
                    S::store_head(at, S::exp(below), count);
                }
            }
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|value| *value /= sum);
        }
    }
}
