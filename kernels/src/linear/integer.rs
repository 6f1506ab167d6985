//! Dot products with integer panels.
//!
//! For a group of 32 (or 16) elements, sums are exact integers:
//!
//! ```text
//! sum_i code_i x_i - zero sum_i x_i     the second term is the accumulator's start, known from the activations
//! ```
//!
//! where the `x_i` of a wide group are two bytes each, `128 high_i + low_i`, and so are the sums: 2^27 at most. They
//! enter the float sum once a group, times the weights' and the activations' scale. Minima enter as
//! `minimum * (scale of x * sum of x)`. All scales of a matrix are stored in 16 bits relative to one power of two,
//! `w.unit()`, which multiplies the final sum and costs no bit.

use super::{pack::PackedMatrix, tile::Tile};
use crate::{
    activations::{Activations, GROUP, SIDE, place_of_halves},
    simd::{LANES, Simd, prefetch},
};

/// A packing of integers, whatever computes the sums of its groups.
pub(super) trait IntegerPacking {
    /// Bits of a code.
    const BITS: usize;
    /// Parts of a group that have a scale each: 1 or 2.
    const PARTS: usize = 1;
    /// Whether a group has a minimum behind its scale.
    const HAS_MINIMUM: bool = false;
    /// Whether codes have a zero point: [`IntegerPacking::starts`] are not all 0.
    const HAS_ZERO: bool = true;

    /// Zero points times sums of activations, negated, for each part of each group of each row; nothing without zero points.
    fn starts(x: &Activations) -> &[i32];

    /// Eight steps of four elements of each row of `panel`.
    ///
    /// # Safety
    ///
    /// Panel and group exist.
    #[inline(always)]
    unsafe fn codes<S: Simd>(w: &PackedMatrix, panel: usize, group: usize) -> [S::B; 8] {
        let bytes = Self::BITS * GROUP_BYTES / 8;
        // SAFETY: the caller's.
        unsafe {
            let codes = w.panel(panel).add(group * bytes);
            if Self::BITS == 4 { unpack_four::<S>(codes) } else { load_eight::<S>(codes) }
        }
    }

    /// The scales of a group, or its scale and minimum; the second of one scale is the first.
    ///
    /// # Safety
    ///
    /// As [`IntegerPacking::codes`].
    #[inline(always)]
    unsafe fn numbers<S: Simd>(w: &PackedMatrix, panel: usize, group: usize) -> [S::F; 2] {
        // SAFETY: the caller's.
        unsafe {
            let behind = w.columns() * LANES * Self::BITS / 8;
            let numbers = w.panel(panel).add(behind).cast::<u16>();
            if Self::PARTS == 2 || Self::HAS_MINIMUM {
                let numbers = numbers.add(group * 2 * LANES);
                [S::load_f16(numbers), S::load_f16(numbers.add(LANES))]
            } else {
                [S::load_f16(numbers.add(group * LANES)); 2]
            }
        }
    }
}

/// 4 bits, zero point 8, groups of 32.
pub(super) struct Four8;
/// 4 bits with minima, groups of 32.
pub(super) struct FourMinimum;
/// 8 bits, zero point 128, groups of 32.
pub(super) struct Eight128;
/// 8 bits with minima, groups of 32.
pub(super) struct EightMinimum;
/// 8 bits, zero point 128, groups of 16.
pub(super) struct Eight128Halves;

impl IntegerPacking for Four8 {
    const BITS: usize = 4;

    fn starts(x: &Activations) -> &[i32] {
        &x.zero8
    }
}

impl IntegerPacking for FourMinimum {
    const BITS: usize = 4;
    const HAS_MINIMUM: bool = true;
    const HAS_ZERO: bool = false;

    fn starts(_: &Activations) -> &[i32] {
        &[]
    }
}

impl IntegerPacking for Eight128 {
    const BITS: usize = 8;

    fn starts(x: &Activations) -> &[i32] {
        &x.zero128
    }
}

impl IntegerPacking for EightMinimum {
    const BITS: usize = 8;
    const HAS_MINIMUM: bool = true;
    const HAS_ZERO: bool = false;

