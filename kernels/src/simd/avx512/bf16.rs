//! Tiles of bf16 weights, unpacked for the matrix unit.
//!
//! A value is `fma(code, scale, offset)`, rounded to bf16 half up: `(bits + 0x8000) >> 16`. Two ports execute
//! all of this, so each operation counts: 512 values take about 78 cycles.
//!
//! Four bits of a code go into the mantissa of 1.0 at bit `p` by one operation, where the word has them or
//! after a shift that serves three codes: `1 + code 2^(p - 23)`. One `fma` with `scale 2^(23 - p)` and
//! `offset - scale 2^(23 - p)` then gives the value, rounded once, provided that this difference is exact.

#![allow(clippy::wildcard_imports, reason = "an instruction set is used whole")]

use std::arch::{asm, x86_64::*};

use crate::{
    quant::E2M1,
    simd::{LANES, Simd, avx512::Avx512},
};

/// Wraps intrinsics that only require the CPU feature, and memory operations that the caller guarantees.
macro_rules! cpu {
    ($body:expr) => {
        // SAFETY: `Isa::dispatch` has checked the features; pointers are valid as the functions require.
        unsafe { $body }
    };
}

/// Factors and offsets of codes at the bits 11, 12, 15, 16 and 19 of the mantissa.
type Placed = [[__m512; 2]; 5];

/// Powers of two that correspond to these bits.
const POWERS: [f32; 5] = [4096.0, 2048.0, 256.0, 128.0, 16.0];

/// `a | (b & c)`, the operation of `vpternlogd`.
const OR_OF_AND: i32 = 0xf8;

/// Rounds two values of each lane half up; the value is infinite or a NaN without payload, or finite.
#[inline(always)]
fn pair(even: __m512, odd: __m512) -> __m512i {
    cpu!({
        let half = _mm512_set1_epi32(0x8000);
        let even = _mm512_add_epi32(_mm512_castps_si512(even), half);
        let odd = _mm512_add_epi32(_mm512_castps_si512(odd), half);
        upper_halves(even, odd)
    })
}

/// Returns the upper halves of two words of each lane, in one operation; the compiler would use two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper_halves(even: __m512i, mut odd: __m512i) -> __m512i {
    let upper = _mm512_set4_epi32(0x0f0e_0f0e, 0x0b0a_0b0a, 0x0706_0706, 0x0302_0302);
    let lower = 0x3333_3333_3333_3333_u64;
    // SAFETY: the operation concerns registers alone.
    unsafe {
        asm!(
            "vpshufb {odd} {{{lower}}}, {even}, {upper}",
            odd = inout(zmm_reg) odd, even = in(zmm_reg) even, upper = in(zmm_reg) upper,
            lower = in(kreg) lower, options(pure, nomem, nostack, preserves_flags),
        );
    }
    odd
}

/// Replaces each NaN by the default NaN, whose rounding is a NaN.
#[inline(always)]
fn plain(v: __m512) -> __m512 {
    cpu!(_mm512_fixupimm_ps::<0>(v, v, _mm512_set1_epi32(0x33)))
}

#[inline(always)]
unsafe fn halves(from: *const u16) -> __m512 {
    cpu!(plain(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))))
}

/// Value of the code of `BITS` bits from bit `AT` of each word, by the factor and the offset of this place.
#[inline(always)]
fn placed<const BITS: u32, const AT: u32>(word: __m512i, [factor, offset]: [__m512; 2]) -> __m512 {
    cpu!({
        let mask = _mm512_set1_epi32(((1 << BITS) - 1) << AT);
        let one = _mm512_set1_epi32(0x3f80_0000);
        let code = _mm512_ternarylogic_epi32::<OR_OF_AND>(one, word, mask);
        _mm512_fmadd_ps(_mm512_castsi512_ps(code), factor, offset)
    })
}

/// Unpacks a group of 4-bit codes: the first half of its columns is in the low nibbles.
#[inline(always)]
unsafe fn four(codes: *const u8, [b11, b12, b15, b16, b19]: Placed, to: *mut u8) {
    cpu!({
        let mut step = 0;
        while step < 4 {
            let word = _mm512_loadu_si512(codes.add(step * 64).cast());
            let (left, right) = (_mm512_slli_epi32::<11>(word), _mm512_srli_epi32::<9>(word));
            let to = to.add(step * 128);
            // Codes begin at the bits 0, 8, 16, 24 in the first half, and 4, 12, 20, 28 in the second.
            store(to, pair(placed::<4, 11>(left, b11), placed::<4, 19>(left, b19)));
            store(to.add(64), pair(placed::<4, 16>(word, b16), placed::<4, 15>(right, b15)));
            store(to.add(512), pair(placed::<4, 15>(left, b15), placed::<4, 12>(word, b12)));
            store(to.add(576), pair(placed::<4, 11>(right, b11), placed::<4, 19>(right, b19)));
            step += 1;
        }
    });
}

