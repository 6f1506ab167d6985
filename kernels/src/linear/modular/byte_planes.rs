//! Sums over codes with words split into bytes, by the byte product instructions.
//!
//! An integer is eight signed bytes, `sum over p: 256^p byte_p` modulo 2^64. A row of integers is thus eight
//! rows of bytes, *planes*, multiplied by codes of a byte; modulo 2^48 the last two planes are missing. Sums
//! of a group of 32 elements are exact in 32 bits, also of two planes together. Of the upper four together,
//! 32 bits matter:
//!
//! ```text
//! pair_j = sum_i (code_i - zero) (byte_2j_i + 256 byte_2j+1_i)                     below 2^29
//! upper  = sum_i (code_i - zero) (byte_4_i + 2^8 byte_5_i + 2^16 byte_6_i + 2^24 byte_7_i)      modulo 2^32
//! out    = sum over groups: scale (pair_0 + 2^16 pair_1 + 2^32 upper) + sum over groups: minimum (sum of x)
//! ```
//!
//! A group costs eight steps per plane and three products in all; with words, two products per element.
//!
//! # Layout
//!
//! - this file: the sums.
//! - `cut`: splits rows into planes.
//! - `sums`: combines the planes' sums.

mod cut;
mod sums;

use std::marker::PhantomData;

use super::partition::{PanelRange, for_panels};
use crate::{
    isa::Isa,
    linear::{
        form::Packing,
        packings::{self, IntegerPacking},
        part::{LinearPart, blocks},
    },
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

use cut::{BytePlanes, GroupTerms, JOINED, STEPS};
use sums::{PlaneSums, joined};

/// Rows multiplied by one panel before the next panel; they stay in the second-level cache.
const ROW_BLOCK: usize = 64;

/// A packing, with the zero-point terms of its codes.
trait Codes: IntegerPacking {
    /// Returns the initial byte-plane sums of both parts of a group: their zero-point terms, or zeros.
    fn begin(numbers: &GroupTerms) -> [[i32; JOINED]; 2];
}

impl Codes for packings::Four8 {
    #[inline(always)]
    fn begin(numbers: &GroupTerms) -> [[i32; JOINED]; 2] {
        [numbers.zero8, [0; JOINED]]
    }
}

impl Codes for packings::FourMinimum {
    #[inline(always)]
    fn begin(_: &GroupTerms) -> [[i32; JOINED]; 2] {
        [[0; JOINED]; 2]
    }
}

impl Codes for packings::FourE2m1 {
    #[inline(always)]
    fn begin(numbers: &GroupTerms) -> [[i32; JOINED]; 2] {
        [numbers.zero128, [0; JOINED]]
    }
}

impl Codes for packings::Eight128 {
    #[inline(always)]
    fn begin(numbers: &GroupTerms) -> [[i32; JOINED]; 2] {
        [numbers.zero128, [0; JOINED]]
    }
}

impl Codes for packings::Five16 {
    #[inline(always)]
    fn begin(numbers: &GroupTerms) -> [[i32; JOINED]; 2] {
        [numbers.zero8.map(|term| term.wrapping_mul(2)), [0; JOINED]]
    }
}

impl Codes for packings::FiveMinimum {
    #[inline(always)]
    fn begin(_: &GroupTerms) -> [[i32; JOINED]; 2] {
        [[0; JOINED]; 2]
    }
}

impl Codes for packings::Six32Halves {
    #[inline(always)]
    fn begin(numbers: &GroupTerms) -> [[i32; JOINED]; 2] {
        numbers.zero32_halves
    }
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub(super) fn forward<const B: usize>(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &[[u8; B]],
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [[u8; B]],
    stride: usize,
) {
    let x = BytePlanes::of(pool, isa, x, rows);
    for_panels(pool, &x, rows, parts, exponent, out, stride, |share| isa.dispatch(Forward(share)));
}

struct Forward<'a, const B: usize>(PanelRange<'a, BytePlanes<B>, B>);

impl<const B: usize> Kernel for Forward<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        match self.0.part.matrix.packing() {
            Packing::Four8 => S::call(ForwardOf::<packings::Four8, B>(&self.0, PhantomData)),
            Packing::FourMinimum => S::call(ForwardOf::<packings::FourMinimum, B>(&self.0, PhantomData)),
            Packing::FourE2m1 => S::call(ForwardOf::<packings::FourE2m1, B>(&self.0, PhantomData)),
            Packing::Eight128 => S::call(ForwardOf::<packings::Eight128, B>(&self.0, PhantomData)),
            Packing::Five16 => S::call(ForwardOf::<packings::Five16, B>(&self.0, PhantomData)),
            Packing::FiveMinimum => S::call(ForwardOf::<packings::FiveMinimum, B>(&self.0, PhantomData)),
            Packing::Six32Halves => S::call(ForwardOf::<packings::Six32Halves, B>(&self.0, PhantomData)),
            Packing::F32 | Packing::F16 | Packing::Bf16 => unreachable!("floats have no codes"),
        }
    }
}

