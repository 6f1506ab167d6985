//! Integers: 32-bit lanes, and their products and sums modulo 2^64.
//!
//! The trait is separate from [`Simd`](super::Simd), its subtrait, because each set has its own order of
//! 64-bit sums: even and odd lanes are separate, as the multiplications return them.

#![allow(clippy::wildcard_imports, reason = "an instruction set is used whole")]

use std::arch::x86_64::*;

use super::{avx2::Avx2, avx512::Avx512, portable::Portable};

/// Sixteen lanes of integers.
///
/// # Safety
/// The conditions of [`Simd`](super::Simd) hold.
pub(crate) trait Wide: Copy {
    /// Vector of 16 x i32.
    type I: Copy;
    /// 64 x u8, or 32 x i16 or bf16.
    type B: Copy;
    /// 16 x u64, all operations modulo 2^64.
    type W: Copy;

    fn zero_wide() -> Self::W;
    /// `acc + a * b`, of signed integers.
    fn add_product(acc: Self::W, a: Self::I, b: Self::I) -> Self::W;
    /// `acc + v * 2^BITS`.
    fn add_shifted<const BITS: u32>(acc: Self::W, v: Self::W) -> Self::W;
    unsafe fn store_wide(to: *mut u64, v: Self::W);
    /// Sum of all lanes.
    fn sum_wide(v: Self::W) -> u64;
    /// `acc + v * 2^32`.
    fn add_high(acc: Self::W, v: Self::I) -> Self::W;
    /// `v * 2^BITS` modulo 2^32.
    fn shifted<const BITS: u32>(v: Self::I) -> Self::I;
    /// `a * b` modulo 2^32.
    fn mul_i32(a: Self::I, b: Self::I) -> Self::I;
}

/// Wraps intrinsics that only require the CPU feature, and memory operations that the caller guarantees.
macro_rules! cpu {
    ($body:expr) => {
        // SAFETY: `Isa::dispatch` has checked the features; pointers are valid as the trait's methods require.
        unsafe { $body }
    };
}

impl Wide for Avx512 {
    type I = __m512i;
    type B = __m512i;
    /// Even lanes, then odd ones.
    type W = [__m512i; 2];

    #[inline(always)]
    fn zero_wide() -> Self::W {
        cpu!([_mm512_setzero_si512(); 2])
    }
    #[inline(always)]
    fn add_product(acc: Self::W, a: __m512i, b: __m512i) -> Self::W {
        cpu!({
            let (odd_a, odd_b) = (_mm512_srli_epi64::<32>(a), _mm512_srli_epi64::<32>(b));
            [
                _mm512_add_epi64(acc[0], _mm512_mul_epi32(a, b)),
                _mm512_add_epi64(acc[1], _mm512_mul_epi32(odd_a, odd_b)),
            ]
        })
    }
    #[inline(always)]
    fn add_shifted<const BITS: u32>(acc: Self::W, v: Self::W) -> Self::W {
        cpu!([
            _mm512_add_epi64(acc[0], _mm512_slli_epi64::<BITS>(v[0])),
            _mm512_add_epi64(acc[1], _mm512_slli_epi64::<BITS>(v[1])),
        ])
    }
    #[inline(always)]
    unsafe fn store_wide(to: *mut u64, v: Self::W) {
        cpu!({
            let first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
            let second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
            _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi64(v[0], first, v[1]));
            _mm512_storeu_si512(to.add(8).cast(), _mm512_permutex2var_epi64(v[0], second, v[1]));
        });
    }
    #[inline(always)]
    fn sum_wide(v: Self::W) -> u64 {
        cpu!(_mm512_reduce_add_epi64(_mm512_add_epi64(v[0], v[1])).cast_unsigned())
    }
    #[inline(always)]
    fn add_high(acc: Self::W, v: __m512i) -> Self::W {
        cpu!([
            _mm512_add_epi64(acc[0], _mm512_slli_epi64::<32>(v)),
            _mm512_add_epi64(acc[1], _mm512_slli_epi64::<32>(_mm512_srli_epi64::<32>(v))),
        ])
    }
    #[inline(always)]
    fn shifted<const BITS: u32>(v: __m512i) -> __m512i {
        cpu!(_mm512_slli_epi32::<BITS>(v))
    }
    #[inline(always)]
    fn mul_i32(a: __m512i, b: __m512i) -> __m512i {
        cpu!(_mm512_mullo_epi32(a, b))
    }
}

impl Wide for Avx2 {
    type I = [__m256i; 2];
    type B = [__m256i; 2];
    /// Even and odd lanes of the first eight, then of the second.
    type W = [__m256i; 4];

