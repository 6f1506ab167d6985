//! Rounds rows of activations to whole numbers.

use super::{GROUP, SIDE, place, place_of_halves};
use crate::simd::{Kernel, LANES, Simd};

/// The largest number of a byte.
const NARROW: f32 = 127.0;

/// The largest number of two bytes, of which the high one is at most 127 when the low one is 64 at most.
const WIDE: f32 = 127.0 * 128.0 + 63.0;

/// Rounds sixteen rows after the other: those from `first` to `last`, in sixteens.
#[derive(Clone, Copy)]
pub(super) struct Quantize {
    pub(super) floats: *const f32,
    pub(super) bytes: *mut i8,
    pub(super) low: *mut i8,
    pub(super) wide: *mut u16,
    pub(super) scales: *mut f32,
    pub(super) sums: *mut f32,
    pub(super) zero8: *mut i32,
    pub(super) zero128: *mut i32,
    pub(super) zero128_halves: *mut i32,
    pub(super) rows: usize,
    pub(super) groups: usize,
    /// A group is wide if its largest magnitude, squared, is more than so many times the sum of the row's.
    pub(super) wide_above: f32,
    pub(super) first: usize,
    pub(super) last: usize,
}

// SAFETY: threads are given disjoint ranges of rows of buffers that outlive the parallel region.
unsafe impl Sync for Quantize {}

impl Quantize {
    pub(super) fn over(&self, first: usize, last: usize) -> Self {
        Self { first, last, ..*self }
    }
}

impl Kernel for Quantize {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for side in self.first..self.last {
            let rows = SIDE.min(self.rows - side * SIDE);
            // SAFETY: `Activations::quantize` has sized every buffer for all rows, and no other thread has these.
            unsafe {
                if rows == SIDE {
                    self.sixteen::<S>(side);
                    continue;
                }
                for group in 0..self.groups {
                    *self.wide.add(side * self.groups + group) = 0;
                }
                for row in side * SIDE..side * SIDE + rows {
                    self.row::<S>(row);
                }
            }
        }
    }
}

// Loops, not adapters: only what is inlined by force is compiled for the set.
impl Quantize {
    /// What [`Quantize::row`] does, with sixteen rows: each in a lane.
    #[inline(always)]
    unsafe fn sixteen<S: Simd>(&self, side: usize) {
        const { assert!(SIDE == LANES, "a lane for each row") };
        let (start, _) = place(side * SIDE, self.rows, self.groups);
        // SAFETY: the caller's: the rows exist, and there is room where they go.
        unsafe {
            let mut total = S::splat(0.0);
            for group in 0..self.groups {
                let largest = self.largest::<S>(side, group);
                // Where the scale goes once it is known.
                S::store(self.scales.add(start + group * SIDE), largest);
                total = S::add(total, S::mul(largest, largest));
            }
            let bound = S::mul(total, S::splat(self.wide_above));
            for group in 0..self.groups {
                let largest = S::load(self.scales.add(start + group * SIDE));
                let wide = S::greater(S::mul(largest, largest), bound);
                *self.wide.add(side * self.groups + group) = wide;
                self.group_of_sixteen::<S>(side, group, wide);
            }
        }
    }

    /// The largest magnitudes of a group of sixteen rows.
    #[inline(always)]
    unsafe fn largest<S: Simd>(&self, side: usize, group: usize) -> S::F {
        let mut magnitudes = [S::splat(0.0); LANES];
        for (m, magnitude) in magnitudes.iter_mut().enumerate() {
            // SAFETY: the caller's.
            unsafe {
                let from = self.floats.add(((side * SIDE + m) * self.groups + group) * GROUP);
                *magnitude = S::max(S::abs(S::load(from)), S::abs(S::load(from.add(LANES))));
            }
        }
        let mut largest = S::splat(0.0);
        for column in S::transpose(magnitudes) {
            largest = S::max(largest, column);
        }
        largest
    }

