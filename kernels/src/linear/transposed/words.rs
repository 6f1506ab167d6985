//! Gradients and values as 16-bit integers, two outputs per step.
//!
//! ```text
//! out[r, k] += scale_g[r] * scale_w[k] * (sum over the outputs of a tile, over o: g[r, o] * w[o, k])
//! ```
//!
//! The integer sum is exact: [`TALL`] products of signed 14-bit and 13-bit values fit 32 bits. A scale is the
//! largest magnitude of its values divided by the largest integer.

use super::{Gradients, TALL, TileOffset, WIDE, tiles};
use crate::{
    isa::Isa,
    linear::part::{LinearPart, blocks},
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Largest quantized magnitudes of gradients and values.
const GRADIENT: f32 = 8191.0;
const VALUE: f32 = 4095.0;
const _: () = assert!(TALL as i64 * GRADIENT as i64 * VALUE as i64 <= i32::MAX as i64);

/// Magnitudes below this are rounded to 0, because their quotients would not be finite.
const TINY: f32 = 1e-30;

pub(super) struct RoundedGradients {
    words: Vec<i16>,
    scales: Vec<f32>,
    rows: usize,
}

/// Rounded rows of gradients, as products read them.
#[derive(Clone, Copy)]
pub(super) struct GradientWords<'a> {
    /// `[tiles of all parts, rows, TALL]`: the words of a tile are contiguous.
    words: &'a [i16],
    /// `[tiles of all parts, rows]`: scales of the words.
    scales: &'a [f32],
    rows: usize,
}

impl Gradients for GradientWords<'_> {
    #[inline(always)]
    fn rows(self) -> usize {
        self.rows
    }

    #[inline(always)]
    unsafe fn pack<S: Simd>(weights: *mut f32, outputs: usize, vectors: usize) {
        for vector in 0..vectors {
            // SAFETY: the caller upholds this function's contract.
            unsafe { pack::<S>(weights.add(vector * LANES), outputs) };
        }
    }

    #[inline(always)]
    unsafe fn sums<S: Simd, const M: usize, const V: usize>(
        self,
        from: TileOffset,
        weights: *const f32,
        outputs: usize,
    ) -> [[S::F; V]; M] {
        let first = from.tile * self.rows + from.row;
        let pairs = self.words.as_ptr().wrapping_add(first * TALL).cast::<i32>();
        let mut sums = [[S::splat_i32(0); V]; M];
        for pair in 0..outputs.div_ceil(2) {
            // SAFETY: the caller guarantees rows and weights; the last pair of an odd number ends in zeros.
            unsafe {
                let w: [S::B; V] =
                    std::array::from_fn(|v| S::load_bytes(weights.add(pair * WIDE + v * LANES).cast()));
                for (m, sums) in sums.iter_mut().enumerate() {
                    let g = pairs.add(m * TALL / 2 + pair).read_unaligned();
                    for (&w, sum) in w.iter().zip(sums) {
                        *sum = S::dot_words(*sum, w, g);
                    }
                }
            }
        }
        let mut scaled = [[S::splat(0.0); V]; M];
        for (m, (scaled, sums)) in scaled.iter_mut().zip(sums).enumerate() {
            // SAFETY: the caller guarantees rows and weights; the inputs' scales follow the values.
            unsafe {
                let scale = S::splat(*self.scales.as_ptr().add(first + m));
                for (v, (scaled, sum)) in scaled.iter_mut().zip(sums).enumerate() {
                    let of_inputs = S::load(weights.add(TALL * WIDE + v * LANES));
                    *scaled = S::mul(S::mul(S::to_f32(sum), scale), of_inputs);
                }
            }
        }
        scaled
    }
}

/// Replaces a vector's values by pairs of integers, and stores their scales after the tile.
///
/// # Safety
/// `weights` holds a vector of each of `outputs` outputs of a tile.
#[inline(always)]
unsafe fn pack<S: Simd>(weights: *mut f32, outputs: usize) {
    // SAFETY: the caller upholds this function's contract. Each pair is read before it is overwritten.
    unsafe {
        let mut largest = LaneMaximum::none::<S>();
        for o in 0..outputs {
            largest.meet::<S>(S::load(weights.add(o * WIDE)));
        }
        let unit = largest.unit::<S>(VALUE);
        for pair in 0..outputs.div_ceil(2) {
            let first = weights.add(2 * pair * WIDE);
            let mut second = S::splat_i32(0);
            if 2 * pair + 1 < outputs {
                second = S::to_i32(S::mul(S::load(first.add(WIDE)), unit));
            }
            let first = S::to_i32(S::mul(S::load(first), unit));
            S::store_word_pairs(weights.add(pair * WIDE).cast(), first, second);
        }
        S::store(weights.add(TALL * WIDE), largest.scale::<S>(VALUE));
    }
}

