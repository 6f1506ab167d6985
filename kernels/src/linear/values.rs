//! Values of packed weights, decoded in registers.
//!
//! ```text
//! value = fma(code, scale, offset)     offset: the minimum of the group, or -zero * scale
//! ```
//!
//! Scales have eleven bits and codes at most eight, so the product is exact and the sum is rounded once. With
//! or without fusing, the value therefore equals that of [`PackedMatrix::read_row`]. The unit of the matrix
//! is a power of two and is part of the scale.
//!
//! A vector holds one element of each of the panel's sixteen rows. Codes are loaded four elements at a time,
//! from a 64-byte step, and decoded sixteen elements ("half a group") at a time: all packings share scales
//! among 16 or more.

use std::{marker::PhantomData, ops::Range};

use super::{form::NIBBLE_BYTES, pack::PackedMatrix};
use crate::{
    activations::GROUP,
    element::Element,
    quant::E2M1,
    simd::{LANES, Simd},
};

pub(super) const HALF: usize = GROUP / 2;

pub(super) trait Values {
    /// Bytes of a panel's group of 32 elements, without scales and minima.
    const GROUP_BYTES: usize;

    /// Loads scale and offset of half `H` (0 or 1) of group `group`; unspecified for floats.
    ///
    /// # Safety
    /// The panel has all elements of the group.
    unsafe fn numbers<S: Simd, const H: usize>(w: &PackedMatrix, panel: usize, group: usize) -> [S::F; 2];

    /// Decodes elements `4 step` to `4 step + 3` of half `H` of `group`; `numbers` are its scale and offset.
    ///
    /// # Safety
    /// The panel has all elements of the group, and `step` is 0 to 3.
    unsafe fn four<S: Simd, const H: usize>(
        w: &PackedMatrix,
        panel: usize,
        group: usize,
        step: usize,
        numbers: [S::F; 2],
    ) -> [S::F; 4];

    /// Decodes element `k` alone, of an incomplete group at the end of a row.
    ///
    /// # Safety
    /// `k` is an element of the panel.
    unsafe fn one<S: Simd>(w: &PackedMatrix, panel: usize, k: usize) -> S::F;
}

/// Weights of 32 bits, or of 16 bits and widened.
pub(super) struct Floats<E>(PhantomData<E>);
/// Weights of bf16, in pairs.
pub(super) struct Bf16Pairs;
/// Weights of 4 to 8 bits.
pub(super) struct Integers<B, N>(PhantomData<(B, N)>);

impl<E: Element> Values for Floats<E> {
    const GROUP_BYTES: usize = GROUP * LANES * size_of::<E>();

    #[inline(always)]
    unsafe fn numbers<S: Simd, const H: usize>(_: &PackedMatrix, _: usize, _: usize) -> [S::F; 2] {
        [S::splat(0.0); 2]
    }

    #[inline(always)]
    unsafe fn four<S: Simd, const H: usize>(
        w: &PackedMatrix,
        panel: usize,
        group: usize,
        step: usize,
        _: [S::F; 2],
    ) -> [S::F; 4] {
        let k = group * GROUP + H * HALF + 4 * step;
        // SAFETY: the caller upholds the same contract.
        [0, 1, 2, 3].map(|i| unsafe { Self::one::<S>(w, panel, k + i) })
    }

    #[inline(always)]
    unsafe fn one<S: Simd>(w: &PackedMatrix, panel: usize, k: usize) -> S::F {
        // SAFETY: the caller guarantees the element; `E` is the element type of the panel.
        unsafe { E::load::<S>(w.panel(panel).cast::<E>().add(k * LANES)) }
    }
}

impl Values for Bf16Pairs {
    const GROUP_BYTES: usize = GROUP * LANES * 2;

    #[inline(always)]
    unsafe fn numbers<S: Simd, const H: usize>(_: &PackedMatrix, _: usize, _: usize) -> [S::F; 2] {
        [S::splat(0.0); 2]
    }

