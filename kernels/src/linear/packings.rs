//! Layouts of integer panels, for every method that sums their groups.

use super::{
    pack::PackedMatrix,
    values::{Bits, Five, Six},
};
use crate::{
    activations::{Activations, GROUP},
    quant::E2M1,
    simd::{LANES, Simd},
};

pub(super) trait IntegerPacking {
    const BITS: usize;
    /// Parts of a group that have a scale each: 1 or 2.
    const PARTS: usize = 1;
    /// Whether each group has a minimum after its scale.
    const HAS_MINIMUM: bool = false;
    /// Whether codes have a zero point, so that [`IntegerPacking::starts`] are not all 0.
    const HAS_ZERO: bool = true;
    /// Quotient of the zero point and that of [`IntegerPacking::starts`].
    const ZERO_FACTOR: i32 = 1;

    /// Returns zero point times sum of activations, negated, for each part of each group, before the
    /// factor; empty without zero points.
    fn starts(x: &Activations) -> &[i32];

    /// Loads eight steps of four elements of each row of `panel`.
    ///
    /// # Safety
    /// Panel and group exist.
    #[inline(always)]
    unsafe fn codes<S: Simd>(w: &PackedMatrix, panel: usize, group: usize) -> [S::B; 8] {
        let bytes = Self::BITS * GROUP_BYTES / 8;
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let codes = w.panel(panel).add(group * bytes);
            match Self::BITS {
                4 => unpack_four::<S>(codes),
                5 => unpack_steps::<S, Five>(codes),
                6 => unpack_steps::<S, Six>(codes),
                _ => load_eight::<S>(codes),
            }
        }
    }

    /// Loads the scales of a group, or its scale and minimum; for a single scale the second equals the first.
    ///
    /// # Safety
    /// The conditions of [`IntegerPacking::codes`] hold.
    #[inline(always)]
    unsafe fn numbers<S: Simd>(w: &PackedMatrix, panel: usize, group: usize) -> [S::F; 2] {
        // SAFETY: the caller upholds this function's contract.
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
/// 4 bits by a table of bytes with zero point 128, groups of 32.
pub(super) struct FourE2m1;
/// 5 bits, zero point 16, groups of 32.
pub(super) struct Five16;
/// 5 bits with minima, groups of 32.
pub(super) struct FiveMinimum;
/// 6 bits, zero point 32, groups of 16.
pub(super) struct Six32Halves;
/// 8 bits, zero point 128, groups of 32.
pub(super) struct Eight128;

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

impl IntegerPacking for FourE2m1 {
    const BITS: usize = 4;

    fn starts(x: &Activations) -> &[i32] {
        &x.zero128
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(w: &PackedMatrix, panel: usize, group: usize) -> [S::B; 8] {
        // SAFETY: the caller upholds this function's contract.
        let mut codes = unsafe { unpack_four::<S>(w.panel(panel).add(group * GROUP_BYTES / 2)) };
        // A loop, because closures are not always compiled for the instruction set.
        for codes in &mut codes {
            *codes = S::look_up(&E2M1, *codes);
        }
        codes
    }
}

impl IntegerPacking for Five16 {
    const BITS: usize = 5;
    const ZERO_FACTOR: i32 = 2;

    fn starts(x: &Activations) -> &[i32] {
        &x.zero8
    }
}

impl IntegerPacking for FiveMinimum {
    const BITS: usize = 5;
    const HAS_MINIMUM: bool = true;
    const HAS_ZERO: bool = false;

    fn starts(_: &Activations) -> &[i32] {
        &[]
    }
}

impl IntegerPacking for Six32Halves {
    const BITS: usize = 6;
    const PARTS: usize = 2;

    fn starts(x: &Activations) -> &[i32] {
        &x.zero32_halves
    }
}

impl IntegerPacking for Eight128 {
    const BITS: usize = 8;

    fn starts(x: &Activations) -> &[i32] {
        &x.zero128
    }
}

/// Bytes of a panel's group of 32 elements, one byte per element.
pub(super) const GROUP_BYTES: usize = GROUP * LANES;

/// Unpacks eight steps of four elements from 4-bit codes; low nibbles hold the first half of the group.
#[inline(always)]
unsafe fn unpack_four<S: Simd>(codes: *const u8) -> [S::B; 8] {
    // SAFETY: the caller guarantees a group of 256 bytes at `codes`.
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

/// Unpacks eight steps of four elements from codes with bits above the nibble.
#[inline(always)]
unsafe fn unpack_steps<S: Simd, B: Bits>(codes: *const u8) -> [S::B; 8] {
    // SAFETY: the caller guarantees a group at `codes`.
    unsafe {
        [
            B::step::<S, 0>(codes, 0),
            B::step::<S, 0>(codes, 1),
            B::step::<S, 0>(codes, 2),
            B::step::<S, 0>(codes, 3),
            B::step::<S, 1>(codes, 0),
            B::step::<S, 1>(codes, 1),
            B::step::<S, 1>(codes, 2),
            B::step::<S, 1>(codes, 3),
        ]
    }
}

#[inline(always)]
unsafe fn load_eight<S: Simd>(codes: *const u8) -> [S::B; 8] {
    // SAFETY: the caller guarantees a group of 512 bytes at `codes`.
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
