//! Sixteen lanes in two 256-bit registers.

#![allow(clippy::wildcard_imports, reason = "an instruction set is used whole")]

use std::arch::x86_64::*;

use super::{Kernel, Simd, copy_head, flush};

/// AVX2 with FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2;

/// Runs `kernel` in a function compiled for these instructions.
// Never inlined: a kernel of many shapes runs each through `Simd::call`, so that no function becomes huge.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// Wraps intrinsics that only require the CPU feature, and memory operations that the caller guarantees.
macro_rules! cpu {
    ($body:expr) => {
        // SAFETY: `Isa::dispatch` has checked the features; pointers are valid as the trait's methods require.
        unsafe { $body }
    };
}

mod transpose;
use self::transpose::transpose_eight;

type F = [__m256; 2];
type I = [__m256i; 2];
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Rounds the lanes to the nearest bf16, ties to even.
#[inline(always)]
fn round_to_bf16(v: F) -> __m256i {
    cpu!({
        let round = |v| {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            // A NaN must not become a number by a carry from its low bits.
            let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            _mm256_blendv_epi8(rounded, quiet, nan)
        };
        // The pack works within 128-bit halves; the permutation puts the lanes back in order.
        let words = _mm256_packus_epi32(round(v[0]), round(v[1]));
        _mm256_permute4x64_epi64::<0b11_01_10_00>(words)
    })
}

impl Simd for Avx2 {
    type F = F;

