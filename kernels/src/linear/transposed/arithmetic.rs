//! How gradients meet the values of a tile. Here: as numbers of 32 bits.

use super::WIDE;
use crate::simd::{LANES, Simd};

/// Rows of gradients for the outputs of a tile.
#[derive(Clone, Copy)]
pub(super) struct Gradients<G> {
    /// The first row's first.
    pub(super) g: *const G,
    /// From a row to the next.
    pub(super) stride: usize,
    /// What each row's are multiples of, where they are rounded.
    pub(super) scales: *const f32,
}

/// How gradients meet values.
pub(super) trait Arithmetic {
    /// A gradient as it is multiplied.
    type Gradient: Copy + Sync;

    /// Makes of decoded values, `[outputs, WIDE]`, what they are multiplied as.
    ///
    /// # Safety
    ///
    /// `weights` has room for a tile, and holds so many vectors of each of its outputs.
    unsafe fn pack<S: Simd>(weights: *mut f32, outputs: usize, vectors: usize);

    /// Sums over `outputs` for `M` rows and `V` vectors of inputs, from zero.
    ///
    /// # Safety
    ///
    /// Rows and inputs exist.
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        weights: *const f32,
        g: Gradients<Self::Gradient>,
        outputs: usize,
    ) -> [[S::F; V]; M];
}

/// Numbers of 32 bits, as they are.
pub(super) struct Floats;

impl Arithmetic for Floats {
    type Gradient = f32;

    #[inline(always)]
    unsafe fn pack<S: Simd>(_: *mut f32, _: usize, _: usize) {}

    #[inline(always)]
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        weights: *const f32,
        Gradients { g, stride, .. }: Gradients<f32>,
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
