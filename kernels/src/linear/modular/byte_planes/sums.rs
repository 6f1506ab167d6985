//! Combines sums of planes with codes, and multiplies them by scales.

use super::{
    Codes,
    cut::{GroupTerms, JOINED},
};
use crate::simd::Simd;

/// Sums of a row with a panel: of the two lower pairs of planes, and of the upper half in 32 bits.
#[derive(Clone, Copy)]
pub(super) struct PlaneSums<S: Simd> {
    pairs: [S::W; 2],
    upper: S::I,
}

/// Joins the integer sums of a group's part: one sum for each lower pair of planes, one for the upper half.
#[inline(always)]
pub(super) fn joined<S: Simd, const B: usize>(planes: [S::I; B]) -> [S::I; JOINED] {
    let pair = |first: usize| S::add_i32(planes[first], S::shifted::<8>(planes[first + 1]));
    let upper = if B > 6 { S::add_i32(pair(4), S::shifted::<16>(pair(6))) } else { pair(4) };
    [pair(0), pair(2), upper]
}

impl<S: Simd> PlaneSums<S> {
    #[inline(always)]
    pub(super) fn zero() -> Self {
        Self { pairs: [S::zero_wide(); 2], upper: S::splat_i32(0) }
    }

    /// Adds a group of a row: the joined sums of its parts times their scales, and its minimum.
    #[inline(always)]
    pub(super) fn add<P: Codes>(
        &mut self,
        parts: [[S::I; JOINED]; 2],
        numbers: &GroupTerms,
        scales: [S::I; 2],
    ) {
        #[allow(clippy::needless_range_loop, reason = "adapters are not always compiled for the set")]
        for part in 0..P::PARTS {
            let [first, second, upper] = parts[part];
            self.pairs[0] = S::add_product(self.pairs[0], scales[part], first);
            self.pairs[1] = S::add_product(self.pairs[1], scales[part], second);
            self.upper = S::add_i32(self.upper, S::mul_i32(scales[part], upper));
        }
        if P::HAS_MINIMUM {
            let [low, high] = [S::splat_i32(numbers.sum[0]), S::splat_i32(numbers.sum[1])];
            self.pairs[0] = S::add_product(self.pairs[0], scales[1], low);
            self.upper = S::add_i32(self.upper, S::mul_i32(scales[1], high));
        }
    }

    #[inline(always)]
    pub(super) fn words(self) -> S::W {
        S::add_high(S::add_shifted::<16>(self.pairs[0], self.pairs[1]), self.upper)
    }
}