    #[inline(always)]
    unsafe fn group_of_sixteen<S: Simd>(&self, side: usize, group: usize, wide: u16) {
        let (start, _) = place(side * SIDE, self.rows, self.groups);
        let (at, at_halves) = (start + group * SIDE, place_of_halves(start) + 2 * group * SIDE);
        // SAFETY: the caller's.
        unsafe {
            let mut limits = S::splat(NARROW);
            if wide != 0 {
                let mut each = [NARROW; LANES];
                for (m, limit) in each.iter_mut().enumerate() {
                    *limit = limit_of(wide >> m & 1);
                }
                limits = S::load(each.as_ptr());
            }
            let largest = S::load(self.scales.add(at));
            let mut inverses = [0.0f32; LANES];
            S::store(inverses.as_mut_ptr(), S::div(limits, largest));
            let mut halves = [S::splat(0.0); 2];
            for (half, sum) in halves.iter_mut().enumerate() {
                let mut rows = [S::splat(0.0); LANES];
                for (m, row) in rows.iter_mut().enumerate() {
                    let inverse = S::splat(if inverses[m].is_finite() { inverses[m] } else { 0.0 });
                    let from = ((side * SIDE + m) * self.groups + group) * GROUP + half * LANES;
                    *row = S::round(S::mul(S::load(self.floats.add(from)), inverse));
                    self.put::<S>((at + m) * GROUP + half * LANES, *row, wide >> m & 1);
                }
                // Whole numbers, so exact in whatever order; of rows that are not all numbers they are none either.
                for column in S::transpose(rows) {
                    *sum = S::add(*sum, column);
                }
                let zero128 = S::to_i32(S::mul(*sum, S::splat(-128.0)));
                S::store_i32(self.zero128_halves.add(at_halves + half * LANES), zero128);
            }
            let sum = S::add(halves[0], halves[1]);
            // A maximum may overlook a NaN, a sum does not: a group that is not all numbers gets no scale.
            let scale = S::fma(S::splat(0.0), sum, S::div(largest, limits));
            S::store(self.scales.add(at), scale);
            S::store(self.sums.add(at), S::mul(scale, sum));
            S::store_i32(self.zero8.add(at), S::to_i32(S::mul(sum, S::splat(-8.0))));
            S::store_i32(self.zero128.add(at), S::to_i32(S::mul(sum, S::splat(-128.0))));
        }
    }

    /// Sixteen whole numbers of a group, which has two bytes for each if it is wide.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, at: usize, numbers: S::F, wide: u16) {
        // SAFETY: the caller's.
        unsafe {
            let mut high = numbers;
            if wide != 0 {
                high = S::round(S::mul(numbers, S::splat(1.0 / 128.0)));
                S::store_i8(self.low.add(at), S::to_i32(S::fma(high, S::splat(-128.0), numbers)));
            }
            S::store_i8(self.bytes.add(at), S::to_i32(high));
        }
    }

    /// A row that lies among fewer than sixteen.
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize) {
        let (start, step) = place(row, self.rows, self.groups);
        let (side, m) = (row / SIDE, row % SIDE);
        // SAFETY: the caller's: the row exists, and there is room where it goes.
        unsafe {
            let mut total = 0.0f32;
            for group in 0..self.groups {
                let from = self.floats.add((row * self.groups + group) * GROUP);
                let largest = S::max_lane(S::max(S::abs(S::load(from)), S::abs(S::load(from.add(LANES)))));
                *self.scales.add(start + group * step) = largest;
                total += largest * largest;
            }
            let bound = total * self.wide_above;
            for group in 0..self.groups {
                let largest = *self.scales.add(start + group * step);
                let wide = u16::from(largest * largest > bound);
                *self.wide.add(side * self.groups + group) |= wide << m;
                let halves = place_of_halves(start) + 2 * group * step;
                self.group::<S>(
                    row * self.groups + group,
                    start + group * step,
                    (halves, halves + step),
                    wide,
                );
            }
        }
    }

    /// The group that is the `from`th of all rows, one after the other.
    #[inline(always)]
    unsafe fn group<S: Simd>(&self, from: usize, at: usize, at_halves: (usize, usize), wide: u16) {
        // SAFETY: the caller's: the group exists, and there is room where it goes.
        unsafe {
            let from = self.floats.add(from * GROUP);
            let (largest, limit) = (*self.scales.add(at), limit_of(wide));
            // A group of zeroes, or as good as zeroes, has numbers of zero.
            let inverse = limit / largest;
            let inverse = S::splat(if inverse.is_finite() { inverse } else { 0.0 });
            let a = S::round(S::mul(S::load(from), inverse));
            let b = S::round(S::mul(S::load(from.add(LANES)), inverse));
            self.put::<S>(at * GROUP, a, wide);
            self.put::<S>(at * GROUP + LANES, b, wide);
            let halves = [S::sum_i32(S::to_i32(a)), S::sum_i32(S::to_i32(b))];
            // Infinite or NaN inputs give nonsense sums, which must wrap, not trap: the row is lost anyway.
            let sum = halves[0].wrapping_add(halves[1]);
            let scale = largest / limit + 0.0 * S::sum(S::add(a, b));
            *self.scales.add(at) = scale;
            *self.sums.add(at) = scale * sum as f32;
            *self.zero8.add(at) = sum.wrapping_mul(-8);
            *self.zero128.add(at) = sum.wrapping_mul(-128);
            *self.zero128_halves.add(at_halves.0) = halves[0].wrapping_mul(-128);
            *self.zero128_halves.add(at_halves.1) = halves[1].wrapping_mul(-128);
        }
    }
}

#[inline(always)]
fn limit_of(wide: u16) -> f32 {
    if wide == 0 { NARROW } else { WIDE }
}