#[inline(always)]
unsafe fn store(to: *mut u8, v: __m512i) {
    cpu!(_mm512_storeu_si512(to.cast(), v));
}

/// Unpacks a group of 4-bit codes with the zero point 8.
///
/// # Safety
/// `codes` has 256 bytes, `scales` 16 numbers, and `to` room for a tile.
#[inline(always)]
pub(crate) unsafe fn four_zero(codes: *const u8, scales: *const u16, unit: f32, to: *mut u8) {
    cpu!({
        let scale = _mm512_mul_ps(halves(scales), _mm512_set1_ps(unit));
        // Eleven bits times at most ten are exact.
        let number = |power: f32| {
            let factor = _mm512_mul_ps(scale, _mm512_set1_ps(power));
            [factor, _mm512_mul_ps(scale, _mm512_set1_ps(-(power + 8.0)))]
        };
        let [a, b, c, d, e] = POWERS;
        four(codes, [number(a), number(b), number(c), number(d), number(e)], to);
    });
}

/// Unpacks a group of 4-bit codes with a minimum.
///
/// # Safety
/// `codes` has 256 bytes, `numbers` 16 scales and 16 minima, and `to` room for a tile.
#[inline(always)]
pub(crate) unsafe fn four_minimum(codes: *const u8, numbers: *const u16, unit: f32, to: *mut u8) {
    cpu!({
        let unit = _mm512_set1_ps(unit);
        let scale = _mm512_mul_ps(halves(numbers), unit);
        let minimum = _mm512_mul_ps(halves(numbers.add(LANES)), unit);
        let [a, b, c, d, e] = POWERS;
        // A minimum of one to 4096 scales has at most 24 bits less 4096 scales.
        let largest = _mm512_mul_ps(scale, _mm512_set1_ps(a));
        let (low, middle, high) = (_mm512_abs_ps(scale), _mm512_abs_ps(minimum), _mm512_abs_ps(largest));
        let fits = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(low, middle);
        let fits = _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(fits, middle, high);
        if fits != 0xffff {
            return four_apart(codes, scale, minimum, to);
        }
        let number = |power: f32| {
            let factor = _mm512_mul_ps(scale, _mm512_set1_ps(power));
            [factor, _mm512_sub_ps(minimum, factor)]
        };
        four(codes, [number(a), number(b), number(c), number(d), number(e)], to);
    });
}

/// Unpacks any group of 4-bit codes, each converted before its `fma`.
#[inline(always)]
unsafe fn four_apart(codes: *const u8, scale: __m512, minimum: __m512, to: *mut u8) {
    cpu!({
        let nibbles = _mm512_set1_epi8(15);
        let mut step = 0;
        while step < 4 {
            let word = _mm512_loadu_si512(codes.add(step * 64).cast());
            bytes(_mm512_and_si512(word, nibbles), scale, minimum, to.add(step * 128));
            let high = _mm512_and_si512(_mm512_srli_epi32::<4>(word), nibbles);
            bytes(high, scale, minimum, to.add(512 + step * 128));
            step += 1;
        }
    });
}

/// Unpacks a group of 4-bit codes of the table [`E2M1`].
///
/// # Safety
/// `codes` has 256 bytes, `scales` 16 numbers, and `to` room for a tile.
#[inline(always)]
pub(crate) unsafe fn four_e2m1(codes: *const u8, scales: *const u16, unit: f32, to: *mut u8) {
    cpu!({
        let scale = _mm512_mul_ps(halves(scales), _mm512_set1_ps(unit));
        let offset = _mm512_mul_ps(scale, _mm512_set1_ps(-128.0));
        let mut step = 0;
        while step < 4 {
            let both = _mm512_loadu_si512(codes.add(step * 64).cast());
            let low = Avx512::look_up(&E2M1, Avx512::low_nibbles(both));
            bytes(low, scale, offset, to.add(step * 128));
            let high = Avx512::look_up(&E2M1, Avx512::high_nibbles(both));
            bytes(high, scale, offset, to.add(512 + step * 128));
            step += 1;
        }
    });
}