    #[inline(always)]
    fn zero_wide() -> Self::W {
        cpu!([_mm256_setzero_si256(); 4])
    }
    #[inline(always)]
    fn add_product(acc: Self::W, a: Self::I, b: Self::I) -> Self::W {
        cpu!({
            let odd = |v| _mm256_srli_epi64::<32>(v);
            [
                _mm256_add_epi64(acc[0], _mm256_mul_epi32(a[0], b[0])),
                _mm256_add_epi64(acc[1], _mm256_mul_epi32(odd(a[0]), odd(b[0]))),
                _mm256_add_epi64(acc[2], _mm256_mul_epi32(a[1], b[1])),
                _mm256_add_epi64(acc[3], _mm256_mul_epi32(odd(a[1]), odd(b[1]))),
            ]
        })
    }
    #[inline(always)]
    fn add_shifted<const BITS: u32>(acc: Self::W, v: Self::W) -> Self::W {
        cpu!({
            let count = _mm_cvtsi32_si128(BITS.cast_signed());
            let add = |acc, v| _mm256_add_epi64(acc, _mm256_sll_epi64(v, count));
            [add(acc[0], v[0]), add(acc[1], v[1]), add(acc[2], v[2]), add(acc[3], v[3])]
        })
    }
    #[inline(always)]
    unsafe fn store_wide(to: *mut u64, v: Self::W) {
        cpu!({
            let store = |to: *mut u64, even, odd| {
                let (low, high) = (_mm256_unpacklo_epi64(even, odd), _mm256_unpackhi_epi64(even, odd));
                _mm256_storeu_si256(to.cast(), _mm256_permute2x128_si256::<0x20>(low, high));
                _mm256_storeu_si256(to.add(4).cast(), _mm256_permute2x128_si256::<0x31>(low, high));
            };
            store(to, v[0], v[1]);
            store(to.add(8), v[2], v[3]);
        });
    }
    #[inline(always)]
    fn sum_wide(v: Self::W) -> u64 {
        let mut lanes = [0u64; 4];
        cpu!({
            let sum = _mm256_add_epi64(_mm256_add_epi64(v[0], v[1]), _mm256_add_epi64(v[2], v[3]));
            _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum);
        });
        lanes[0].wrapping_add(lanes[1]).wrapping_add(lanes[2].wrapping_add(lanes[3]))
    }
    #[inline(always)]
    fn add_high(acc: Self::W, v: Self::I) -> Self::W {
        cpu!({
            let even = |acc, v| _mm256_add_epi64(acc, _mm256_slli_epi64::<32>(v));
            let odd = |acc, v| even(acc, _mm256_srli_epi64::<32>(v));
            [even(acc[0], v[0]), odd(acc[1], v[0]), even(acc[2], v[1]), odd(acc[3], v[1])]
        })
    }
    #[inline(always)]
    fn shifted<const BITS: u32>(v: Self::I) -> Self::I {
        cpu!({
            let count = _mm_cvtsi32_si128(BITS.cast_signed());
            [_mm256_sll_epi32(v[0], count), _mm256_sll_epi32(v[1], count)]
        })
    }
    #[inline(always)]
    fn mul_i32(a: Self::I, b: Self::I) -> Self::I {
        cpu!([_mm256_mullo_epi32(a[0], b[0]), _mm256_mullo_epi32(a[1], b[1])])
    }
}

impl Wide for Portable {
    type I = [i32; 16];
    type B = [u8; 64];
    type W = [u64; 16];

    #[inline(always)]
    fn zero_wide() -> Self::W {
        [0; 16]
    }
    #[inline(always)]
    fn add_product(mut acc: Self::W, a: Self::I, b: Self::I) -> Self::W {
        for (acc, (a, b)) in acc.iter_mut().zip(a.into_iter().zip(b)) {
            *acc = acc.wrapping_add((i64::from(a) * i64::from(b)).cast_unsigned());
        }
        acc
    }
    #[inline(always)]
    fn add_shifted<const BITS: u32>(mut acc: Self::W, v: Self::W) -> Self::W {
        for (acc, v) in acc.iter_mut().zip(v) {
            *acc = acc.wrapping_add(v << BITS);
        }
        acc
    }
    #[inline(always)]
    unsafe fn store_wide(to: *mut u64, v: Self::W) {
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { to.cast::<[u64; 16]>().write_unaligned(v) };
    }
    #[inline(always)]
    fn sum_wide(v: Self::W) -> u64 {
        v.into_iter().fold(0, u64::wrapping_add)
    }
    #[inline(always)]
    fn add_high(mut acc: Self::W, v: Self::I) -> Self::W {
        for (acc, v) in acc.iter_mut().zip(v) {
            *acc = acc.wrapping_add(u64::from(v.cast_unsigned()) << 32);
        }
        acc
    }
    #[inline(always)]
    fn shifted<const BITS: u32>(v: Self::I) -> Self::I {
        v.map(|x| x << BITS)
    }
    #[inline(always)]
    fn mul_i32(a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i].wrapping_mul(b[i]))
    }
}