struct ForwardOf<'a, P, const B: usize>(&'a PanelRange<'a, BytePlanes<B>, B>, PhantomData<P>);

impl<P: Codes, const B: usize> Kernel for ForwardOf<'_, P, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for rows in blocks(0..self.0.rows, ROW_BLOCK) {
            for panel in self.0.panels.clone() {
                for row in rows.clone() {
                    self.row::<S>(panel, row);
                }
            }
        }
    }
}

impl<P: Codes, const B: usize> ForwardOf<'_, P, B> {
    /// Computes the sums of a row with a panel. The registers do not hold the sums of two rows.
    #[inline(always)]
    fn row<S: Simd>(&self, panel: usize, row: usize) {
        let PanelRange { x, part, factors, .. } = self.0;
        let (w, factor) = (part.matrix, S::splat(factors.first * part.matrix.unit()));
        let (mut sums, mut words) = (PlaneSums::<S>::zero(), [0; LANES]);
        let share = w.panel_bytes() / x.groups();
        for group in 0..x.groups() {
            w.prefetch(panel + 1, group * share, share);
            let numbers = x.numbers(row, group);
            // SAFETY: panel, row and group exist.
            unsafe {
                let codes = P::codes::<S>(w, panel, group);
                let scales = scales::<S>(P::numbers::<S>(w, panel, group), factor);
                let parts = dot::<S, P, B>(x.bytes(row, group), numbers, &codes);
                sums.add::<P>(parts, numbers, scales);
            }
        }
        // SAFETY: `words` has room for sixteen.
        unsafe { S::store_wide(words.as_mut_ptr(), sums.words()) };
        self.0.put(row, panel, true, &words);
    }
}

/// Converts a packing's scales and minima to integers.
#[inline(always)]
fn scales<S: Simd>([first, second]: [S::F; 2], factor: S::F) -> [S::I; 2] {
    [S::to_i32(S::mul(first, factor)), S::to_i32(S::mul(second, factor))]
}

/// Computes the joined sums of planes with the parts of a group.
///
/// # Safety
/// `bytes` points to the planes of a group.
#[inline(always)]
unsafe fn dot<S: Simd, P: Codes, const B: usize>(
    bytes: *const i32,
    numbers: &GroupTerms,
    codes: &[S::B; STEPS],
) -> [[S::I; JOINED]; 2] {
    let begin = P::begin(numbers);
    let mut parts = [[S::splat_i32(0); JOINED]; 2];
    let steps = STEPS / P::PARTS;
    #[allow(clippy::needless_range_loop, reason = "adapters are not always compiled for the set")]
    for part in 0..P::PARTS {
        let [first, second, upper] = begin[part];
        let mut planes = [S::splat_i32(0); B];
        (planes[0], planes[2], planes[4]) = (S::splat_i32(first), S::splat_i32(second), S::splat_i32(upper));
        for (plane, sum) in planes.iter_mut().enumerate() {
            for step in part * steps..(part + 1) * steps {
                // SAFETY: the caller guarantees the planes of a group at `bytes`.
                *sum = S::dot_bytes(*sum, codes[step], unsafe { *bytes.add(plane * STEPS + step) });
            }
        }
        parts[part] = joined::<S, B>(planes);
    }
    parts
}