/// Unpacks four bytes of each word to two pairs.
#[inline(always)]
unsafe fn bytes(word: __m512i, scale: __m512, minimum: __m512, to: *mut u8) {
    cpu!({
        let middle = _mm512_mul_ps(scale, _mm512_set1_ps(1.0 / 256.0));
        let high = _mm512_mul_ps(scale, _mm512_set1_ps(1.0 / 65536.0));
        let value = |code, factor| _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), factor, minimum);
        let at = |shift: u32| _mm512_and_si512(word, _mm512_set1_epi32(255 << shift));
        store(to, pair(value(at(0), scale), value(at(8), middle)));
        store(to.add(64), pair(value(at(16), high), value(_mm512_srli_epi32::<24>(word), scale)));
    });
}

/// Factors and offsets of bytes at the bits 7, 8 and 15 of the mantissa.
type PlacedBytes = [[__m512; 2]; 3];

/// Returns factors and offsets of codes with the zero point `ZERO`: 16, 32 or 128.
#[inline(always)]
unsafe fn placed_bytes<const ZERO: u8>(scales: *const u16, unit: f32) -> PlacedBytes {
    cpu!({
        let scale = _mm512_mul_ps(halves(scales), _mm512_set1_ps(unit));
        // Eleven bits times at most thirteen are exact.
        let number = |power: f32| {
            let factor = _mm512_mul_ps(scale, _mm512_set1_ps(power));
            [factor, _mm512_mul_ps(scale, _mm512_set1_ps(-(power + f32::from(ZERO))))]
        };
        [number(65536.0), number(32768.0), number(256.0)]
    })
}

/// Unpacks a step: the lower `BITS` bits of four bytes of each word to two pairs.
#[inline(always)]
unsafe fn step_of_bytes<const BITS: u32>(word: __m512i, [b7, b8, b15]: PlacedBytes, to: *mut u8) {
    cpu!({
        let (left, right) = (_mm512_slli_epi32::<8>(word), _mm512_srli_epi32::<9>(word));
        store(to, pair(placed::<BITS, 8>(left, b8), placed::<BITS, 8>(word, b8)));
        store(to.add(64), pair(placed::<BITS, 7>(right, b7), placed::<BITS, 15>(right, b15)));
    });
}

/// Returns step `STEP` of codes of `BITS` bits, 5 or 6, in the lower bits of each byte. The other bits have
/// no meaning.
#[inline(always)]
unsafe fn step_above_nibbles<const BITS: usize, const STEP: usize>(codes: *const u8) -> __m512i {
    cpu!({
        let line = if BITS == 6 { STEP / 4 } else { 0 };
        let (nibbles, upper) = (
            _mm512_loadu_si512(codes.add(STEP % 4 * 64).cast()),
            _mm512_loadu_si512(codes.add(256 + line * 64).cast()),
        );
        let nibbles = if STEP < 4 { nibbles } else { _mm512_srli_epi32::<4>(nibbles) };
        let at = if BITS == 6 { 2 * (STEP % 4) } else { STEP };
        let upper = if at > 4 {
            _mm512_srl_epi32(upper, _mm_cvtsi32_si128(at as i32 - 4))
        } else {
            _mm512_sll_epi32(upper, _mm_cvtsi32_si128(4 - at as i32))
        };
        // `a ? b : c`, bit by bit.
        _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(15), nibbles, upper)
    })
}

/// Evaluates an expression for each step of a group, with the step as a constant.
macro_rules! for_steps {
    ($step:ident => $run:expr) => {
        for_steps!(@ $step, $run, 0, 1, 2, 3, 4, 5, 6, 7)
    };
    (@ $step:ident, $run:expr, $($number:literal),*) => {$({
        const $step: usize = $number;
        $run
    })*};
}

/// Unpacks a group of 5-bit codes with the zero point 16.
///
/// # Safety
/// `codes` has 320 bytes, `scales` 16 numbers, and `to` room for a tile.
#[inline(always)]
pub(crate) unsafe fn five_zero(codes: *const u8, scales: *const u16, unit: f32, to: *mut u8) {
    cpu!({
        let numbers = placed_bytes::<16>(scales, unit);
        for_steps!(STEP => {
            step_of_bytes::<5>(step_above_nibbles::<5, STEP>(codes), numbers, to.add(STEP * 128));
        });
    });
}

/// Unpacks a group of 5-bit codes with a minimum.
///
/// # Safety
/// `codes` has 320 bytes, `numbers` 16 scales and 16 minima, and `to` room for a tile.
#[inline(always)]
pub(crate) unsafe fn five_minimum(codes: *const u8, numbers: *const u16, unit: f32, to: *mut u8) {
    cpu!({
        let unit = _mm512_set1_ps(unit);
        let scale = _mm512_mul_ps(halves(numbers), unit);
        let minimum = _mm512_mul_ps(halves(numbers.add(LANES)), unit);
        let mask = _mm512_set1_epi8(31);
        for_steps!(STEP => {
            let word = _mm512_and_si512(step_above_nibbles::<5, STEP>(codes), mask);
            bytes(word, scale, minimum, to.add(STEP * 128));
        });
    });
}

