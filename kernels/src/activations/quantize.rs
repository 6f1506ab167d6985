//! Quantizes rows of activations to integers.

use super::{GROUP, SIDE, place, place_of_halves};
use crate::simd::{Kernel, LANES, Simd};

/// Largest quantized value of one byte.
const NARROW: f32 = 127.0;

/// Largest quantized value of two bytes: the high byte is at most 127 while the low byte is at most 64.
const WIDE: f32 = 127.0 * 128.0 + 63.0;

/// Quantizes the blocks of sixteen rows from `first` to `last`.
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
    pub(super) zero32_halves: *mut i32,
    pub(super) rows: usize,
    pub(super) groups: usize,
    /// A group is wide if its squared largest magnitude exceeds `wide_above` times the sum over the row's
    /// groups.
    pub(super) wide_above: f32,
    pub(super) first: usize,
    pub(super) last: usize,
}

// SAFETY: each thread gets a disjoint range of rows; the buffers outlive the parallel region.
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
            // SAFETY: `Activations::quantize` has sized every buffer for all rows, and no other thread has these rows.
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

// Plain loops instead of iterator adapters: only force-inlined code is compiled for the instruction set.
impl Quantize {
    /// Quantizes sixteen rows at once, one row per lane.
    #[inline(always)]
    unsafe fn sixteen<S: Simd>(&self, side: usize) {
        const { assert!(SIDE == LANES, "a lane for each row") };
        let (start, _) = place(side * SIDE, self.rows, self.groups);
        // SAFETY: the caller guarantees that the rows exist and that the output buffers have room for them.
        unsafe {
            let mut total = S::splat(0.0);
            for group in 0..self.groups {
                let largest = self.largest::<S>(side, group);
                // `scales` holds the largest magnitude until the scale is known.
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

    /// Returns the largest magnitude of one group in each of sixteen rows.
    #[inline(always)]
    unsafe fn largest<S: Simd>(&self, side: usize, group: usize) -> S::F {
        let mut magnitudes = [S::splat(0.0); LANES];
        for (m, magnitude) in magnitudes.iter_mut().enumerate() {
            // SAFETY: the caller upholds this function's contract.
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
        // SAFETY: the caller upholds this function's contract.
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
                // Sums of integers are exact in any order. A row with a NaN or an infinity yields a NaN in any order
                // too.
                for column in S::transpose(rows) {
                    *sum = S::add(*sum, column);
                }
                let zero32 = S::to_i32(S::mul(*sum, S::splat(-32.0)));
                S::store_i32(self.zero32_halves.add(at_halves + half * LANES), zero32);
            }
            let sum = S::add(halves[0], halves[1]);
            // `max` may skip a NaN, a sum does not: a group with a non-finite value gets a NaN scale.
            let scale = S::fma(S::splat(0.0), sum, S::div(largest, limits));
            S::store(self.scales.add(at), scale);
            S::store(self.sums.add(at), S::mul(scale, sum));
            S::store_i32(self.zero8.add(at), S::to_i32(S::mul(sum, S::splat(-8.0))));
            S::store_i32(self.zero128.add(at), S::to_i32(S::mul(sum, S::splat(-128.0))));
        }
    }

    /// Stores sixteen quantized values of a group; the group has two bytes per value if it is `wide`.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, at: usize, numbers: S::F, wide: u16) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let mut high = numbers;
            if wide != 0 {
                high = S::round(S::mul(numbers, S::splat(1.0 / 128.0)));
                S::store_i8(self.low.add(at), S::to_i32(S::fma(high, S::splat(-128.0), numbers)));
            }
            S::store_i8(self.bytes.add(at), S::to_i32(high));
        }
    }

    /// Quantizes one row of an incomplete block of sixteen.
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize) {
        let (start, step) = place(row, self.rows, self.groups);
        let (side, m) = (row / SIDE, row % SIDE);
        // SAFETY: the caller guarantees that the row exists and that the output buffers have room for it.
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

    /// Quantizes the group at index `from` of the row-major input.
    #[inline(always)]
    unsafe fn group<S: Simd>(&self, from: usize, at: usize, at_halves: (usize, usize), wide: u16) {
        // SAFETY: the caller guarantees that the group exists and that the output buffers have room for it.
        unsafe {
            let from = self.floats.add(from * GROUP);
            let (largest, limit) = (*self.scales.add(at), limit_of(wide));
            // A group of zeros or tiny values would have an infinite inverse; its quantized values are 0.
            let inverse = limit / largest;
            let inverse = S::splat(if inverse.is_finite() { inverse } else { 0.0 });
            let a = S::round(S::mul(S::load(from), inverse));
            let b = S::round(S::mul(S::load(from.add(LANES)), inverse));
            self.put::<S>(at * GROUP, a, wide);
            self.put::<S>(at * GROUP + LANES, b, wide);
            let halves = [S::sum_i32(S::to_i32(a)), S::sum_i32(S::to_i32(b))];
            // Infinite or NaN inputs give meaningless sums, which must wrap instead of trap: the row is invalid anyway.
            let sum = halves[0].wrapping_add(halves[1]);
            let scale = largest / limit + 0.0 * S::sum(S::add(a, b));
            *self.scales.add(at) = scale;
            *self.sums.add(at) = scale * sum as f32;
            *self.zero8.add(at) = sum.wrapping_mul(-8);
            *self.zero128.add(at) = sum.wrapping_mul(-128);
            *self.zero32_halves.add(at_halves.0) = halves[0].wrapping_mul(-32);
            *self.zero32_halves.add(at_halves.1) = halves[1].wrapping_mul(-32);
        }
    }
}

#[inline(always)]
fn limit_of(wide: u16) -> f32 {
    if wide == 0 { NARROW } else { WIDE }
}