    #[inline(always)]
    unsafe fn four<S: Simd, const H: usize>(
        w: &PackedMatrix,
        panel: usize,
        group: usize,
        step: usize,
        _: [S::F; 2],
    ) -> [S::F; 4] {
        let pair = (group * GROUP + H * HALF + 4 * step) / 2;
        // SAFETY: the caller guarantees that both pairs lie in the group.
        let (first, second) = unsafe {
            let pairs = w.panel(panel).add(pair * 64);
            (S::load_bytes(pairs), S::load_bytes(pairs.add(64)))
        };
        let ([a, b], [c, d]) = (S::widen_bf16(first), S::widen_bf16(second));
        [a, b, c, d]
    }

    #[inline(always)]
    unsafe fn one<S: Simd>(w: &PackedMatrix, panel: usize, k: usize) -> S::F {
        // SAFETY: the caller guarantees the element; a row of odd width is padded to complete pairs.
        S::widen_bf16(unsafe { S::load_bytes(w.panel(panel).add(k / 2 * 64)) })[k % 2]
    }
}

pub(super) trait Bits {
    const GROUP_BYTES: usize;

    /// Loads the codes of elements `4 step` to `4 step + 3` in half `H` of the group, one per byte.
    ///
    /// # Safety
    /// `codes` points to a group, and `step` is 0 to 3.
    unsafe fn step<S: Simd, const H: usize>(codes: *const u8, step: usize) -> S::B;
}

pub(super) struct Four;
/// Codes of four bits that a table turns into bytes.
pub(super) struct FourE2m1;
/// Codes of five bits: nibbles, and a line of fifth bits.
pub(super) struct Five;
/// Codes of six bits: nibbles, and two lines of upper bits.
pub(super) struct Six;
pub(super) struct Eight;

impl Bits for Four {
    const GROUP_BYTES: usize = 4 * 64;

    #[inline(always)]
    unsafe fn step<S: Simd, const H: usize>(codes: *const u8, step: usize) -> S::B {
        // SAFETY: the caller upholds this function's contract.
        let both = unsafe { S::load_bytes(codes.add(step * 64)) };
        if H == 0 { S::low_nibbles(both) } else { S::high_nibbles(both) }
    }
}

impl Bits for FourE2m1 {
    const GROUP_BYTES: usize = Four::GROUP_BYTES;

    #[inline(always)]
    unsafe fn step<S: Simd, const H: usize>(codes: *const u8, step: usize) -> S::B {
        // SAFETY: the caller upholds this function's contract.
        S::look_up(&E2M1, unsafe { Four::step::<S, H>(codes, step) })
    }
}

impl Bits for Five {
    const GROUP_BYTES: usize = 5 * 64;

    #[inline(always)]
    unsafe fn step<S: Simd, const H: usize>(codes: *const u8, step: usize) -> S::B {
        // SAFETY: the caller upholds this function's contract.
        let (nibbles, upper) =
            unsafe { (Four::step::<S, H>(codes, step), S::load_bytes(codes.add(NIBBLE_BYTES))) };
        match 4 * H + step {
            0 => S::with_upper::<4, 0x10>(nibbles, upper),
            1 => S::with_upper::<3, 0x10>(nibbles, upper),
            2 => S::with_upper::<2, 0x10>(nibbles, upper),
            3 => S::with_upper::<1, 0x10>(nibbles, upper),
            4 => S::with_upper::<0, 0x10>(nibbles, upper),
            5 => S::with_upper::<-1, 0x10>(nibbles, upper),
            6 => S::with_upper::<-2, 0x10>(nibbles, upper),
            _ => S::with_upper::<-3, 0x10>(nibbles, upper),
        }
    }
}

impl Bits for Six {
    const GROUP_BYTES: usize = 6 * 64;

    #[inline(always)]
    unsafe fn step<S: Simd, const H: usize>(codes: *const u8, step: usize) -> S::B {
        // SAFETY: the caller upholds this function's contract.
        let (nibbles, upper) =
            unsafe { (Four::step::<S, H>(codes, step), S::load_bytes(codes.add(NIBBLE_BYTES + H * 64))) };
        match step {
            0 => S::with_upper::<4, 0x30>(nibbles, upper),
            1 => S::with_upper::<2, 0x30>(nibbles, upper),
            2 => S::with_upper::<0, 0x30>(nibbles, upper),
            _ => S::with_upper::<-2, 0x30>(nibbles, upper),
        }
    }
}

