//! Sixteen lanes in one 512-bit register.

#![allow(clippy::wildcard_imports, reason = "an instruction set is used whole")]

use std::arch::x86_64::*;

pub(crate) mod bf16;

use super::{GROUP, Kernel, Simd};

/// AVX-512 with VNNI and BF16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512;

/// Runs `kernel` in a function compiled for these instructions.
// Never inlined: a kernel of many shapes runs each through `Simd::call`, so that no function becomes huge.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// Wraps intrinsics that only require the CPU feature, and memory operations that the caller guarantees.
macro_rules! cpu {
    ($body:expr) => {
        // SAFETY: `Isa::dispatch` has checked the features; pointers are valid as the trait's methods require.
        unsafe { $body }
    };
}

#[inline(always)]
fn head(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

/// Returns the digits of eight integers of `B` bytes: all lowest digits, then all second digits, and so on.
#[inline(always)]
unsafe fn by_place<const B: usize>(numbers: *const [u8; B]) -> __m512i {
    /// Order that spreads integers of `own` 16-bit halves to four halves each.
    const fn apart(own: usize) -> [i16; 32] {
        let (mut order, mut at) = ([0; 32], 0);
        while at < 32 {
            order[at] = (at / 4 * own + at % 4) as i16;
            at += 1;
        }
        order
    }
    static APART: [i16; 32] = apart(3);
    /// Permutation of 32 values as a matrix of 4 x 8, from row-major to column-major order: 0, 8, 16, 24,
    /// 1, 9, and so on.
    static TOGETHER: [i16; 32] = {
        let (mut order, mut at) = ([0; 32], 0);
        while at < 32 {
            order[at] = (at % 4 * 8 + at / 4) as i16;
            at += 1;
        }
        order
    };
    cpu!({
        let words = if B == 8 {
            _mm512_loadu_si512(numbers.cast())
        } else {
            let halves = _mm512_maskz_loadu_epi16((1 << (4 * B)) - 1, numbers.cast());
            _mm512_maskz_permutexvar_epi16(0x7777_7777, _mm512_loadu_si512(APART.as_ptr().cast()), halves)
        };
        let half = _mm512_set1_epi8(i8::MIN);
        let digits = _mm512_xor_si512(_mm512_add_epi64(words, half), half);
        // Pairs the digits of one position of the two words of a quarter.
        let order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
        let pairs = _mm512_shuffle_epi8(digits, _mm512_broadcast_i32x4(order));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(TOGETHER.as_ptr().cast()), pairs)
    })
}

/// Writes quarter `Q` of both halves of even positions, and then of odd ones.
#[inline(always)]
unsafe fn put_quarter<const Q: i32>(to: *mut __m128i, even: [__m512i; 2], odd: [__m512i; 2]) {
    cpu!({
        _mm_storeu_si128(to, _mm512_extracti32x4_epi32::<Q>(even[0]));
        _mm_storeu_si128(to.add(1), _mm512_extracti32x4_epi32::<Q>(even[1]));
        _mm_storeu_si128(to.add(2), _mm512_extracti32x4_epi32::<Q>(odd[0]));
        _mm_storeu_si128(to.add(3), _mm512_extracti32x4_epi32::<Q>(odd[1]));
    });
}

impl Simd for Avx512 {
    type F = __m512;