/// Largest magnitude of some values, per lane.
struct LaneMaximum<F> {
    amount: F,
    /// NaN if a value was NaN or infinite, else zero.
    lost: F,
}

impl<F: Copy> LaneMaximum<F> {
    #[inline(always)]
    fn none<S: Simd<F = F>>() -> Self {
        Self { amount: S::splat(TINY), lost: S::splat(0.0) }
    }

    #[inline(always)]
    fn meet<S: Simd<F = F>>(&mut self, v: F) {
        self.amount = S::max(S::abs(v), self.amount);
        self.lost = S::fma(v, S::splat(0.0), self.lost);
    }

    /// Joins all lanes; every lane then has the result.
    #[inline(always)]
    fn across<S: Simd<F = F>>(self) -> Self {
        Self { amount: S::splat(S::max_lane(self.amount)), lost: S::splat(S::sum(self.lost)) }
    }

    /// Returns the factor that scales the values to integers of at most `whole`.
    #[inline(always)]
    fn unit<S: Simd<F = F>>(&self, whole: f32) -> F {
        S::div(S::splat(whole), self.amount)
    }

    /// Returns the value of one integer unit.
    #[inline(always)]
    fn scale<S: Simd<F = F>>(&self, whole: f32) -> F {
        S::add(S::div(self.amount, S::splat(whole)), self.lost)
    }
}

impl RoundedGradients {
    /// Rounds `g`, rows of `stride` gradients for `parts`.
    pub(super) fn new(
        pool: &mut ThreadPool,
        isa: Isa,
        g: &[f32],
        stride: usize,
        parts: &[LinearPart<'_>],
    ) -> Self {
        let rows = g.len() / stride.max(1);
        let tiles: usize = parts.iter().map(tiles).sum();
        let mut words = Vec::<i16>::with_capacity(tiles * rows * TALL);
        let mut scales = Vec::<f32>::with_capacity(tiles * rows);
        let to = (SharedPtr(words.as_mut_ptr()), SharedPtr(scales.as_mut_ptr()));
        pool.run(rows, |row| {
            let (SharedPtr(words), SharedPtr(scales)) = &to;
            let (words, scales) = (words.wrapping_add(row * TALL), scales.wrapping_add(row));
            isa.dispatch(Round { g: &g[row * stride..][..stride], parts, words, scales, rows });
        });
        // SAFETY: every row has written its words and its scale for every tile.
        unsafe {
            words.set_len(tiles * rows * TALL);
            scales.set_len(tiles * rows);
        }
        Self { words, scales, rows }
    }

    pub(super) fn words(&self) -> GradientWords<'_> {
        GradientWords { words: &self.words, scales: &self.scales, rows: self.rows }
    }
}

struct SharedPtr<T>(*mut T);
// SAFETY: each row belongs to one thread; the buffers outlive the region.
unsafe impl<T> Sync for SharedPtr<T> {}

struct Round<'a> {
    g: &'a [f32],
    parts: &'a [LinearPart<'a>],
    /// Words and scale of the row's first tile; those of the next tile follow `rows` rows later.
    words: *mut i16,
    scales: *mut f32,
    rows: usize,
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let (mut words, mut scales) = (self.words, self.scales);
        for part in self.parts {
            for outputs in blocks(0..part.matrix.rows(), TALL) {
                let g = &self.g[part.column + outputs.start..][..outputs.len()];
                // SAFETY: every tile of every part has words and a scale for the row.
                unsafe { scales.write(round::<S>(g, words)) };
                (words, scales) = (words.wrapping_add(self.rows * TALL), scales.wrapping_add(self.rows));
            }
        }
    }
}

/// Rounds the gradients of a tile and returns the scale of their words.
///
/// # Safety
/// There is room for [`TALL`] words, all of which are written.
#[inline(always)]
unsafe fn round<S: Simd>(g: &[f32], words: *mut i16) -> f32 {
    let mut largest = LaneMaximum::none::<S>();
    for at in blocks(0..g.len(), LANES) {
        // SAFETY: the gradients exist.
        largest.meet::<S>(unsafe { S::load_head(g.as_ptr().add(at.start), at.len()) });
    }
    let largest = largest.across::<S>();
    let unit = largest.unit::<S>(GRADIENT);
    for first in (0..TALL).step_by(LANES) {
        let count = g.len().saturating_sub(first).min(LANES);
        // SAFETY: the gradients exist, and there is room for the words; zeros follow the last gradient.
        unsafe {
            let v = S::load_head(g.as_ptr().wrapping_add(first), count);
            S::store_words(words.add(first), S::to_i32(S::mul(v, unit)));
        }
    }
    S::max_lane(largest.scale::<S>(GRADIENT))
}
