//! Sixteen lanes as plain arrays, which the compiler turns into baseline instructions of the target.

use half::{bf16, f16};

use super::{Kernel, Simd, copy_head, flush};

/// Baseline instructions of the target only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

/// Runs `kernel` in a function compiled for these instructions.
// Never inlined: a kernel of many shapes runs each through `Simd::call`, so that no function becomes huge.
#[inline(never)]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Portable>()
}

type F = [f32; 16];
type I = [i32; 16];
type B = [u8; 64];

macro_rules! lanes {
    ($i:ident => $body:expr) => {{
        let mut out = [Default::default(); 16];
        let mut $i = 0;
        while $i < 16 {
            out[$i] = $body;
            $i += 1;
        }
        out
    }};
}

impl Simd for Portable {
    type F = F;

    const TILE: usize = 1;

    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        run(kernel)
    }

    #[inline(always)]
    fn splat(x: f32) -> F {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> F {
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { from.cast::<F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: F) {
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { to.cast::<F>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_head(from: *const f32, count: usize) -> F {
        let mut lanes = [0.0; 16];
        // SAFETY: the caller guarantees `count` valid elements, at most 16.
        unsafe { copy_head(from, lanes.as_mut_ptr(), count) };
        lanes
    }
    #[inline(always)]
    unsafe fn store_head(to: *mut f32, v: F, count: usize) {
        // SAFETY: the caller guarantees `count` valid elements, at most 16.
        unsafe { copy_head(v.as_ptr(), to, count) }
    }
    #[inline(always)]
    unsafe fn load_repeated(from: *const f32, each: usize, count: usize) -> F {
        // SAFETY: the caller guarantees `count` valid elements.
        lanes!(i => if i / each < count { unsafe { from.add(i / each).read_unaligned() } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> F {
        // SAFETY: the caller guarantees 16 valid elements.
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        lanes!(i => f16::from_bits(bits[i]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_f16_head(from: *const u16, count: usize) -> F {
        let mut bits = [0u16; 16];
        // SAFETY: the caller guarantees `count` valid elements, at most 16.
        unsafe { copy_head(from, bits.as_mut_ptr(), count) };
        lanes!(i => f16::from_bits(bits[i]).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, v: F) {
        let bits: [u16; 16] = lanes!(i => f16::from_f32(v[i]).to_bits());
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { to.cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: F) {
        let bits: [u16; 16] = lanes!(i => bf16::from_f32(v[i]).to_bits());
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { to.cast::<[u16; 16]>().write_unaligned(bits) }
    }

    #[inline(always)]
    fn add(a: F, b: F) -> F {
        lanes!(i => a[i] + b[i])
    }
    #[inline(always)]
    fn sub(a: F, b: F) -> F {
        lanes!(i => a[i] - b[i])
    }
    #[inline(always)]
    fn mul(a: F, b: F) -> F {
        lanes!(i => a[i] * b[i])
    }
    #[inline(always)]
    fn div(a: F, b: F) -> F {
        lanes!(i => a[i] / b[i])
    }
    #[inline(always)]
    fn max(a: F, b: F) -> F {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(a: F, b: F) -> F {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn fma(a: F, b: F, c: F) -> F {
        // Not `mul_add`: without the instruction it is a library call for each lane.
        lanes!(i => a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn fused(a: F, b: F, c: F) -> F {
        lanes!(i => a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn fma_flushed(a: F, b: F, c: F) -> F {
        lanes!(i => flush::fma_flushed(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn flushed(v: F) -> F {
        lanes!(i => flush::flushed(v[i]))
    }
    #[inline(always)]
    fn abs(v: F) -> F {
        lanes!(i => v[i].abs())
    }
    #[inline(always)]
    fn where_at_least(v: F, x: F, limit: F) -> F {
        lanes!(i => if x[i] >= limit[i] { v[i] } else { 0.0 })
    }
    #[inline(always)]
    fn select_head(count: usize, v: F, other: F) -> F {
        lanes!(i => if i < count { v[i] } else { other[i] })
    }
    #[inline(always)]
    fn greater(a: F, b: F) -> u16 {
        let mut bits = 0;
        for i in 0..16 {
            bits |= u16::from(a[i] > b[i]) << i;
        }
        bits
    }
    #[inline(always)]
    fn sum(v: F) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
        let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    fn max_lane(v: F) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn scale_by_power(v: F, n: F) -> F {
        lanes!(i => v[i] * f32::from_bits(((n[i] as i32).wrapping_add(127) << 23).cast_unsigned()))
    }
    #[inline(always)]
    fn round(v: F) -> F {
        lanes!(i => v[i].round_ties_even())
    }

    #[inline(always)]
    fn splat_i32(x: i32) -> I {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const i32) -> I {
        // SAFETY: the caller upholds this function's contract.
        unsafe { from.cast::<I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_i32(to: *mut i32, v: I) {
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { to.cast::<I>().write_unaligned(v) }
    }
    #[inline(always)]
    fn add_i32(a: I, b: I) -> I {
        lanes!(i => a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn times_128(v: I) -> I {
        lanes!(i => v[i].wrapping_mul(128))
    }
    #[inline(always)]
    fn to_i32(v: F) -> I {
        lanes!(i => v[i].round_ties_even() as i32)
    }
    #[inline(always)]
    fn to_f32(v: I) -> F {
        lanes!(i => v[i] as f32)
    }
    #[inline(always)]
    fn sum_i32(v: I) -> i32 {
        v.into_iter().fold(0, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> F {
        // SAFETY: the caller guarantees 16 valid elements.
        let bytes = unsafe { from.cast::<[i8; 16]>().read_unaligned() };
        lanes!(i => f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: I) {
        let bytes: [i8; 16] = lanes!(i => v[i].clamp(-128, 127) as i8);
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { to.cast::<[i8; 16]>().write_unaligned(bytes) }
    }

    #[inline(always)]
    unsafe fn store_words(to: *mut i16, v: I) {
        let words: [i16; 16] = lanes!(i => v[i] as i16);
        // SAFETY: the caller guarantees 16 valid elements.
        unsafe { to.cast::<[i16; 16]>().write_unaligned(words) }
    }
    #[inline(always)]
    unsafe fn store_word_pairs(to: *mut i16, low: I, high: I) {
        let pairs: I = lanes!(i => (low[i] & 0xffff) | (high[i] << 16));
        // SAFETY: the caller guarantees 32 valid elements.
        unsafe { to.cast::<I>().write_unaligned(pairs) }
    }

    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, v: B) {
        // SAFETY: the caller upholds this function's contract.
        unsafe { to.cast::<B>().write_unaligned(v) };
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> B {
        // SAFETY: the caller guarantees 64 valid bytes.
        unsafe { from.cast::<B>().read_unaligned() }
    }
    #[inline(always)]
    fn low_nibbles(v: B) -> B {
        v.map(|byte| byte & 15)
    }
    #[inline(always)]
    fn high_nibbles(v: B) -> B {
        v.map(|byte| byte >> 4)
    }
    #[inline(always)]
    fn with_upper<const LEFT: i32, const MASK: u8>(v: B, upper: B) -> B {
        let shifted =
            |byte: u8| if LEFT < 0 { byte >> LEFT.unsigned_abs() } else { byte << LEFT.unsigned_abs() };
        std::array::from_fn(|i| v[i] | shifted(upper[i]) & MASK)
    }
    #[inline(always)]
    fn look_up(table: &[u8; 16], v: B) -> B {
        v.map(|byte| table[usize::from(byte & 15)])
    }
    #[inline(always)]
    fn byte<const J: usize>(v: B) -> F {
        lanes!(i => f32::from(v[4 * i + J]))
    }
    #[inline(always)]
    fn widen_bf16(v: B) -> [F; 2] {
        let widen = |at: usize| f32::from_bits(u32::from_le_bytes([0, 0, v[at], v[at + 1]]));
        [lanes!(i => widen(4 * i)), lanes!(i => widen(4 * i + 2))]
    }
    #[inline(always)]
    fn to_bf16(first: F, second: F) -> B {
        let half = |at: usize| if at < 16 { first[at] } else { second[at - 16] };
        std::array::from_fn(|i| bf16::from_f32(half(i / 2)).to_le_bytes()[i % 2])
    }
    #[inline(always)]
    fn transpose(v: [F; 16]) -> [F; 16] {
        lanes!(j => lanes!(i => v[i][j]))
    }
    #[inline(always)]
    fn dot_bytes(acc: I, codes: B, x: i32) -> I {
        let x = x.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
        // The products fit; the sum wraps like the instructions' sum where activations were not finite.
        lanes!(i => acc[i].wrapping_add(
            (i32::from(codes[4 * i]) * x[0] + i32::from(codes[4 * i + 1]) * x[1])
                + (i32::from(codes[4 * i + 2]) * x[2] + i32::from(codes[4 * i + 3]) * x[3])
        ))
    }
    #[inline(always)]
    fn dot_words(acc: I, w: B, x: i32) -> I {
        let word = |at: usize| i32::from(i16::from_le_bytes([w[at], w[at + 1]]));
        let (low, high) = (x as i16 as i32, x >> 16);
        lanes!(i => acc[i].wrapping_add((word(4 * i) * low).wrapping_add(word(4 * i + 2) * high)))
    }
    #[inline(always)]
    fn dot_bf16(acc: F, w: B, x: u32) -> F {
        let (low, high) = (f32::from_bits(x << 16), f32::from_bits(x & 0xffff_0000));
        lanes!(i => {
            let w_low = f32::from_bits(u32::from_le_bytes([0, 0, w[4 * i], w[4 * i + 1]]));
            let w_high = f32::from_bits(u32::from_le_bytes([0, 0, w[4 * i + 2], w[4 * i + 3]]));
            w_low * low + (w_high * high + acc[i])
        })
    }
}