impl Bits for Eight {
    const GROUP_BYTES: usize = 8 * 64;

    #[inline(always)]
    unsafe fn step<S: Simd, const H: usize>(codes: *const u8, step: usize) -> S::B {
        // SAFETY: the caller upholds this function's contract.
        unsafe { S::load_bytes(codes.add((4 * H + step) * 64)) }
    }
}

pub(super) trait GroupScales {
    /// Zero point of codes; 0 for codes with a minimum.
    const ZERO: usize = 0;

    /// Loads scale and offset of half `H` of group `group`, both not yet multiplied by the unit.
    ///
    /// # Safety
    /// `all` points to the scales and minima of a panel, and the group exists.
    unsafe fn load<S: Simd, const H: usize>(all: *const u16, group: usize) -> [S::F; 2];
}

/// A scale for 32 elements; zero point `Z`.
pub(super) struct Zero<const Z: usize>;
/// A scale for 16 elements; zero point `Z`.
pub(super) struct ZeroOfHalves<const Z: usize>;
/// A scale and a minimum for 32 elements.
pub(super) struct Minimum;

impl<const Z: usize> GroupScales for Zero<Z> {
    const ZERO: usize = Z;

    #[inline(always)]
    unsafe fn load<S: Simd, const H: usize>(all: *const u16, group: usize) -> [S::F; 2] {
        // SAFETY: the caller upholds this function's contract.
        let scale = unsafe { S::load_f16(all.add(group * LANES)) };
        [scale, S::mul(scale, S::splat(-(Z as f32)))]
    }
}

impl<const Z: usize> GroupScales for ZeroOfHalves<Z> {
    const ZERO: usize = Z;

    #[inline(always)]
    unsafe fn load<S: Simd, const H: usize>(all: *const u16, group: usize) -> [S::F; 2] {
        // SAFETY: the caller upholds this function's contract.
        let scale = unsafe { S::load_f16(all.add((2 * group + H) * LANES)) };
        [scale, S::mul(scale, S::splat(-(Z as f32)))]
    }
}

impl GroupScales for Minimum {
    #[inline(always)]
    unsafe fn load<S: Simd, const H: usize>(all: *const u16, group: usize) -> [S::F; 2] {
        let at = all.wrapping_add(2 * group * LANES);
        // SAFETY: the caller upholds this function's contract.
        unsafe { [S::load_f16(at), S::load_f16(at.add(LANES))] }
    }
}

impl<B: Bits, N: GroupScales> Values for Integers<B, N> {
    const GROUP_BYTES: usize = B::GROUP_BYTES;

    #[inline(always)]
    unsafe fn numbers<S: Simd, const H: usize>(w: &PackedMatrix, panel: usize, group: usize) -> [S::F; 2] {
        // The scales and minima of all groups follow the codes.
        let all = w.panel(panel).wrapping_add(w.columns() / GROUP * B::GROUP_BYTES).cast::<u16>();
        let unit = S::splat(w.unit());
        // SAFETY: the caller upholds this function's contract.
        unsafe { N::load::<S, H>(all, group) }.map(|number| S::mul(number, unit))
    }

    #[inline(always)]
    unsafe fn four<S: Simd, const H: usize>(
        w: &PackedMatrix,
        panel: usize,
        group: usize,
        step: usize,
        [scale, offset]: [S::F; 2],
    ) -> [S::F; 4] {
        // SAFETY: the caller upholds this function's contract.
        let codes = unsafe { B::step::<S, H>(w.panel(panel).add(group * B::GROUP_BYTES), step) };
        [S::byte::<0>(codes), S::byte::<1>(codes), S::byte::<2>(codes), S::byte::<3>(codes)]
            .map(|code| S::fma(code, scale, offset))
    }

    #[inline(always)]
    unsafe fn one<S: Simd>(_: &PackedMatrix, _: usize, _: usize) -> S::F {
        unreachable!("rows of integers are whole groups")
    }
}