    const TILE: usize = 8;
    const BESIDE_MATRIX_UNIT: bool = true;

    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        cpu!(run(kernel))
    }

    #[inline(always)]
    fn digits<const B: usize>(numbers: &[[u8; B]; GROUP]) -> [[u8; GROUP]; B] {
        let [first, second, third, fourth] = [0, 8, 16, 24].map(|at| numbers.as_ptr().wrapping_add(at));
        let mut digits = [[0; GROUP]; B];
        cpu!({
            let (first, second) = (by_place::<B>(first), by_place::<B>(second));
            let (third, fourth) = (by_place::<B>(third), by_place::<B>(fourth));
            let even = [_mm512_unpacklo_epi64(first, second), _mm512_unpacklo_epi64(third, fourth)];
            let odd = [_mm512_unpackhi_epi64(first, second), _mm512_unpackhi_epi64(third, fourth)];
            let to = digits.as_mut_ptr().cast::<__m128i>();
            put_quarter::<0>(to, even, odd);
            put_quarter::<1>(to.add(4), even, odd);
            put_quarter::<2>(to.add(8), even, odd);
            if B > 6 {
                put_quarter::<3>(to.add(12), even, odd);
            }
        });
        digits
    }

    #[inline(always)]
    fn splat(x: f32) -> __m512 {
        cpu!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        cpu!(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        cpu!(_mm512_storeu_ps(to, v));
    }
    #[inline(always)]
    unsafe fn load_head(from: *const f32, count: usize) -> __m512 {
        cpu!(_mm512_maskz_loadu_ps(head(count), from))
    }
    #[inline(always)]
    unsafe fn store_head(to: *mut f32, v: __m512, count: usize) {
        cpu!(_mm512_mask_storeu_ps(to, head(count), v));
    }
    #[inline(always)]
    unsafe fn load_repeated(from: *const f32, each: usize, count: usize) -> __m512 {
        cpu!({
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let elements = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(each.trailing_zeros().cast_signed()));
            _mm512_permutexvar_ps(elements, Self::load_head(from, count))
        })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        cpu!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_f16_head(from: *const u16, count: usize) -> __m512 {
        cpu!(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(head(count), from.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, v: __m512) {
        cpu!(_mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)));
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: __m512) {
        cpu!(_mm256_storeu_si256(to.cast(), std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v))));
    }

    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        cpu!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(a: __m512, b: __m512) -> __m512 {
        cpu!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        cpu!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(a: __m512, b: __m512) -> __m512 {
        cpu!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(a: __m512, b: __m512) -> __m512 {
        cpu!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(a: __m512, b: __m512) -> __m512 {
        cpu!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        cpu!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn fma_flushed(a: __m512, b: __m512, c: __m512) -> __m512 {
        cpu!({
            // The values are the odd elements. The even product, 0 * -0, leaves the sum as it is.
            let b = _mm512_or_si512(_mm512_castps_si512(b), _mm512_set1_epi32(0x8000));
            let pairs = |v| std::mem::transmute::<__m512i, __m512bh>(v);
            _mm512_dpbf16_ps(c, pairs(_mm512_castps_si512(a)), pairs(b))
        })
    }
    #[inline(always)]
    fn flushed(v: __m512) -> __m512 {
        cpu!({
            let is_small =
                _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(v), _mm512_set1_ps(f32::MIN_POSITIVE));
            let bits = _mm512_castps_si512(v);
            let sign = _mm512_set1_epi32(i32::MIN);
            _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, is_small, bits, sign))
        })
    }
    #[inline(always)]
    fn abs(v: __m512) -> __m512 {
        cpu!(_mm512_abs_ps(v))
    }
    #[inline(always)]
    fn where_at_least(v: __m512, x: __m512, limit: __m512) -> __m512 {
        cpu!(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, limit), v))
    }
    #[inline(always)]
    fn select_head(count: usize, v: __m512, other: __m512) -> __m512 {
        cpu!(_mm512_mask_blend_ps(head(count), other, v))
    }
    #[inline(always)]
    fn greater(a: __m512, b: __m512) -> u16 {
        cpu!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b))
    }
    #[inline(always)]
    fn sum(v: __m512) -> f32 {
        cpu!({
            let high = _mm512_castpd_ps(_mm512_castsi512_pd(_mm512_alignr_epi64::<4>(
                _mm512_castps_si512(v),
                _mm512_castps_si512(v),
            )));
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_castps512_ps256(high));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn max_lane(v: __m512) -> f32 {
        cpu!(_mm512_reduce_max_ps(v))
    }
    #[inline(always)]
    fn scale_by_power(v: __m512, n: __m512) -> __m512 {
        cpu!(_mm512_scalef_ps(v, n))
    }
    #[inline(always)]
    fn round(v: __m512) -> __m512 {
        cpu!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v))
    }

    #[inline(always)]
    fn splat_i32(x: i32) -> __m512i {
        cpu!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const i32) -> __m512i {
        cpu!(_mm512_loadu_si512(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_i32(to: *mut i32, v: __m512i) {
        cpu!(_mm512_storeu_si512(to.cast(), v));
    }
    #[inline(always)]
    fn add_i32(a: __m512i, b: __m512i) -> __m512i {
        cpu!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn times_128(v: __m512i) -> __m512i {
        cpu!(_mm512_slli_epi32::<7>(v))
    }
    #[inline(always)]
    fn to_i32(v: __m512) -> __m512i {
        cpu!(_mm512_cvtps_epi32(v))
    }
    #[inline(always)]
    fn to_f32(v: __m512i) -> __m512 {
        cpu!(_mm512_cvtepi32_ps(v))
    }
    #[inline(always)]
    fn sum_i32(v: __m512i) -> i32 {
        cpu!(_mm512_reduce_add_epi32(v))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        cpu!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))))
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: __m512i) {
        cpu!(_mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(v)));
    }

    #[inline(always)]
    unsafe fn store_words(to: *mut i16, v: __m512i) {
        cpu!(_mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(v)));
    }
    #[inline(always)]
    unsafe fn store_word_pairs(to: *mut i16, low: __m512i, high: __m512i) {
        cpu!({
            let low = _mm512_and_si512(low, _mm512_set1_epi32(0xffff));
            _mm512_storeu_si512(to.cast(), _mm512_or_si512(low, _mm512_slli_epi32::<16>(high)));
        });
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> __m512i {
        cpu!(_mm512_loadu_si512(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, v: __m512i) {
        cpu!(_mm512_storeu_si512(to.cast(), v));
    }
    #[inline(always)]
    fn low_nibbles(v: __m512i) -> __m512i {
        cpu!(_mm512_and_si512(v, _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn high_nibbles(v: __m512i) -> __m512i {
        cpu!(_mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn with_upper<const LEFT: i32, const MASK: u8>(v: __m512i, upper: __m512i) -> __m512i {
        cpu!({
            let upper = if LEFT < 0 {
                _mm512_srl_epi16(upper, _mm_cvtsi32_si128(-LEFT))
            } else {
                _mm512_sll_epi16(upper, _mm_cvtsi32_si128(LEFT))
            };
            // `a | (b & c)`, the operation of `vpternlogd`.
            _mm512_ternarylogic_epi32::<0xf8>(v, upper, _mm512_set1_epi8(MASK.cast_signed()))
        })
    }
    #[inline(always)]
    fn look_up(table: &[u8; 16], v: __m512i) -> __m512i {
        cpu!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v))
    }
    #[inline(always)]
    fn byte<const J: usize>(v: __m512i) -> __m512 {
        cpu!({
            let byte = match J {
                0 => _mm512_and_si512(v, _mm512_set1_epi32(255)),
                3 => _mm512_srli_epi32::<24>(v),
                _ => {
                    // Byte J of each element at the bottom, zeros above it.
                    let from = |element: i32| 0x8080_8000_u32.cast_signed() | (4 * element + J as i32);
                    _mm512_shuffle_epi8(v, _mm512_set4_epi32(from(3), from(2), from(1), from(0)))
                }
            };
            _mm512_cvtepi32_ps(byte)
        })
    }
    #[inline(always)]
    fn widen_bf16(v: __m512i) -> [__m512; 2] {
        cpu!({
            let high = _mm512_and_si512(v, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)), _mm512_castsi512_ps(high)]
        })
    }
    #[inline(always)]
    fn to_bf16(first: __m512, second: __m512) -> __m512i {
        cpu!(std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)))
    }
    #[inline(always)]
    fn transpose(v: [__m512; 16]) -> [__m512; 16] {
        // `fours[4 b + j]` holds, in its 128-bit quarter q, element 4 q + j of the vectors 4 b to 4 b + 3.
        let mut fours = v;
        let mut b = 0;
        while b < 16 {
            cpu!({
                let (low, high) = (_mm512_unpacklo_ps(v[b], v[b + 1]), _mm512_unpackhi_ps(v[b], v[b + 1]));
                let (low2, high2) =
                    (_mm512_unpacklo_ps(v[b + 2], v[b + 3]), _mm512_unpackhi_ps(v[b + 2], v[b + 3]));
                let pair = |lower: __m512, upper: __m512| {
                    let (lower, upper) = (_mm512_castps_pd(lower), _mm512_castps_pd(upper));
                    [_mm512_unpacklo_pd(lower, upper), _mm512_unpackhi_pd(lower, upper)]
                        .map(|v| _mm512_castpd_ps(v))
                };
                [fours[b], fours[b + 1]] = pair(low, low2);
                [fours[b + 2], fours[b + 3]] = pair(high, high2);
            });
            b += 4;
        }
        let mut out = v;
        let mut j = 0;
        while j < 4 {
            cpu!({
                let even = _mm512_shuffle_f32x4::<0x88>(fours[j], fours[4 + j]);
                let odd = _mm512_shuffle_f32x4::<0xdd>(fours[j], fours[4 + j]);
                let even2 = _mm512_shuffle_f32x4::<0x88>(fours[8 + j], fours[12 + j]);
                let odd2 = _mm512_shuffle_f32x4::<0xdd>(fours[8 + j], fours[12 + j]);
                out[j] = _mm512_shuffle_f32x4::<0x88>(even, even2);
                out[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd, odd2);
                out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even, even2);
                out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd, odd2);
            });
            j += 1;
        }
        out
    }
    #[inline(always)]
    fn dot_bytes(acc: __m512i, codes: __m512i, x: i32) -> __m512i {
        cpu!(_mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn dot_words(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        cpu!(_mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn dot_bf16(acc: __m512, w: __m512i, x: u32) -> __m512 {
        cpu!({
            let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(x.cast_signed()));
            _mm512_dpbf16_ps(acc, std::mem::transmute::<__m512i, __m512bh>(w), x)
        })
    }
}