    fn starts(_: &Activations) -> &[i32] {
        &[]
    }
}

impl IntegerPacking for Eight128Halves {
    const BITS: usize = 8;
    const PARTS: usize = 2;

    fn starts(x: &Activations) -> &[i32] {
        &x.zero128_halves
    }
}

/// Bytes of a panel's group of 32 elements, a byte for each.
pub(super) const GROUP_BYTES: usize = GROUP * LANES;

/// How far ahead of the sums weights are asked for. The hardware stops at each 4 KB; at 20 GB/s this is 400 ns.
const AHEAD_BYTES: usize = 8192;

/// Asks for `bytes` of the panels, those that are due when `AHEAD_BYTES` have been summed.
#[inline(always)]
fn prefetch_ahead(at: *const u8, bytes: usize) {
    let mut line = 0;
    while line < bytes {
        prefetch(at.wrapping_add(AHEAD_BYTES + line));
        line += 64;
    }
}

/// Eight steps of four elements from 4-bit codes: low nibbles hold the first half of the group.
#[inline(always)]
unsafe fn unpack_four<S: Simd>(codes: *const u8) -> [S::B; 8] {
    // SAFETY: the caller's: a group of 256 bytes lies at `codes`.
    unsafe {
        let v = [
            S::load_bytes(codes),
            S::load_bytes(codes.add(64)),
            S::load_bytes(codes.add(128)),
            S::load_bytes(codes.add(192)),
        ];
        [
            S::low_nibbles(v[0]),
            S::low_nibbles(v[1]),
            S::low_nibbles(v[2]),
            S::low_nibbles(v[3]),
            S::high_nibbles(v[0]),
            S::high_nibbles(v[1]),
            S::high_nibbles(v[2]),
            S::high_nibbles(v[3]),
        ]
    }
}

#[inline(always)]
unsafe fn load_eight<S: Simd>(codes: *const u8) -> [S::B; 8] {
    // SAFETY: the caller's: a group of 512 bytes lies at `codes`.
    unsafe {
        [
            S::load_bytes(codes),
            S::load_bytes(codes.add(64)),
            S::load_bytes(codes.add(128)),
            S::load_bytes(codes.add(192)),
            S::load_bytes(codes.add(256)),
            S::load_bytes(codes.add(320)),
            S::load_bytes(codes.add(384)),
            S::load_bytes(codes.add(448)),
        ]
    }
}

/// `starts`, and the sums of a group's parts with the bytes at `x`, exact.
#[inline(always)]
unsafe fn dot_group<S: Simd, P: IntegerPacking>(
    starts: [S::I; 2],
    codes: &[S::B; 8],
    x: *const i8,
) -> [S::I; 2] {
    // SAFETY: the caller's: a group of bytes lies at `x`.
    unsafe {
        let first = dot_steps::<S, 4>(starts[0], codes, x);
        let second = dot_steps::<S, 4>(starts[1], &codes[4..], x.add(GROUP / 2));
        if P::PARTS == 2 { [first, second] } else { [S::add_i32(first, second), starts[1]] }
    }
}

/// The whole sums of a wide group, from those of its high and its low bytes.
#[inline(always)]
pub(super) fn joined<S: Simd>(high: S::I, low: S::I) -> S::I {
    S::add_i32(S::times_128(high), low)
}

/// `acc + sum over N steps`, exact.
#[inline(always)]
unsafe fn dot_steps<S: Simd, const N: usize>(mut acc: S::I, codes: &[S::B], x: *const i8) -> S::I {
    for (step, &codes) in codes.iter().enumerate().take(N) {
        // SAFETY: the caller's: 4 N bytes lie at `x`.
        acc = S::dot_bytes(acc, codes, unsafe { x.add(4 * step).cast::<i32>().read_unaligned() });
    }
    acc
}

/// Rows of activations from one on, which lie interleaved: their bytes and what belongs to these.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Groups of a row.
    pub(super) groups: usize,
    /// From a group to the next: rows that lie interleaved.
    step: usize,
    bytes: *const i8,
    low: *const i8,
    wide: *const u16,
    /// The first of these rows among those that lie interleaved.
    first: usize,
    scales: *const f32,
    sums: *const f32,
    starts: *const i32,
}