/// Unpacks a group of 6-bit codes with the zero point 32 and a scale for each half.
///
/// # Safety
/// `codes` has 384 bytes, `scales` 32 numbers, and `to` room for a tile.
#[inline(always)]
pub(crate) unsafe fn six_halves(codes: *const u8, scales: *const u16, unit: f32, to: *mut u8) {
    cpu!({
        let first = placed_bytes::<32>(scales, unit);
        let second = placed_bytes::<32>(scales.add(LANES), unit);
        for_steps!(STEP => {
            let numbers = if STEP < 4 { first } else { second };
            step_of_bytes::<6>(step_above_nibbles::<6, STEP>(codes), numbers, to.add(STEP * 128));
        });
    });
}

/// Unpacks a group of 8-bit codes with the zero point 128.
///
/// # Safety
/// `codes` has 512 bytes, `scales` 16 numbers, and `to` room for a tile.
#[inline(always)]
pub(crate) unsafe fn eight_zero(codes: *const u8, scales: *const u16, unit: f32, to: *mut u8) {
    cpu!({
        let numbers = placed_bytes::<128>(scales, unit);
        for_steps!(STEP => {
            let word = _mm512_loadu_si512(codes.add(STEP * 64).cast());
            step_of_bytes::<8>(word, numbers, to.add(STEP * 128));
        });
    });
}

/// Rounds a pair of columns half up; a NaN stays a NaN.
///
/// # Safety
/// `to` has room for a row of a tile.
#[inline(always)]
pub(crate) unsafe fn floats(even: __m512, odd: __m512, to: *mut u8) {
    cpu!({
        let is_any_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(even, odd) != 0;
        let (even, odd) = if is_any_nan { (plain(even), plain(odd)) } else { (even, odd) };
        store(to, pair(even, odd));
    });
}

/// Transposes `P` halves of a tile of sixteen pairs of columns by sixteen outputs. Half `h` of the columns
/// gives eight rows of tile `h` at `to`: pairs of outputs by sixteen columns.
///
/// # Safety
/// `tile` is a tile, and `to` has room for eight rows of each of `P` tiles.
#[inline(always)]
pub(crate) unsafe fn transpose<const P: usize>(tile: *const u8, to: *mut u8) {
    cpu!({
        // Two pairs of columns of two outputs lie in 64 bits: `[a0 a1 b0 b1]` becomes `[a0 b0 a1 b1]`.
        let swap = _mm512_set4_epi32(0x0f0e_0b0a, 0x0d0c_0908, 0x0706_0302, 0x0504_0100);
        let mut half = 0;
        while half < P {
            let from = tile.add(half * 512);
            let mut rows = [_mm512_setzero_si512(); 8];
            let mut pair = 0;
            while pair < 8 {
                rows[pair] = _mm512_shuffle_epi8(_mm512_loadu_si512(from.add(pair * 64).cast()), swap);
                pair += 1;
            }
            let columns = transpose_words(rows);
            let mut row = 0;
            while row < 8 {
                store(to.add(half * 1024 + row * 64), columns[row]);
                row += 1;
            }
            half += 1;
        }
    });
}

/// Transposes eight rows of eight words of 64 bits.
// Without closures: the compiler would not inline intrinsics into a closure that it does not inline.
#[inline(always)]
fn transpose_words(v: [__m512i; 8]) -> [__m512i; 8] {
    cpu!({
        let [mut pairs, mut columns] = [[_mm512_setzero_si512(); 8]; 2];
        let mut i = 0;
        while i < 4 {
            pairs[i] = _mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]);
            pairs[4 + i] = _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]);
            i += 1;
        }
        // Quarters of two words: of the even columns, then of the odd ones.
        let mut odd = 0;
        while odd < 2 {
            let [a, b, c, d] = [pairs[4 * odd], pairs[4 * odd + 1], pairs[4 * odd + 2], pairs[4 * odd + 3]];
            let (first, second) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0x44>(c, d));
            columns[odd] = _mm512_shuffle_i64x2::<0x88>(first, second);
            columns[2 + odd] = _mm512_shuffle_i64x2::<0xdd>(first, second);
            let (third, fourth) = (_mm512_shuffle_i64x2::<0xee>(a, b), _mm512_shuffle_i64x2::<0xee>(c, d));
            columns[4 + odd] = _mm512_shuffle_i64x2::<0x88>(third, fourth);
            columns[6 + odd] = _mm512_shuffle_i64x2::<0xdd>(third, fourth);
            odd += 1;
        }
        columns
    })
}
