//! Operations that kernels are written in: sixteen lanes, for any width of the CPU's registers.
//!
//! Methods are lane-wise unless stated otherwise. A multiply-add is fused where the set has the instruction.
//! One machine uses one set, so an element's bits do not depend on the shape of the kernel that computed it.

pub(crate) mod amx;
pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod digits;
mod flush;
pub(crate) mod portable;
mod wide;

pub(crate) use wide::Wide;

pub(crate) const LANES: usize = 16;

/// Integers that are cut into digits together.
pub(crate) const GROUP: usize = 32;

/// Prefetches the cache line at `at`, which need not exist.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and SSE is in the target's baseline.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
}

/// Copies `count` elements at any alignment.
///
/// # Safety
/// Both pointers are valid for `count` elements, which do not overlap.
#[inline(always)]
unsafe fn copy_head<T: Copy>(from: *const T, to: *mut T, count: usize) {
    // SAFETY: the caller guarantees the elements; bytes need no alignment.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), count * size_of::<T>()) };
}

/// Arithmetic written once for every instruction set; [`crate::Isa::dispatch`] runs it.
pub(crate) trait Kernel {
    type Output;

    /// Runs the kernel. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self) -> Self::Output;
}

/// Sixteen lanes of arithmetic.
///
/// # Safety
/// 1. Methods may only run where the implementation's instructions exist, which [`crate::Isa::dispatch`]
///    ensures.
/// 2. Pointers must be valid for the lanes that a method names; no alignment is needed.
pub(crate) trait Simd: Wide {
    /// Vector of 16 x f32.
    type F: Copy;

    /// Maximum rows of a tile whose sums fit the registers.
    const TILE: usize;

    /// Whether a matrix unit may be used with this set.
    const BESIDE_MATRIX_UNIT: bool = false;

    /// Runs `kernel` in a function of its own.
    fn call<K: Kernel>(kernel: K) -> K::Output;

    /// Cuts integers of `B` bytes into digits, the lowest digits of all integers first. Digits are signed
    /// bytes; each negative digit is balanced by a carry into the next.
    #[inline(always)]
    fn digits<const B: usize>(numbers: &[[u8; B]; GROUP]) -> [[u8; GROUP]; B] {
        digits::digits(numbers)
    }

    fn splat(x: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, v: Self::F);
    /// Loads the first `count` lanes; the others are 0 and their memory is not accessed.
    unsafe fn load_head(from: *const f32, count: usize) -> Self::F;
    unsafe fn store_head(to: *mut f32, v: Self::F, count: usize);
    /// Lane `i`: element `i / each` of the first `count`, 0 for those beyond; `each` is 1, 2, 4 or 8.
    unsafe fn load_repeated(from: *const f32, each: usize, count: usize) -> Self::F;
    unsafe fn load_f16(from: *const u16) -> Self::F;
    unsafe fn load_f16_head(from: *const u16, count: usize) -> Self::F;
    unsafe fn store_f16(to: *mut u16, v: Self::F);
    /// Rounds to the nearest bf16, ties to even; subnormal values may become 0.
    unsafe fn store_bf16(to: *mut u16, v: Self::F);