/// Decodes half `H` of a group of a panel, one vector per column.
///
/// # Safety
/// The panel has all elements of the group.
#[inline(always)]
unsafe fn decode_half<V: Values, S: Simd, const H: usize>(
    w: &PackedMatrix,
    panel: usize,
    group: usize,
) -> [S::F; HALF] {
    let mut values = [S::splat(0.0); HALF];
    // SAFETY: the caller upholds the same contract.
    unsafe {
        let numbers = V::numbers::<S, H>(w, panel, group);
        for (step, four) in values.as_chunks_mut().0.iter_mut().enumerate() {
            *four = V::four::<S, H>(w, panel, group, step, numbers);
        }
    }
    values
}

/// Decodes columns of a panel from the start of a group on, one vector per column. Columns beyond the end of
/// a row are zeros.
///
/// # Safety
/// The panel exists, and `to` has room for the vectors.
#[inline(always)]
pub(super) unsafe fn decode_columns<V: Values, S: Simd>(
    w: &PackedMatrix,
    panel: usize,
    columns: Range<usize>,
    to: *mut f32,
) {
    let whole = columns.end.min(w.columns()) / GROUP;
    let at = |k: usize| to.wrapping_add((k - columns.start) * LANES);
    // SAFETY: the caller upholds this function's contract, and the groups are whole.
    unsafe {
        for group in columns.start / GROUP..whole {
            for (i, value) in decode_half::<V, S, 0>(w, panel, group).into_iter().enumerate() {
                S::store(at(group * GROUP + i), value);
            }
            for (i, value) in decode_half::<V, S, 1>(w, panel, group).into_iter().enumerate() {
                S::store(at(group * GROUP + HALF + i), value);
            }
        }
        for k in columns.start.max(whole * GROUP)..columns.end {
            let value = if k < w.columns() { V::one::<S>(w, panel, k) } else { S::splat(0.0) };
            S::store(at(k), value);
        }
    }
}

/// Decodes sixteen columns of a panel from `first` on, a multiple of sixteen: one vector per *output*.
/// Columns beyond the end of a row are zeros.
///
/// # Safety
/// The panel exists.
#[inline(always)]
pub(super) unsafe fn decode_outputs<V: Values, S: Simd>(
    w: &PackedMatrix,
    panel: usize,
    first: usize,
) -> [S::F; LANES] {
    const { assert!(HALF == LANES) };
    let (group, is_whole) = (first / GROUP, first / GROUP < w.columns() / GROUP);
    // SAFETY: the caller upholds this function's contract; the element exists.
    S::transpose(unsafe {
        match first % GROUP {
            0 if is_whole => decode_half::<V, S, 0>(w, panel, group),
            _ if is_whole => decode_half::<V, S, 1>(w, panel, group),
            _ => std::array::from_fn(|i| {
                let k = first + i;
                if k < w.columns() { V::one::<S>(w, panel, k) } else { S::splat(0.0) }
            }),
        }
    })
}

/// Evaluates an expression with the alias `V` for the [`Values`] of a packing.
macro_rules! with_values {
    ($packing:expr, $values:ident => $run:expr) => {{
        use crate::linear::{
            form::Packing,
            values::{
                Bf16Pairs, Eight, Five, Floats, Four, FourE2m1, Integers, Minimum, Six, Zero, ZeroOfHalves,
            },
        };
        macro_rules! with {
            ($type:ty) => {{
                type $values = $type;
                $run
            }};
        }
        match $packing {
            Packing::F32 => with!(Floats<f32>),
            Packing::F16 => with!(Floats<u16>),
            Packing::Bf16 => with!(Bf16Pairs),
            Packing::Four8 => with!(Integers<Four, Zero<8>>),
            Packing::FourMinimum => with!(Integers<Four, Minimum>),
            Packing::FourE2m1 => with!(Integers<FourE2m1, Zero<128>>),
            Packing::Five16 => with!(Integers<Five, Zero<16>>),
            Packing::FiveMinimum => with!(Integers<Five, Minimum>),
            Packing::Six32Halves => with!(Integers<Six, ZeroOfHalves<32>>),
            Packing::Eight128 => with!(Integers<Eight, Zero<128>>),
        }
    }};
}
pub(super) use with_values;