impl Rows {
    /// Those from `row` on, as the packing `P` meets them, as far as they lie interleaved.
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

    /// The bytes of a group of row `m`; of a wide one the high bytes.
    #[inline(always)]
    pub(super) fn bytes(&self, group: usize, m: usize) -> *const i8 {
        self.bytes.wrapping_add((group * self.step + m) * GROUP)
    }

    /// The low bytes of a wide group of row `m`.
    #[inline(always)]
    pub(super) fn low(&self, group: usize, m: usize) -> *const i8 {
        self.low.wrapping_add((group * self.step + m) * GROUP)
    }

    /// The rows whose group is wide, from the first of these on: bit `m` for row `m`.
    ///
    /// # Safety
    ///
    /// As [`Rows::start`].
    #[inline(always)]
    pub(super) unsafe fn wide(&self, group: usize) -> u32 {
        // SAFETY: the caller's.
        u32::from(unsafe { *self.wide.add(group) }) >> self.first
    }

    /// What the whole sum of a part of a group of row `m` begins with.
    ///
    /// # Safety
    ///
    /// Row and group exist, and byte forms were prepared.
    #[inline(always)]
    pub(super) unsafe fn start<P: IntegerPacking>(&self, group: usize, part: usize, m: usize) -> i32 {
        // SAFETY: the caller's.
        if P::HAS_ZERO { unsafe { *self.starts.add((group * P::PARTS + part) * self.step + m) } } else { 0 }
    }

    /// What the whole sums of both parts of a group of row `m` begin with; of a group that is one part, the second with 0.
    ///
    /// # Safety
    ///
    /// As [`Rows::start`].
    #[inline(always)]
    pub(super) unsafe fn starts<S: Simd, P: IntegerPacking>(&self, group: usize, m: usize) -> [S::I; 2] {
        // SAFETY: the caller's.
        unsafe {
            let second = if P::PARTS == 2 { self.start::<P>(group, 1, m) } else { 0 };
            [S::splat_i32(self.start::<P>(group, 0, m)), S::splat_i32(second)]
        }
    }

    /// `sum` and what a group of row `m` adds to it, whose parts have these whole sums.
    ///
    /// # Safety
    ///
    /// As [`Rows::start`].
    #[inline(always)]
    pub(super) unsafe fn add<S: Simd, P: IntegerPacking>(
        &self,
        parts: [S::I; 2],
        numbers: [S::F; 2],
        (group, m): (usize, usize),
        mut sum: S::F,
    ) -> S::F {
        // SAFETY: the caller's.
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

impl<P: IntegerPacking> Tile for P {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let x = Rows::of::<P>(x, row);
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller's: panel and rows exist, and the byte form was prepared.
        unsafe {
            let share = w.panel_bytes() / x.groups;
            for group in 0..x.groups {
                prefetch_ahead(w.panel(panel).add(group * share), share);
                let codes = P::codes::<S>(w, panel, group);
                let numbers = P::numbers::<S>(w, panel, group);
                let wide = x.wide(group);
                for (m, sum) in sums.iter_mut().enumerate() {
                    let mut parts = x.starts::<S, P>(group, m);
                    if wide >> m & 1 != 0 {
                        parts = dot_group::<S, P>(parts, &codes, x.low(group, m));
                        let high = dot_group::<S, P>([S::splat_i32(0); 2], &codes, x.bytes(group, m));
                        parts = [joined::<S>(high[0], parts[0]), joined::<S>(high[1], parts[1])];
                    } else {
                        parts = dot_group::<S, P>(parts, &codes, x.bytes(group, m));
                    }
                    *sum = x.add::<S, P>(parts, numbers, (group, m), *sum);
                }
            }
        }
        let unit = S::splat(w.unit());
        // A loop: what an adapter is given is not always compiled for the set.
        for sum in &mut sums {
            *sum = S::mul(*sum, unit);
        }
        sums
    }
}
