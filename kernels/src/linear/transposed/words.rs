//! Gradients and values as whole numbers of 16 bits, two outputs at a step.
//!
//! ```text
//! out[r, k] += scale_g[r] * scale_w[k] * (sum over the outputs of a tile, over o: g[r, o] * w[o, k])
//! ```
//!
//! The sum is of whole numbers, and exact: [`TALL`] products of 14 and 13 bits with their signs fit 32 bits. A scale is the
//! largest amount among what it scales, over the largest whole number.

use super::{Gradients, TALL, TileOffset, WIDE, tiles};
use crate::{
    isa::Isa,
    linear::part::{LinearPart, blocks},
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// The largest whole numbers.
const GRADIENT: f32 = 8191.0;
const VALUE: f32 = 4095.0;
const _: () = assert!(TALL as i64 * GRADIENT as i64 * VALUE as i64 <= i32::MAX as i64);

/// Amounts that are less throughout are taken for nothing: their quotients would not be numbers.
const TINY: f32 = 1e-30;

/// Rows of gradients, rounded.
pub(super) struct RoundedGradients {
    words: Vec<i16>,
    scales: Vec<f32>,
    rows: usize,
}

/// The same, as products see them.
#[derive(Clone, Copy)]
pub(super) struct GradientWords<'a> {
    /// `[tiles of all parts, rows, TALL]`: what a tile needs lies together.
    words: &'a [i16],
    /// `[tiles of all parts, rows]`: what the words are multiples of.
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
            // SAFETY: the caller's.
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
            // SAFETY: the caller's; the last pair of an odd number ends in zeroes.
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
            // SAFETY: the caller's; the inputs' scales lie behind the values.
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

/// Replaces a vector's values by pairs of whole numbers, and puts their scales behind the tile.
///
/// # Safety
///
/// `weights` holds a vector of each of `outputs` outputs of a tile.
#[inline(always)]
unsafe fn pack<S: Simd>(weights: *mut f32, outputs: usize) {
    // SAFETY: the caller's. Pair by pair, what is written has been read.
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

/// The largest amount of some numbers, lane by lane.
struct LaneMaximum<F> {
    amount: F,
    /// Zero, unless a number was none, or infinite.
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

    /// The same of all lanes, in each of them.
    #[inline(always)]
    fn across<S: Simd<F = F>>(self) -> Self {
        Self { amount: S::splat(S::max_lane(self.amount)), lost: S::splat(S::sum(self.lost)) }
    }

    /// What the numbers are multiplied by to become whole ones, up to `whole`.
    #[inline(always)]
    fn unit<S: Simd<F = F>>(&self, whole: f32) -> F {
        S::div(S::splat(whole), self.amount)
    }

    /// What the whole numbers are multiples of.
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
        // SAFETY: every row has put its words and its scale for every tile.
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
// SAFETY: each row is one thread's alone, of a buffer that outlives the region.
unsafe impl<T> Sync for SharedPtr<T> {}

/// Rounds a row.
struct Round<'a> {
    g: &'a [f32],
    parts: &'a [LinearPart<'a>],
    /// The row's words and scale of the first tile; those of the next tile come `rows` rows later.
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

/// Rounds the gradients of a tile, and gives what their words are multiples of.
///
/// # Safety
///
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
        // SAFETY: as above, and there is room; beyond the last gradient come zeroes.
        unsafe {
            let v = S::load_head(g.as_ptr().wrapping_add(first), count);
            S::store_words(words.add(first), S::to_i32(S::mul(v, unit)));
        }
    }
    S::max_lane(largest.scale::<S>(GRADIENT))
}
