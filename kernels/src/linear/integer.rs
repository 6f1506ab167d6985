//! Dot products with integer panels.
//!
//! For a group of 32 (or 16) elements, sums are exact integers:
//!
//! ```text
//! sum_i code_i x_i - zero sum_i x_i     the second term is the accumulator's start, known from the activations
//! ```
//!
//! and enter the float sum once a group, times the weights' and the activations' scale. Minima enter as
//! `minimum * (scale of x * sum of x)`. All scales of a matrix are stored in 16 bits relative to one power of two,
//! `w.unit()`, which multiplies the final sum and costs no bit.

use super::{pack::PackedMatrix, tile::Tile};
use crate::{
    activations::{Activations, GROUP},
    simd::{Simd, prefetch},
};

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

/// Bytes of a panel's group of 32 elements.
const FOUR_BYTES: usize = 4 * 64;
const EIGHT_BYTES: usize = 8 * 64;

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

/// `start + sum over N steps`, exact.
#[inline(always)]
unsafe fn dot_steps<S: Simd, const N: usize>(start: i32, codes: &[S::B], x: *const i8) -> S::I {
    let mut acc = S::splat_i32(start);
    for (step, &codes) in codes.iter().enumerate().take(N) {
        // SAFETY: the caller's: 4 N bytes lie at `x`.
        acc = S::dot_bytes(acc, codes, unsafe { x.add(4 * step).cast::<i32>().read_unaligned() });
    }
    acc
}

/// Sums over groups of 32 with a zero point; `starts` holds the accumulators' starts.
#[inline(always)]
unsafe fn symmetric<S: Simd, const M: usize, const GROUP_BYTES: usize>(
    w: &PackedMatrix,
    panel: usize,
    x: &Activations,
    row: usize,
    starts: &[i32],
) -> [S::F; M] {
    let groups = x.groups();
    let mut sums = [S::splat(0.0); M];
    // SAFETY: the caller's: panel and rows exist, and the byte form was prepared.
    unsafe {
        let codes = w.panel(panel);
        let share = w.panel_bytes() / groups;
        let scales = codes.add(groups * GROUP_BYTES).cast::<u16>();
        let (bytes, x_scales) =
            (x.bytes.as_ptr().add(row * groups * GROUP), x.scales.as_ptr().add(row * groups));
        let starts = starts.as_ptr().add(row * groups);
        for g in 0..groups {
            prefetch_ahead(codes.add(g * share), share);
            let steps = match GROUP_BYTES {
                FOUR_BYTES => unpack_four::<S>(codes.add(g * GROUP_BYTES)),
                _ => load_eight::<S>(codes.add(g * GROUP_BYTES)),
            };
            let scale = S::load_f16(scales.add(g * 16));
            for (m, sum) in sums.iter_mut().enumerate() {
                let at = m * groups + g;
                let acc = dot_steps::<S, 8>(*starts.add(at), &steps, bytes.add(at * GROUP));
                let scale = S::mul(scale, S::splat(*x_scales.add(at)));
                *sum = S::fma(S::to_f32(acc), scale, *sum);
            }
        }
    }
    finish::<S, M>(w, sums)
}

/// Sums over groups of 32 with minima.
#[inline(always)]
unsafe fn with_minima<S: Simd, const M: usize, const GROUP_BYTES: usize>(
    w: &PackedMatrix,
    panel: usize,
    x: &Activations,
    row: usize,
) -> [S::F; M] {
    let groups = x.groups();
    let mut sums = [S::splat(0.0); M];
    // SAFETY: the caller's: panel and rows exist, and the byte form was prepared.
    unsafe {
        let codes = w.panel(panel);
        let share = w.panel_bytes() / groups;
        let scales = codes.add(groups * GROUP_BYTES).cast::<u16>();
        let (bytes, x_scales) =
            (x.bytes.as_ptr().add(row * groups * GROUP), x.scales.as_ptr().add(row * groups));
        let x_sums = x.sums.as_ptr().add(row * groups);
        for g in 0..groups {
            prefetch_ahead(codes.add(g * share), share);
            let steps = match GROUP_BYTES {
                FOUR_BYTES => unpack_four::<S>(codes.add(g * GROUP_BYTES)),
                _ => load_eight::<S>(codes.add(g * GROUP_BYTES)),
            };
            let (scale, minimum) = (S::load_f16(scales.add(g * 32)), S::load_f16(scales.add(g * 32 + 16)));
            for (m, sum) in sums.iter_mut().enumerate() {
                let at = m * groups + g;
                let acc = dot_steps::<S, 8>(0, &steps, bytes.add(at * GROUP));
                let scale = S::mul(scale, S::splat(*x_scales.add(at)));
                *sum = S::fma(minimum, S::splat(*x_sums.add(at)), *sum);
                *sum = S::fma(S::to_f32(acc), scale, *sum);
            }
        }
    }
    finish::<S, M>(w, sums)
}

#[inline(always)]
fn finish<S: Simd, const M: usize>(w: &PackedMatrix, mut sums: [S::F; M]) -> [S::F; M] {
    let unit = S::splat(w.unit());
    for sum in &mut sums {
        *sum = S::mul(*sum, unit);
    }
    sums
}

impl Tile for Four8 {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        // SAFETY: passed on.
        unsafe { symmetric::<S, M, FOUR_BYTES>(w, panel, x, row, &x.zero8) }
    }
}

impl Tile for FourMinimum {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        // SAFETY: passed on.
        unsafe { with_minima::<S, M, FOUR_BYTES>(w, panel, x, row) }
    }
}

impl Tile for Eight128 {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        // SAFETY: passed on.
        unsafe { symmetric::<S, M, EIGHT_BYTES>(w, panel, x, row, &x.zero128) }
    }
}

impl Tile for EightMinimum {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        // SAFETY: passed on.
        unsafe { with_minima::<S, M, EIGHT_BYTES>(w, panel, x, row) }
    }
}

impl Tile for Eight128Halves {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let groups = x.groups();
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller's: panel and rows exist, and the byte form was prepared.
        unsafe {
            let codes = w.panel(panel);
            let share = w.panel_bytes() / groups;
            let scales = codes.add(groups * EIGHT_BYTES).cast::<u16>();
            let (bytes, x_scales) =
                (x.bytes.as_ptr().add(row * groups * GROUP), x.scales.as_ptr().add(row * groups));
            let starts = x.zero128_halves.as_ptr().add(2 * row * groups);
            for g in 0..groups {
                prefetch_ahead(codes.add(g * share), share);
                let steps = load_eight::<S>(codes.add(g * EIGHT_BYTES));
                let halves = [S::load_f16(scales.add(g * 32)), S::load_f16(scales.add(g * 32 + 16))];
                for (m, sum) in sums.iter_mut().enumerate() {
                    let at = m * groups + g;
                    let x_scale = S::splat(*x_scales.add(at));
                    for (h, &scale) in halves.iter().enumerate() {
                        let x = bytes.add(at * GROUP + 16 * h);
                        let acc = dot_steps::<S, 4>(*starts.add(2 * at + h), &steps[4 * h..], x);
                        *sum = S::fma(S::to_f32(acc), S::mul(scale, x_scale), *sum);
                    }
                }
            }
        }
        finish::<S, M>(w, sums)
    }
}