    fn add(a: Self::F, b: Self::F) -> Self::F;
    fn sub(a: Self::F, b: Self::F) -> Self::F;
    fn mul(a: Self::F, b: Self::F) -> Self::F;
    fn div(a: Self::F, b: Self::F) -> Self::F;
    fn max(a: Self::F, b: Self::F) -> Self::F;
    fn min(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b + c`, rounded once on every set; [`Simd::fma`] is faster without the instruction.
    #[inline(always)]
    fn fused(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        Self::fma(a, b, c)
    }
    /// `a * b + c` of bf16 values `a` and `b`, rounded once; denormals are taken and given as zero.
    fn fma_flushed(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Zeros of the same sign in place of denormals.
    fn flushed(v: Self::F) -> Self::F;
    fn abs(v: Self::F) -> Self::F;
    /// `v` in the lanes where `x` is at least `limit`, 0 in the rest.
    fn where_at_least(v: Self::F, x: Self::F, limit: Self::F) -> Self::F;
    /// Lanes below `count` of `v`, `other` in the rest.
    fn select_head(count: usize, v: Self::F, other: Self::F) -> Self::F;
    /// Bit `i`: whether lane `i` of `a` is greater than that of `b`.
    fn greater(a: Self::F, b: Self::F) -> u16;
    /// Sum of all lanes, pairwise, halving the vector each time.
    fn sum(v: Self::F) -> f32;
    fn max_lane(v: Self::F) -> f32;
    /// `v * 2^n` for integer `n` in the normal range; any number for other `n`.
    fn scale_by_power(v: Self::F, n: Self::F) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    fn round(v: Self::F) -> Self::F;

    fn splat_i32(x: i32) -> Self::I;
    unsafe fn load_i32(from: *const i32) -> Self::I;
    unsafe fn store_i32(to: *mut i32, v: Self::I);
    /// Adds lanes with wraparound.
    fn add_i32(a: Self::I, b: Self::I) -> Self::I;
    /// Multiplies lanes by 128 with wraparound.
    fn times_128(v: Self::I) -> Self::I;
    /// Rounds to the nearest integers, ties to even.
    fn to_i32(v: Self::F) -> Self::I;
    fn to_f32(v: Self::I) -> Self::F;
    /// Sum of all lanes; wraps.
    fn sum_i32(v: Self::I) -> i32;
    unsafe fn load_i8(from: *const i8) -> Self::F;
    /// Stores the lanes as i8; lanes must be in -127..=127.
    unsafe fn store_i8(to: *mut i8, v: Self::I);

    /// Stores the lanes as i16; lanes out of range become their low bits or the nearest i16.
    unsafe fn store_words(to: *mut i16, v: Self::I);
    /// Lane `i`: the low halves of `low` and `high`, in this order.
    unsafe fn store_word_pairs(to: *mut i16, low: Self::I, high: Self::I);

    unsafe fn load_bytes(from: *const u8) -> Self::B;
    unsafe fn store_bytes(to: *mut u8, v: Self::B);
    fn low_nibbles(v: Self::B) -> Self::B;
    fn high_nibbles(v: Self::B) -> Self::B;
    /// Byte `i`: `v[i]`, and the bits `MASK` of `upper[i]` shifted left by `LEFT`, or right by `-LEFT`. No
    /// bit of the mask may come from another byte.
    fn with_upper<const LEFT: i32, const MASK: u8>(v: Self::B, upper: Self::B) -> Self::B;
    /// Byte `i`: `table[v[i]]`; the bytes of `v` are below 16.
    fn look_up(table: &[u8; 16], v: Self::B) -> Self::B;
    /// Lane `i`: byte `4 i + J`, unsigned; `J` is 0 to 3.
    fn byte<const J: usize>(v: Self::B) -> Self::F;
    /// Lane `i`: bf16 `2 i`; lane `i` of the second: bf16 `2 i + 1`.
    fn widen_bf16(v: Self::B) -> [Self::F; 2];
    /// Rounds the lanes of `first` and then those of `second` to the nearest bf16, ties to even; subnormal
    /// values may become 0.
    fn to_bf16(first: Self::F, second: Self::F) -> Self::B;
    /// Lane `j` of vector `i` becomes lane `i` of vector `j`.
    fn transpose(v: [Self::F; LANES]) -> [Self::F; LANES];
    /// Lane `i`: `acc[i] + sum over j of codes[4i + j] * x[j]`, codes unsigned, `x` four signed bytes; exact.
    fn dot_bytes(acc: Self::I, codes: Self::B, x: i32) -> Self::I;
    /// Lane `i`: `acc[i] + w[2i] * x[0] + w[2i + 1] * x[1]` of pairs of i16; exact unless it overflows.
    fn dot_words(acc: Self::I, w: Self::B, x: i32) -> Self::I;
    /// Lane `i`: `acc[i] + w[2i + 1] * x[1] + w[2i] * x[0]` of bf16 pairs.
    fn dot_bf16(acc: Self::F, w: Self::B, x: u32) -> Self::F;

    /// Computes `e^v` to about 2 units in the last place, for `v` clamped to -87..=88.
    #[inline(always)]
    fn exp(v: Self::F) -> Self::F {
        exp_by::<Self>(v, Self::fma)
    }

    /// Computes [`Simd::exp`] with the same bits on every set.
    #[inline(always)]
    fn exp_fused(v: Self::F) -> Self::F {
        exp_by::<Self>(v, Self::fused)
    }
}

/// Computes `e^v` with the given multiply-add.
#[inline(always)]
fn exp_by<S: Simd>(v: S::F, fma: impl Fn(S::F, S::F, S::F) -> S::F) -> S::F {
    // e^v = 2^n * e^r with r in [-ln2/2, ln2/2]; ln2 is split so that n * ln2 is exact (Cephes).
    let v = S::min(S::max(v, S::splat(-87.0)), S::splat(88.0));
    let n = S::round(S::mul(v, S::splat(std::f32::consts::LOG2_E)));
    let r = fma(n, S::splat(-0.693_359_4), v);
    let r = fma(n, S::splat(2.121_944_4e-4), r);
    let mut p = S::splat(1.987_569_1e-4);
    p = fma(p, r, S::splat(1.398_199_9e-3));
    p = fma(p, r, S::splat(8.333_452e-3));
    p = fma(p, r, S::splat(4.166_579_6e-2));
    p = fma(p, r, S::splat(1.666_666_5e-1));
    p = fma(p, r, S::splat(5.000_000_3e-1));
    p = fma(p, S::mul(r, r), S::add(r, S::splat(1.0)));
    S::scale_by_power(p, n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    struct Exp([f32; LANES]);

    impl Kernel for Exp {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<S: Simd>(self) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            // SAFETY: the accesses cover whole vectors of arrays.
            unsafe { S::store(out.as_mut_ptr(), S::exp(S::load(self.0.as_ptr()))) };
            out
        }
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place_where_it_is_not_clamped() {
        for isa in Isa::available() {
            for step in 0..20_000 {
                let x: [f32; LANES] =
                    std::array::from_fn(|lane| -87.0 + (step * LANES + lane) as f32 * (175.0 / 320_000.0));
                for (x, got) in x.into_iter().zip(isa.dispatch(Exp(x))) {
                    let wanted = f64::from(x).exp();
                    let unit = f64::from((wanted as f32).next_up() - wanted as f32);
                    let off = (f64::from(got) - wanted).abs() / unit;
                    assert!(off <= 2.0, "{isa:?}: e^{x} is off by {off} units");
                }
            }
        }
    }

    #[test]
    fn exp_is_clamped_beyond_and_exactly_one_at_zero() {
        let x = [
            0.0,
            -0.0,
            -87.0,
            -88.0,
            -1e30,
            f32::NEG_INFINITY,
            88.0,
            89.0,
            1e30,
            f32::INFINITY,
            0.,
            0.,
            0.,
            0.,
            0.,
            0.,
        ];
        for isa in Isa::available() {
            let got = isa.dispatch(Exp(x));
            assert_eq!(got[..2], [1.0; 2], "{isa:?}");
            assert!(got[3..6].iter().all(|&y| y == got[2] && y > 0.0), "{isa:?}: {got:?}");
            assert!(got[7..10].iter().all(|&y| y == got[6] && y.is_finite()), "{isa:?}: {got:?}");
        }
    }

    struct LaneSums([f32; LANES], [i32; LANES]);

    impl Kernel for LaneSums {
        type Output = (f32, f32, i32);

        #[inline(always)]
        fn run<S: Simd>(self) -> (f32, f32, i32) {
            let whole = self.1.map(|x| x as f32);
            // SAFETY: the accesses cover whole vectors of arrays.
            let (v, whole) = unsafe { (S::load(self.0.as_ptr()), S::load(whole.as_ptr())) };
            (S::sum(v), S::max_lane(v), S::sum_i32(S::to_i32(whole)))
        }
    }

    #[test]
    fn sums_of_lanes_are_taken_in_one_order_on_every_set() {
        // The magnitudes differ so much that another order would round differently.
        let v: [f32; LANES] = std::array::from_fn(|i| (i as f32 + 0.1) * 10.0f32.powi(i as i32 % 5 - 2));
        let whole = std::array::from_fn(|i| i as i32 * 1000 - 7);
        for isa in Isa::available() {
            let portable = Isa::Portable.dispatch(LaneSums(v, whole));
            assert_eq!(isa.dispatch(LaneSums(v, whole)), portable, "{isa:?}");
            assert_eq!(portable.2, whole.iter().sum::<i32>());
        }
    }
}
