//! Dot products with float panels.

use std::marker::PhantomData;

use super::{pack::PackedMatrix, tile::PanelDot};
use crate::{
    activations::Activations,
    element::Element,
    simd::{LANES, Simd},
};

/// Weights of 32 bits, or of 16 bits widened exactly; activations of 32 bits.
pub(super) struct FloatPanels<E>(PhantomData<E>);
/// Weights and activations of bf16, summed in 32 bits.
pub(super) struct Bf16;

impl<E: Element> PanelDot for FloatPanels<E> {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let width = x.width();
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller guarantees that panel and rows exist; `w.columns() == width`, and `E` is the element type
        // of the panels.
        unsafe {
            let weights = w.panel(panel).cast::<E>();
            let x = x.values().as_ptr().add(row * width);
            for k in 0..width {
                let w = E::load::<S>(weights.add(k * LANES));
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(w, S::splat(*x.add(m * width + k)), *sum);
                }
            }
        }
        sums
    }
}

impl PanelDot for Bf16 {
    #[inline(always)]
    unsafe fn dot<S: Simd, const M: usize>(
        w: &PackedMatrix,
        panel: usize,
        x: &Activations,
        row: usize,
    ) -> [S::F; M] {
        let pairs = x.pairs();
        let mut sums = [S::splat(0.0); M];
        // SAFETY: the caller guarantees that panel and rows exist, and that the bf16 form was prepared.
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
