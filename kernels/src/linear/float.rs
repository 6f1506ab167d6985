//! Dot products with float panels.

use super::{PackedMatrix, Tile};
use crate::{
    activations::Activations,
    simd::{LANES, Simd},
};

/// Weights of 32 bits, activations of 32 bits.
pub(super) struct F32;
/// Weights of 16 bits, widened exactly; activations of 32 bits.
pub(super) struct F16;
/// Weights and activations of bf16, summed in 32 bits.
pub(super) struct Bf16;

impl Tile for F32 {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let width = x.width();
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller's: panel and rows exist; `w.columns() == width`.
        unsafe {
            let weights = w.panel(panel).cast::<f32>();
            let x = x.values().as_ptr().add(row * width);
            for k in 0..width {
                let w = S::load(weights.add(k * LANES));
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(w, S::splat(*x.add(m * width + k)), *sum);
                }
            }
        }
        sums
    }
}

impl Tile for F16 {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let width = x.width();
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller's: panel and rows exist; `w.columns() == width`.
        unsafe {
            let weights = w.panel(panel).cast::<u16>();
            let x = x.values().as_ptr().add(row * width);
            for k in 0..width {
                let w = S::load_f16(weights.add(k * LANES));
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(w, S::splat(*x.add(m * width + k)), *sum);
                }
            }
        }
        sums
    }
}

impl Tile for Bf16 {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let pairs = x.pairs();
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller's: panel and rows exist, and the bf16 form was prepared.
        unsafe {
            let weights = w.panel(panel);
            let x = x.bf16.as_ptr().add(row * pairs);
            for k in 0..pairs {
                let w = S::load_bytes(weights.add(k * 64));
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = S::dot_bf16(*sum, w, *x.add(m * pairs + k));
                }
            }
        }
        sums
    }
}
