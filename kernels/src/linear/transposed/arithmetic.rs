//! How gradients meet the values of a tile: as numbers of 32 bits, or as pairs of bf16.

use super::WIDE;
use crate::{
    isa::Isa,
    linear::part::blocks,
    pool::Pool,
    simd::{Kernel, LANES, Simd},
};

/// How gradients meet values.
pub(super) trait Arithmetic {
    /// A gradient as it is multiplied.
    type Gradient: Copy + Sync;

    /// Stores sixteen inputs of each of sixteen outputs, the first of which is `o`, in a tile from input `k` on.
    ///
    /// # Safety
    ///
    /// They lie in the tile.
    unsafe fn put<S: Simd>(weights: *mut f32, o: usize, k: usize, outputs: [S::F; LANES]);

    /// Sums over `outputs` for `M` rows, `stride` apart, and `V` vectors of inputs, from zero.
    ///
    /// # Safety
    ///
    /// Rows and inputs exist.
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        weights: *const f32,
        g: *const Self::Gradient,
        stride: usize,
        outputs: usize,
    ) -> [[S::F; V]; M];
}

/// Numbers of 32 bits.
pub(super) struct Whole;

impl Arithmetic for Whole {
    type Gradient = f32;

    #[inline(always)]
    unsafe fn put<S: Simd>(weights: *mut f32, o: usize, k: usize, outputs: [S::F; LANES]) {
        for (i, &inputs) in outputs.iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { S::store(weights.add((o + i) * WIDE + k), inputs) };
        }
    }

    #[inline(always)]
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        weights: *const f32,
        g: *const f32,
        stride: usize,
        outputs: usize,
    ) -> [[S::F; V]; M] {
        let mut sums = [[S::splat(0.0); V]; M];
        for o in 0..outputs {
            // SAFETY: the caller's.
            unsafe {
                let w: [S::F; V] = std::array::from_fn(|v| S::load(weights.add(o * WIDE + v * LANES)));
                for (m, sums) in sums.iter_mut().enumerate() {
                    let g = S::splat(*g.add(m * stride + o));
                    for (&w, sum) in w.iter().zip(sums) {
                        *sum = S::fma(w, g, *sum);
                    }
                }
            }
        }
        sums
    }
}

/// Pairs of bf16: of two outputs.
pub(super) struct Pairs;

impl Arithmetic for Pairs {
    type Gradient = u16;

    #[inline(always)]
    unsafe fn put<S: Simd>(weights: *mut f32, o: usize, k: usize, outputs: [S::F; LANES]) {
        for (pair, &[low, high]) in outputs.as_chunks().0.iter().enumerate() {
            let mut halves = [[0_u16; LANES]; 2];
            // SAFETY: there is room for sixteen in each; the caller's.
            unsafe {
                S::store_bf16(halves[0].as_mut_ptr(), low);
                S::store_bf16(halves[1].as_mut_ptr(), high);
                let to = weights.add((o / 2 + pair) * WIDE + k).cast::<u32>();
                for (i, (&low, &high)) in halves[0].iter().zip(&halves[1]).enumerate() {
                    *to.add(i) = u32::from(low) | u32::from(high) << 16;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        weights: *const f32,
        g: *const u16,
        stride: usize,
        outputs: usize,
    ) -> [[S::F; V]; M] {
        let mut sums = [[S::splat(0.0); V]; M];
        for pair in 0..outputs.div_ceil(2) {
            // SAFETY: the caller's; of a last output without a second one nothing behind it is read.
            unsafe {
                let w: [S::B; V] =
                    std::array::from_fn(|v| S::load_bytes(weights.add(pair * WIDE + v * LANES).cast()));
                for (m, sums) in sums.iter_mut().enumerate() {
                    let g = g.add(m * stride + 2 * pair);
                    let g =
                        if 2 * pair + 1 < outputs { g.cast::<u32>().read_unaligned() } else { u32::from(*g) };
                    for (&w, sum) in w.iter().zip(sums) {
                        *sum = S::dot_bf16(*sum, w, g);
                    }
                }
            }
        }
        sums
    }
}

/// Rows of `stride` gradients, rounded.
pub(super) fn rounded(pool: &mut Pool, isa: Isa, g: &[f32], stride: usize) -> Vec<u16> {
    let mut rounded = vec![0; g.len()];
    let to = RoundedPtr(rounded.as_mut_ptr());
    pool.run(g.len() / stride.max(1), |row| {
        let to = &to;
        isa.dispatch(Round { g: &g[row * stride..][..stride], to: to.0.wrapping_add(row * stride) });
    });
    rounded
}

struct RoundedPtr(*mut u16);
// SAFETY: each row is one thread's alone, of a buffer that outlives the region.
unsafe impl Sync for RoundedPtr {}

/// Rounds a row.
struct Round<'a> {
    g: &'a [f32],
    to: *mut u16,
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for at in blocks(0..self.g.len(), LANES) {
            let mut sixteen = [0; LANES];
            // SAFETY: the numbers exist, and there is room for as many in the row.
            unsafe {
                S::store_bf16(sixteen.as_mut_ptr(), S::load_head(self.g.as_ptr().add(at.start), at.len()));
                std::ptr::copy_nonoverlapping(sixteen.as_ptr(), self.to.add(at.start), at.len());
            }
        }
    }
}
