//! Weights as integers, decoded in registers.
//!
//! ```text
//! integers   code * scale + offset      all of at most 31 bits; products of 8 and 11 bits are exact floats
//! floats     round(value * 2^24) * 2^n
//! ```

use std::ops::Range;

use super::form::Factors;
use crate::{
    activations::GROUP,
    element::Element,
    linear::{
        pack::PackedMatrix,
        values::{Bf16Pairs, Bits, Floats, GroupScales, HALF, Integers, Values},
    },
    simd::{LANES, Simd},
};

pub(super) trait DecodeIntegers: Values {
    /// Returns elements `4 step` to `4 step + 3` of half `H` of `group`; `numbers` are its scale and offset.
    ///
    /// # Safety
    /// The conditions of [`Values::four`] hold.
    unsafe fn four_whole<S: Simd, const H: usize>(
        w: &PackedMatrix,
        place: (usize, usize, usize),
        numbers: [S::F; 2],
        factors: Factors,
    ) -> [S::I; 4];
}

impl<E: Element> DecodeIntegers for Floats<E> {
    #[inline(always)]
    unsafe fn four_whole<S: Simd, const H: usize>(
        w: &PackedMatrix,
        (panel, group, step): (usize, usize, usize),
        numbers: [S::F; 2],
        factors: Factors,
    ) -> [S::I; 4] {
        // SAFETY: the caller upholds the same contract.
        let four = unsafe { Self::four::<S, H>(w, panel, group, step, numbers) };
        rounded_four::<S>(four, factors)
    }
}

impl DecodeIntegers for Bf16Pairs {
    #[inline(always)]
    unsafe fn four_whole<S: Simd, const H: usize>(
        w: &PackedMatrix,
        (panel, group, step): (usize, usize, usize),
        numbers: [S::F; 2],
        factors: Factors,
    ) -> [S::I; 4] {
        // SAFETY: the caller upholds the same contract.
        let four = unsafe { Self::four::<S, H>(w, panel, group, step, numbers) };
        rounded_four::<S>(four, factors)
    }
}

impl<B: Bits, N: GroupScales> DecodeIntegers for Integers<B, N> {
    #[inline(always)]
    unsafe fn four_whole<S: Simd, const H: usize>(
        w: &PackedMatrix,
        (panel, group, step): (usize, usize, usize),
        [scale, offset]: [S::F; 2],
        factors: Factors,
    ) -> [S::I; 4] {
        // SAFETY: the caller upholds this function's contract.
        let codes = unsafe { B::step::<S, H>(w.panel(panel).add(group * B::GROUP_BYTES), step) };
        let factor = S::splat(factors.first);
        let scale = S::round(S::mul(scale, factor));
        // The zero point times the rounded scale.
        let offset = match N::ZERO {
            0 => S::mul(offset, factor),
            zero => S::mul(scale, S::splat(-(zero as f32))),
        };
        let offset = S::to_i32(offset);
        let whole = |code| S::add_i32(S::to_i32(S::mul(code, scale)), offset);
        [
            whole(S::byte::<0>(codes)),
            whole(S::byte::<1>(codes)),
            whole(S::byte::<2>(codes)),
            whole(S::byte::<3>(codes)),
        ]
    }
}

/// Rounds floats to integers. Not an iterator adapter, whose closure is not always compiled for the set.
#[inline(always)]
fn rounded_four<S: Simd>(four: [S::F; 4], factors: Factors) -> [S::I; 4] {
    [
        rounded::<S>(four[0], factors),
        rounded::<S>(four[1], factors),
        rounded::<S>(four[2], factors),
        rounded::<S>(four[3], factors),
    ]
}

#[inline(always)]
fn rounded<S: Simd>(value: S::F, factors: Factors) -> S::I {
    let whole = S::round(S::mul(value, S::splat(factors.first)));
    S::to_i32(S::mul(whole, S::splat(factors.then)))
}

/// Decodes elements `depth` of the rows of `panel` to `[depth, LANES]` integers; `depth` begins at a group.
///
/// # Safety
/// Panel and elements exist, and `to` has room for them.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd, V: DecodeIntegers>(
    w: &PackedMatrix,
    panel: usize,
    depth: Range<usize>,
    factors: Factors,
    to: *mut i32,
) {
    debug_assert!(depth.start.is_multiple_of(GROUP));
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        for group in depth.start / GROUP..depth.end / GROUP {
            let to = to.add((group * GROUP - depth.start) * LANES);
            half::<S, V, 0>(w, (panel, group), factors, to);
            half::<S, V, 1>(w, (panel, group), factors, to.add(HALF * LANES));
        }
        for k in depth.end / GROUP * GROUP..depth.end {
            let whole = rounded::<S>(V::one::<S>(w, panel, k), factors);
            S::store_i32(to.add((k - depth.start) * LANES), whole);
        }
    }
}

/// # Safety
/// The conditions of [`decode`] hold for half a group.
#[inline(always)]
unsafe fn half<S: Simd, V: DecodeIntegers, const H: usize>(
    w: &PackedMatrix,
    (panel, group): (usize, usize),
    factors: Factors,
    to: *mut i32,
) {
    // SAFETY: the caller upholds the same contract.
    unsafe {
        let numbers = V::numbers::<S, H>(w, panel, group);
        for step in 0..HALF / 4 {
            let four = V::four_whole::<S, H>(w, (panel, group, step), numbers, factors);
            for (i, whole) in four.into_iter().enumerate() {
                S::store_i32(to.add((4 * step + i) * LANES), whole);
            }
        }
    }
}
