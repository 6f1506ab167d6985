//! Rows of activations as integer panels read them: integer sums of a group, added to the float sums.

use super::packings::IntegerPacking;
use crate::{
    activations::{Activations, GROUP, SIDE, place_of_halves},
    simd::Simd,
};

/// Interleaved rows from one row on: their bytes, scales and sums.
#[derive(Clone, Copy)]
pub(super) struct QuantizedRows {
    pub(super) groups: usize,
    /// Distance from a group to the next: the number of interleaved rows.
    step: usize,
    bytes: *const i8,
    low: *const i8,
    wide: *const u16,
    /// Index of the first of these rows among the interleaved rows.
    first: usize,
    scales: *const f32,
    sums: *const f32,
    starts: *const i32,
}

impl QuantizedRows {
    /// Returns the interleaved rows from `row` on, as the packing `P` reads them.
    #[inline(always)]
    pub(super) fn of<P: IntegerPacking>(x: &Activations, row: usize) -> Self {
        let (first, step) = x.place(row);
        let starts = if P::PARTS == 2 { place_of_halves(first) } else { first };
        Self {
            groups: x.groups(),
            step,
            bytes: x.bytes.as_ptr().wrapping_add(first * GROUP),
            low: x.low.as_ptr().wrapping_add(first * GROUP),
            wide: x.wide.as_ptr().wrapping_add(row / SIDE * x.groups()),
            first: row % SIDE,
            scales: x.scales.as_ptr().wrapping_add(first),
            sums: x.sums.as_ptr().wrapping_add(first),
            starts: P::starts(x).as_ptr().wrapping_add(starts),
        }
    }

    /// Returns the bytes of a group of row `m`, for a wide group the high bytes.
    #[inline(always)]
    pub(super) fn bytes(&self, group: usize, m: usize) -> *const i8 {
        self.bytes.wrapping_add((group * self.step + m) * GROUP)
    }

    /// Returns the low bytes of a wide group of row `m`.
    #[inline(always)]
    pub(super) fn low(&self, group: usize, m: usize) -> *const i8 {
        self.low.wrapping_add((group * self.step + m) * GROUP)
    }

    /// Returns the rows whose group is wide: bit `m` for row `m`, counted from the first row.
    ///
    /// # Safety
    /// The conditions of [`QuantizedRows::start`] hold.
    #[inline(always)]
    pub(super) unsafe fn wide(&self, group: usize) -> u32 {
        // SAFETY: the caller upholds this function's contract.
        u32::from(unsafe { *self.wide.add(group) }) >> self.first
    }

    /// Returns the initial integer sum of a part of a group of row `m`.
    ///
    /// # Safety
    /// Row and group exist, and byte forms were prepared.
    #[inline(always)]
    pub(super) unsafe fn start<P: IntegerPacking>(&self, group: usize, part: usize, m: usize) -> i32 {
        if P::HAS_ZERO {
            // SAFETY: the caller upholds this function's contract.
            let start = unsafe { *self.starts.add((group * P::PARTS + part) * self.step + m) };
            start.wrapping_mul(P::ZERO_FACTOR)
        } else {
            0
        }
    }

    /// Returns the initial integer sums of both parts of a group of row `m`; a missing second part has 0.
    ///
    /// # Safety
    /// The conditions of [`QuantizedRows::start`] hold.
    #[inline(always)]
    pub(super) unsafe fn starts<S: Simd, P: IntegerPacking>(&self, group: usize, m: usize) -> [S::I; 2] {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let second = if P::PARTS == 2 { self.start::<P>(group, 1, m) } else { 0 };
            [S::splat_i32(self.start::<P>(group, 0, m)), S::splat_i32(second)]
        }
    }

    /// Returns the integer sums of the parts of a group of row `m` that has one byte per value.
    ///
    /// # Safety
    /// The conditions of [`QuantizedRows::start`] hold.
    #[inline(always)]
    pub(super) unsafe fn narrow<S: Simd, P: IntegerPacking>(
        &self,
        group: usize,
        m: usize,
        codes: &[S::B; 8],
    ) -> [S::I; 2] {
        // SAFETY: the caller upholds this function's contract.
        unsafe { dot_group::<S, P>(self.starts::<S, P>(group, m), codes, self.bytes(group, m)) }
    }

    /// Returns the integer sums of the parts of a wide group of row `m`.
    ///
    /// # Safety
    /// The conditions of [`QuantizedRows::start`] hold, and the group is wide in row `m`.
    #[inline(always)]
    pub(super) unsafe fn two_bytes<S: Simd, P: IntegerPacking>(
        &self,
        group: usize,
        m: usize,
        codes: &[S::B; 8],
    ) -> [S::I; 2] {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let low = dot_group::<S, P>(self.starts::<S, P>(group, m), codes, self.low(group, m));
            let high = dot_group::<S, P>([S::splat_i32(0); 2], codes, self.bytes(group, m));
            [joined::<S>(high[0], low[0]), joined::<S>(high[1], low[1])]
        }
    }

    /// Returns `sum` plus a group of row `m`, whose parts have the integer sums `parts`.
    ///
    /// # Safety
    /// The conditions of [`QuantizedRows::start`] hold.
    #[inline(always)]
    pub(super) unsafe fn add<S: Simd, P: IntegerPacking>(
        &self,
        parts: [S::I; 2],
        numbers: [S::F; 2],
        (group, m): (usize, usize),
        mut sum: S::F,
    ) -> S::F {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let at = group * self.step + m;
            let scale = S::splat(*self.scales.add(at));
            if P::HAS_MINIMUM {
                sum = S::fma(numbers[1], S::splat(*self.sums.add(at)), sum);
            }
            for part in 0..P::PARTS {
                sum = S::fma(S::to_f32(parts[part]), S::mul(numbers[part], scale), sum);
            }
        }
        sum
    }
}

/// Adds the exact products of a group's parts with the bytes at `x` to `starts`.
#[inline(always)]
unsafe fn dot_group<S: Simd, P: IntegerPacking>(
    starts: [S::I; 2],
    codes: &[S::B; 8],
    x: *const i8,
) -> [S::I; 2] {
    // SAFETY: the caller guarantees a group of bytes at `x`.
    unsafe {
        let first = dot_steps::<S, 4>(starts[0], codes, x);
        let second = dot_steps::<S, 4>(starts[1], &codes[4..], x.add(GROUP / 2));
        if P::PARTS == 2 { [first, second] } else { [S::add_i32(first, second), starts[1]] }
    }
}

/// Joins the integer sums of a wide group's high and low bytes.
#[inline(always)]
pub(super) fn joined<S: Simd>(high: S::I, low: S::I) -> S::I {
    S::add_i32(S::times_128(high), low)
}

/// Computes `acc + sum over N steps`, exact.
#[inline(always)]
unsafe fn dot_steps<S: Simd, const N: usize>(mut acc: S::I, codes: &[S::B], x: *const i8) -> S::I {
    for (step, &codes) in codes.iter().enumerate().take(N) {
        // SAFETY: the caller guarantees 4 N bytes at `x`.
        acc = S::dot_bytes(acc, codes, unsafe { x.add(4 * step).cast::<i32>().read_unaligned() });
    }
    acc
}