    const TILE: usize = 4;

    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        cpu!(run(kernel))
    }

    #[inline(always)]
    fn splat(x: f32) -> F {
        cpu!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> F {
        cpu!([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))])
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: F) {
        cpu!({
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(8), v[1]);
        });
    }
    #[inline(always)]
    unsafe fn load_head(from: *const f32, count: usize) -> F {
        let mut lanes = [0.0f32; 16];
        cpu!({
            copy_head(from, lanes.as_mut_ptr(), count);
            Self::load(lanes.as_ptr())
        })
    }
    #[inline(always)]
    unsafe fn store_head(to: *mut f32, v: F, count: usize) {
        let mut lanes = [0.0f32; 16];
        cpu!({
            Self::store(lanes.as_mut_ptr(), v);
            copy_head(lanes.as_ptr(), to, count);
        });
    }
    #[inline(always)]
    unsafe fn load_repeated(from: *const f32, each: usize, count: usize) -> F {
        cpu!({
            if each == 1 {
                return Self::load_head(from, count);
            }
            let shift = _mm_cvtsi32_si128(each.trailing_zeros().cast_signed());
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
            let exists = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), low);
            let elements = _mm256_maskload_ps(from, exists);
            [low, high].map(|lanes| _mm256_permutevar8x32_ps(elements, _mm256_srl_epi32(lanes, shift)))
        })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> F {
        cpu!([
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast()))
        ])
    }
    #[inline(always)]
    unsafe fn load_f16_head(from: *const u16, count: usize) -> F {
        let mut lanes = [0u16; 16];
        cpu!({
            copy_head(from, lanes.as_mut_ptr(), count);
            Self::load_f16(lanes.as_ptr())
        })
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, v: F) {
        cpu!({
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        });
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: F) {
        cpu!(_mm256_storeu_si256(to.cast(), round_to_bf16(v)));
    }

    #[inline(always)]
    fn add(a: F, b: F) -> F {
        cpu!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(a: F, b: F) -> F {
        cpu!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(a: F, b: F) -> F {
        cpu!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(a: F, b: F) -> F {
        cpu!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn max(a: F, b: F) -> F {
        cpu!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(a: F, b: F) -> F {
        cpu!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn fma(a: F, b: F, c: F) -> F {
        cpu!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn fma_flushed(a: F, b: F, c: F) -> F {
        let (mut x, mut y, mut z) = ([0.0f32; 16], [0.0f32; 16], [0.0f32; 16]);
        cpu!({
            Self::store(x.as_mut_ptr(), a);
            Self::store(y.as_mut_ptr(), b);
            Self::store(z.as_mut_ptr(), c);
            let mut i = 0;
            while i < 16 {
                z[i] = flush::fma_flushed(x[i], y[i], z[i]);
                i += 1;
            }
            Self::load(z.as_ptr())
        })
    }
    #[inline(always)]
    fn flushed(v: F) -> F {
        cpu!({
            let sign = _mm256_set1_ps(-0.0);
            let flushed = |v| {
                let magnitude = _mm256_andnot_ps(sign, v);
                let is_small = _mm256_cmp_ps::<_CMP_LT_OQ>(magnitude, _mm256_set1_ps(f32::MIN_POSITIVE));
                _mm256_blendv_ps(v, _mm256_and_ps(v, sign), is_small)
            };
            [flushed(v[0]), flushed(v[1])]
        })
    }
    #[inline(always)]
    fn abs(v: F) -> F {
        cpu!({
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, v[0]), _mm256_andnot_ps(sign, v[1])]
        })
    }
    #[inline(always)]
    fn where_at_least(v: F, x: F, limit: F) -> F {
        cpu!([0, 1].map(|i| _mm256_and_ps(v[i], _mm256_cmp_ps::<_CMP_GE_OQ>(x[i], limit[i]))))
    }
    #[inline(always)]
    fn select_head(count: usize, v: F, other: F) -> F {
        let mut lanes = [0.0f32; 16];
        cpu!({
            Self::store(lanes.as_mut_ptr(), other);
            Self::store_head(lanes.as_mut_ptr(), v, count);
            Self::load(lanes.as_ptr())
        })
    }
    #[inline(always)]
    fn greater(a: F, b: F) -> u16 {
        let half = |i: usize| cpu!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a[i], b[i])));
        (half(0) | half(1) << 8) as u16
    }
    #[inline(always)]
    fn sum(v: F) -> f32 {
        cpu!({
            let eight = _mm256_add_ps(v[0], v[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn max_lane(v: F) -> f32 {
        let mut lanes = [0.0f32; 16];
        cpu!(Self::store(lanes.as_mut_ptr(), v));
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn scale_by_power(v: F, n: F) -> F {
        cpu!({
            let bias = _mm256_set1_epi32(127);
            let power = |n| {
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), bias)))
            };
            [_mm256_mul_ps(v[0], power(n[0])), _mm256_mul_ps(v[1], power(n[1]))]
        })
    }
    #[inline(always)]
    fn round(v: F) -> F {
        cpu!([_mm256_round_ps::<NEAREST>(v[0]), _mm256_round_ps::<NEAREST>(v[1])])
    }

    #[inline(always)]
    fn splat_i32(x: i32) -> I {
        cpu!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const i32) -> I {
        cpu!([_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())])
    }
    #[inline(always)]
    unsafe fn store_i32(to: *mut i32, v: I) {
        cpu!({
            _mm256_storeu_si256(to.cast(), v[0]);
            _mm256_storeu_si256(to.add(8).cast(), v[1]);
        });
    }
    #[inline(always)]
    fn add_i32(a: I, b: I) -> I {
        cpu!([_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])])
    }
    #[inline(always)]
    fn times_128(v: I) -> I {
        cpu!([_mm256_slli_epi32::<7>(v[0]), _mm256_slli_epi32::<7>(v[1])])
    }
    #[inline(always)]
    fn to_i32(v: F) -> I {
        cpu!([_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1])])
    }
    #[inline(always)]
    fn to_f32(v: I) -> F {
        cpu!([_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])])
    }
    #[inline(always)]
    fn sum_i32(v: I) -> i32 {
        let mut lanes = [0i32; 8];
        cpu!(_mm256_storeu_si256(lanes.as_mut_ptr().cast(), _mm256_add_epi32(v[0], v[1])));
        lanes.into_iter().fold(0, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> F {
        cpu!([0, 8].map(|at| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(at).cast())))))
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: I) {
        cpu!({
            // The packs work within 128-bit halves; the permutation puts the lanes back in order.
            let words = _mm256_packs_epi32(v[0], v[1]);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), bytes);
        });
    }

    #[inline(always)]
    unsafe fn store_words(to: *mut i16, v: I) {
        cpu!({
            // The pack works within 128-bit halves; the permutation puts the lanes back in order.
            let words = _mm256_packs_epi32(v[0], v[1]);
            _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(words));
        });
    }
    #[inline(always)]
    unsafe fn store_word_pairs(to: *mut i16, low: I, high: I) {
        cpu!({
            let pairs = |low, high| {
                let low = _mm256_and_si256(low, _mm256_set1_epi32(0xffff));
                _mm256_or_si256(low, _mm256_slli_epi32::<16>(high))
            };
            _mm256_storeu_si256(to.cast(), pairs(low[0], high[0]));
            _mm256_storeu_si256(to.add(16).cast(), pairs(low[1], high[1]));
        });
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> I {
        cpu!([_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())])
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, v: I) {
        cpu!({
            _mm256_storeu_si256(to.cast(), v[0]);
            _mm256_storeu_si256(to.add(32).cast(), v[1]);
        });
    }
    #[inline(always)]
    fn low_nibbles(v: I) -> I {
        cpu!({
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(v[0], mask), _mm256_and_si256(v[1], mask)]
        })
    }
    #[inline(always)]
    fn high_nibbles(v: I) -> I {
        cpu!({
            let mask = _mm256_set1_epi8(15);
            [
                _mm256_and_si256(_mm256_srli_epi16::<4>(v[0]), mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(v[1]), mask),
            ]
        })
    }
    #[inline(always)]
    fn with_upper<const LEFT: i32, const MASK: u8>(v: I, upper: I) -> I {
        cpu!({
            let (mask, count) = (
                _mm256_set1_epi8(MASK.cast_signed()),
                _mm_cvtsi32_si128(if LEFT < 0 { -LEFT } else { LEFT }),
            );
            let mut all = v;
            let mut half = 0;
            while half < 2 {
                let shifted = if LEFT < 0 {
                    _mm256_srl_epi16(upper[half], count)
                } else {
                    _mm256_sll_epi16(upper[half], count)
                };
                all[half] = _mm256_or_si256(v[half], _mm256_and_si256(shifted, mask));
                half += 1;
            }
            all
        })
    }
    #[inline(always)]
    fn look_up(table: &[u8; 16], v: I) -> I {
        cpu!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, v[0]), _mm256_shuffle_epi8(table, v[1])]
        })
    }
    #[inline(always)]
    fn byte<const J: usize>(v: I) -> F {
        cpu!({
            let byte = |v| match J {
                0 => _mm256_and_si256(v, _mm256_set1_epi32(255)),
                3 => _mm256_srli_epi32::<24>(v),
                _ => {
                    // Byte J of each element at the bottom, zeros above it.
                    let from = |element: i32| 0x8080_8000_u32.cast_signed() | (4 * element + J as i32);
                    let from = _mm_setr_epi32(from(0), from(1), from(2), from(3));
                    _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(from))
                }
            };
            [_mm256_cvtepi32_ps(byte(v[0])), _mm256_cvtepi32_ps(byte(v[1]))]
        })
    }
    #[inline(always)]
    fn widen_bf16(v: I) -> [F; 2] {
        cpu!({
            let mask = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            let low = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v));
            let high = |v| _mm256_castsi256_ps(_mm256_and_si256(v, mask));
            [[low(v[0]), low(v[1])], [high(v[0]), high(v[1])]]
        })
    }
    #[inline(always)]
    fn to_bf16(first: F, second: F) -> I {
        [round_to_bf16(first), round_to_bf16(second)]
    }
    #[inline(always)]
    fn transpose(v: [F; 16]) -> [F; 16] {
        let mut out = v;
        let mut block = 0;
        while block < 4 {
            let (row, column) = (block / 2, block % 2);
            let mut square = [v[8 * row][column]; 8];
            let mut i = 0;
            while i < 8 {
                square[i] = v[8 * row + i][column];
                i += 1;
            }
            let square = transpose_eight(square);
            let mut i = 0;
            while i < 8 {
                out[8 * column + i][row] = square[i];
                i += 1;
            }
            block += 1;
        }
        out
    }
    #[inline(always)]
    fn dot_bytes(acc: I, codes: I, x: i32) -> I {
        // `vpmaddubsw` would saturate for codes above 128, so even and odd bytes use 16-bit products.
        let [x0, x1, x2, x3] = x.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
        let even = (x0 & 0xffff) | (x2 << 16);
        let odd = (x1 & 0xffff) | (x3 << 16);
        cpu!({
            let (even, odd) = (_mm256_set1_epi32(even), _mm256_set1_epi32(odd));
            let mask = _mm256_set1_epi16(0xff);
            let add = |acc, codes| {
                let low = _mm256_madd_epi16(_mm256_and_si256(codes, mask), even);
                let high = _mm256_madd_epi16(_mm256_srli_epi16::<8>(codes), odd);
                _mm256_add_epi32(acc, _mm256_add_epi32(low, high))
            };
            [add(acc[0], codes[0]), add(acc[1], codes[1])]
        })
    }
    #[inline(always)]
    fn dot_words(acc: I, w: I, x: i32) -> I {
        cpu!({
            let x = _mm256_set1_epi32(x);
            [0, 1].map(|half| _mm256_add_epi32(acc[half], _mm256_madd_epi16(w[half], x)))
        })
    }
    #[inline(always)]
    fn dot_bf16(acc: F, w: I, x: u32) -> F {
        let (low, high) = (f32::from_bits(x << 16), f32::from_bits(x & 0xffff_0000));
        cpu!({
            let (low, high) = (_mm256_set1_ps(low), _mm256_set1_ps(high));
            let mask = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            let add = |acc, w| {
                let w_high = _mm256_castsi256_ps(_mm256_and_si256(w, mask));
                let w_low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w));
                _mm256_fmadd_ps(w_low, low, _mm256_fmadd_ps(w_high, high, acc))
            };
            [add(acc[0], w[0]), add(acc[1], w[1])]
        })
    }
}
