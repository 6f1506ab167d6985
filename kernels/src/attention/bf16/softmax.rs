//! Turns the scores of a row into weights.

use std::ops::Range;

use super::rows::TileRows;
use crate::{
    attention::{attend::SPAN, layout::BLOCK_TOKENS, sum::SoftmaxSum},
    elementwise::capped_fused,
    simd::{LANES, Simd},
};

/// Difference from the largest score below which a weight is 0. `e^LIMIT` is more than 2^-54.
const LIMIT: f32 = -37.0;

/// Coefficients of a polynomial for `2^-f`, with `f` in -0.5..=0.5. The polynomial's error of 10^-4 is a
/// twentieth of the error of rounding to bf16.
const C1: f32 = -0.693_283;
const C2: f32 = 0.242_211_03;
const C3: f32 = -0.055_008_933;

/// Positions whose weights are rounded together.
const STEP: usize = 2 * LANES;

/// A pair of ones in bf16.
const ONES: u32 = 0x3f80_3f80;

/// Adding and subtracting `1.5 * 2^23` rounds a small number to the nearest integer.
const TO_INTEGER: f32 = 12_582_912.0;

impl TileRows<'_> {
    /// Turns the scores of a row for `blocks` of a span into weights, and rescales the earlier sums. A
    /// position that the row does not see gets weight 0.
    ///
    /// # Safety
    /// The scores of the blocks are initialized.
    #[inline(always)]
    pub(super) unsafe fn soften<S: Simd>(&self, row: usize, blocks: &Range<usize>, sum: &mut SoftmaxSum) {
        let span = blocks.start * BLOCK_TOKENS / SPAN * SPAN;
        let (from, to) = self.attend.query(self.first + row).visible_in(span);
        let (scores, weights) = (self.scores(row), self.weights(row));
        let (first, last) =
            if from < to { (from / STEP * STEP, to.next_multiple_of(STEP)) } else { (SPAN, SPAN) };
        // SAFETY: all ranges lie within the span, for whose positions each row has room; blocks that the row sees
        // have scores.
        unsafe {
            for outside in [blocks.start * BLOCK_TOKENS - span..first, last..blocks.end * BLOCK_TOKENS - span]
            {
                weights.add(outside.start).write_bytes(0, outside.len());
            }
            if from >= to {
                return;
            }
            if let Some(cap) = self.attend.cap {
                cap_scores::<S>(scores, from / LANES * LANES..to.next_multiple_of(LANES), cap);
            }
            // Contents of unused slots have no effect.
            (first..from).chain(to..last).for_each(|at| scores.add(at).write(f32::NEG_INFINITY));
            let largest = sum.largest.max(largest::<S>(scores, first..last));
            let total = to_weights::<S>(scores, weights, first..last, largest);
            sum.raise::<S>(largest, self.padded);
            sum.weight += total;
        }
    }
}

#[inline(always)]
unsafe fn cap_scores<S: Simd>(scores: *mut f32, range: Range<usize>, cap: f32) {
    for at in range.step_by(LANES) {
        // SAFETY: the caller guarantees whole vectors of scores.
        unsafe { S::store(scores.add(at), capped_fused::<S>(S::load(scores.add(at)), cap)) };
    }
}

/// Returns the largest score that is a number.
#[inline(always)]
unsafe fn largest<S: Simd>(scores: *const f32, range: Range<usize>) -> f32 {
    let mut largest = [S::splat(f32::NEG_INFINITY); 2];
    for at in range.step_by(STEP) {
        for (i, largest) in largest.iter_mut().enumerate() {
            // The maximum of a NaN and a second number is the second number.
            // SAFETY: the caller guarantees whole steps of scores.
            *largest = unsafe { S::max(S::load(scores.add(at + i * LANES)), *largest) };
        }
    }
    S::max_lane(S::max(largest[0], largest[1]))
}

/// Computes the weights and returns their sum.
#[inline(always)]
unsafe fn to_weights<S: Simd>(
    scores: *const f32,
    weights: *mut u16,
    range: Range<usize>,
    largest: f32,
) -> f32 {
    let mut total = S::splat(0.0);
    for at in range.step_by(STEP) {
        // SAFETY: the caller guarantees whole steps of scores and weights.
        unsafe {
            let first = weight::<S>(S::load(scores.add(at)), largest);
            let second = weight::<S>(S::load(scores.add(at + LANES)), largest);
            let rounded = S::to_bf16(first, second);
            S::store_bytes(weights.add(at).cast(), rounded);
            total = S::dot_bf16(total, rounded, ONES);
        }
    }
    S::sum(total)
}

/// Computes `e^(score - largest)`, 0 if it is tiny or the score is a NaN.
#[inline(always)]
fn weight<S: Simd>(score: S::F, largest: f32) -> S::F {
    let (log2_e, to_integer) = (std::f32::consts::LOG2_E, S::splat(TO_INTEGER));
    let x = S::sub(score, S::splat(largest));
    let n = S::sub(S::fused(x, S::splat(log2_e), to_integer), to_integer);
    let f = S::fused(x, S::splat(-log2_e), n);
    let mut power = S::fused(S::splat(C3), f, S::splat(C2));
    power = S::fused(power, f, S::splat(C1));
    power = S::fused(power, f, S::splat(1.0));
    // Below the limit the power is any number.
    S::where_at_least(S::scale_by_power(power, n), x, S::splat(LIMIT))
}
