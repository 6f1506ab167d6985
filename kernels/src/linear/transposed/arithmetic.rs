//! Arithmetic between gradients and the values of a tile, with the 32-bit implementation.

use super::WIDE;
use crate::simd::{LANES, Simd};

#[derive(Clone, Copy)]
pub(super) struct TileOffset {
    pub(super) row: usize,
    /// Index of the tile among those of all parts.
    pub(super) tile: usize,
    /// Column in a row of the original gradients.
    pub(super) column: usize,
}

/// Rows of gradients, and their products with values.
pub(super) trait Gradients: Copy + Sync {
    fn rows(self) -> usize;

    /// Converts decoded values, `[outputs, WIDE]`, to the form that the products use.
    ///
    /// # Safety
    /// `weights` has room for a tile and holds `vectors` vectors of each of its outputs.
    unsafe fn pack<S: Simd>(weights: *mut f32, outputs: usize, vectors: usize);

    /// Sums over `outputs` for `M` rows and `V` vectors of inputs, from zero.
    ///
    /// # Safety
    /// Rows and inputs exist; `weights` are those of the outputs, converted by [`Gradients::pack`].
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        self,
        from: TileOffset,
        weights: *const f32,
        outputs: usize,
    ) -> [[S::F; V]; M];
}

/// Gradients of 32 bits, not rounded.
#[derive(Clone, Copy)]
pub(super) struct Floats<'a> {
    /// Gradients as rows, `[rows, stride]`.
    pub(super) g: &'a [f32],
    pub(super) rows: usize,
    pub(super) stride: usize,
}

impl Gradients for Floats<'_> {
    #[inline(always)]
    fn rows(self) -> usize {
        self.rows
    }

    #[inline(always)]
    unsafe fn pack<S: Simd>(_: *mut f32, _: usize, _: usize) {}

    #[inline(always)]
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        self,
        from: TileOffset,
        weights: *const f32,
        outputs: usize,
    ) -> [[S::F; V]; M] {
        let g = self.g.as_ptr().wrapping_add(from.row * self.stride + from.column);
        let mut sums = [[S::splat(0.0); V]; M];
        for o in 0..outputs {
            // SAFETY: the caller upholds this function's contract.
            unsafe {
                let w: [S::F; V] = std::array::from_fn(|v| S::load(weights.add(o * WIDE + v * LANES)));
                for (m, sums) in sums.iter_mut().enumerate() {
                    let g = S::splat(*g.add(m * self.stride + o));
                    for (&w, sum) in w.iter().zip(sums) {
                        *sum = S::fma(w, g, *sum);
                    }
                }
            }
        }
        sums
    }
}
