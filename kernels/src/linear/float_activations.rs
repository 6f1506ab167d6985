//! Linear layers with unrounded activations: `out = x · Wᵀ (+ bias)` over the values of the weights.
//!
//! [`linear`](super::linear) rounds activations to the weights' precision, so it is not additive: the outputs
//! of two inputs do not sum to the output of their sum. Three uses need a linear layer: training (whose
//! backward pass is the transposed matrix), masks that are added and removed, and comparisons with other
//! engines. In this module every packing is linear: a weight is one f32 value (`values`), an activation an
//! f32, and
//!
//! ```text
//! out[r, o] = fma(w[o, in - 1], x[r, in - 1], ... fma(w[o, 0], x[r, 0], 0)) (+ bias[o])
//! ```
//!
//! in one lane, `in` from first to last. Float packings of 32 and 16 bits give the bits of `linear`. As
//! there, bits do not depend on the batch, the thread or the tile. Two methods compute the same sums:
//!
//! - **One row** uses each weight once, so the weight is decoded in registers. A lane's sum is a chain of
//!   dependent fused multiply-adds; several panels run side by side to hide their latency.
//! - **Several rows** share the decoding: [`DEPTH`] elements of [`SIDE`] panels are decoded to a buffer in
//!   the first-level cache, and all rows use it. Between blocks of `in` the sums are kept exactly in `out`.

use std::{marker::PhantomData, ops::Range};

use super::{
    out_panels::OutPanels,
    part::{DecodeScratch, LinearPart, OutPtr, blocks, check_parts, for_each_chunk},
    values::{HALF, Values, decode_columns, with_values},
};
use crate::{
    activations::{Activations, GROUP},
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Elements of `in` that are decoded at once, for [`SIDE`] panels: 32 KB.
const DEPTH: usize = 128;
const SIDE: usize = 4;

/// Rows per decoding of the weights: [`DEPTH`] elements of each row stay in the second-level cache.
const ROW_BLOCK: usize = 256;

/// Computes `parts` for every row of `x`, in any form, into rows of `out` of `stride` elements, on all
/// threads.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn linear_unrounded(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &Activations,
    parts: &[LinearPart<'_>],
    out: &mut [f32],
    stride: usize,
) {
    let rows = x.rows();
    assert!(out.len() >= rows * stride, "out holds {rows} rows of {stride}");
    check_parts(parts, x.width(), stride);
    let out = OutPtr(out.as_mut_ptr());
    for_each_chunk(pool, parts, panels_a_chunk, |part, first, last| {
        let out = OutPanels::of_part(&part, &out, stride);
        isa.dispatch(FloatChunk { x, part, first, last, out });
    });
}

/// Returns the panels per chunk: four chunks per thread, in multiples of [`SIDE`] panels.
fn panels_a_chunk(panels: usize, threads: usize) -> usize {
    (panels.div_ceil(4 * threads) / SIDE * SIDE).max(SIDE)
}

/// Panels `first..last` of one part, for all rows.
#[derive(Clone, Copy)]
struct FloatChunk<'a> {
    x: &'a Activations,
    part: LinearPart<'a>,
    first: usize,
    last: usize,
    out: OutPanels<'a>,
}

impl Kernel for FloatChunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        with_values!(self.part.matrix.packing(), V => self.with::<S, V>());
    }
}

impl FloatChunk<'_> {
    #[inline(always)]
    fn with<S: Simd, V: Values>(self) {
        if self.x.rows() == 1 {
            S::call(OneRow::<V>(self, PhantomData));
        } else {
            self.in_blocks::<S, V>();
        }
    }

    #[inline(always)]
    fn in_blocks<S: Simd, V: Values>(self) {
        let mut scratch = DecodeScratch::<{ SIDE * DEPTH * LANES }>::new();
        let weights = scratch.as_mut_ptr();
        for rows in blocks(0..self.x.rows(), ROW_BLOCK) {
            for depth in blocks(0..self.x.width(), DEPTH) {
                for panels in blocks(self.first..self.last, SIDE) {
                    let block =
                        Block { chunk: self, rows: rows.clone(), panels, depth: depth.clone(), weights };
                    S::call(Decode::<V>(&block, PhantomData));
                    S::call(BlockSums(&block));
                }
            }
        }
    }
}

/// The only row, with weights decoded in registers.
struct OneRow<'a, V>(FloatChunk<'a>, PhantomData<V>);

impl<V: Values> Kernel for OneRow<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let FloatChunk { first, last, .. } = self.0;
        let mut panel = first;
        while panel < last {
            panel += match (S::TILE / 2).max(1).min(last - panel) {
                4.. => self.panels::<S, 4>(panel),
                2.. => self.panels::<S, 2>(panel),
                _ => self.panels::<S, 1>(panel),
            };
        }
    }
}

impl<V: Values> OneRow<'_, V> {
    #[inline(always)]
    fn panels<S: Simd, const P: usize>(&self, panel: usize) -> usize {
        let (w, width) = (self.0.part.matrix, self.0.x.width());
        let x = self.0.x.values().as_ptr();
        let mut sums = [S::splat(0.0); P];
        // Prefetches codes and scales of the next panels.
        let share = w.panel_bytes() * GROUP / width;
        for group in 0..width / GROUP {
            for p in 0..P {
                w.prefetch(panel + P + p, group * share, share);
            }
            // SAFETY: the panels and the group exist, and `x` has `width` elements.
            unsafe {
                self.half::<S, P, 0>(panel, group, &mut sums);
                self.half::<S, P, 1>(panel, group, &mut sums);
            }
        }
        for k in width / GROUP * GROUP..width {
            for (p, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the panels exist, and element `k` is below `width`, the length of `x`.
                *sum = unsafe { S::fma(V::one::<S>(w, panel + p, k), S::splat(*x.add(k)), *sum) };
            }
        }
        for (p, &sum) in sums.iter().enumerate() {
            self.0.out.put::<S>(panel + p, 0, sum);
        }
        P
    }

    /// # Safety
    /// The panels and the group exist.
    #[inline(always)]
    unsafe fn half<S: Simd, const P: usize, const H: usize>(
        &self,
        panel: usize,
        group: usize,
        sums: &mut [S::F; P],
    ) {
        let w = self.0.part.matrix;
        // SAFETY: the caller guarantees panels and group; a row has all elements of the group.
        unsafe {
            let x = self.0.x.values().as_ptr().add(group * GROUP + H * HALF);
            let numbers: [_; P] = std::array::from_fn(|p| V::numbers::<S, H>(w, panel + p, group));
            for step in 0..HALF / 4 {
                for p in 0..P {
                    let four = V::four::<S, H>(w, panel + p, group, step, numbers[p]);
                    for (i, w) in four.into_iter().enumerate() {
                        sums[p] = S::fma(w, S::splat(*x.add(4 * step + i)), sums[p]);
                    }
                }
            }
        }
    }
}

/// Sums of `rows` with `panels` over the elements `depth` of `in`.
#[derive(Clone)]
struct Block<'a> {
    chunk: FloatChunk<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    depth: Range<usize>,
    /// `[SIDE, DEPTH, LANES]`: the decoded values.
    weights: *mut f32,
}

struct Decode<'a, V>(&'a Block<'a>, PhantomData<V>);

impl<V: Values> Kernel for Decode<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Block { chunk, panels, depth, weights, .. } = self.0;
        for (side, panel) in panels.clone().enumerate() {
            let to = weights.wrapping_add(side * DEPTH * LANES);
            // SAFETY: the panel exists, and the buffer holds `DEPTH` vectors for each panel.
            unsafe { decode_columns::<V, S>(chunk.part.matrix, panel, depth.clone(), to) };
        }
    }
}

struct BlockSums<'a>(&'a Block<'a>);

impl Kernel for BlockSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let panels = self.0.panels.len();
        let mut side = 0;
        while side < panels {
            // Two panels share the loads of activations if the registers hold the sums of both.
            side += if S::TILE == 8 && panels - side >= 2 {
                self.rows::<S, 2>(side)
            } else {
                self.rows::<S, 1>(side)
            };
        }
    }
}

impl BlockSums<'_> {
    #[inline(always)]
    fn rows<S: Simd, const P: usize>(&self, side: usize) -> usize {
        let Range { start: mut row, end } = self.0.rows;
        while row < end {
            row += match S::TILE.min(end - row) {
                8.. => self.tile::<S, 8, P>(row, side),
                4.. => self.tile::<S, 4, P>(row, side),
                2.. => self.tile::<S, 2, P>(row, side),
                _ => self.tile::<S, 1, P>(row, side),
            };
        }
        P
    }

    /// Sums `M` rows with `P` panels, continuing from the sums of the previous block in `out`.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const P: usize>(&self, row: usize, side: usize) -> usize {
        let Block { chunk, panels, depth, weights, .. } = self.0;
        let (panel, width) = (panels.start + side, chunk.x.width());
        let mut sums = [[S::splat(0.0); P]; M];
        // SAFETY: rows, panels and elements exist; columns lie within `out`, and no other chunk uses them.
        unsafe {
            if depth.start > 0 {
                for (m, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = chunk.out.kept::<S>(panel + p, row + m);
                    }
                }
            }
            let x = chunk.x.values().as_ptr().add(row * width + depth.start);
            let weights = weights.add(side * DEPTH * LANES);
            for k in 0..depth.len() {
                let w: [S::F; P] = std::array::from_fn(|p| S::load(weights.add((p * DEPTH + k) * LANES)));
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = S::splat(*x.add(m * width + k));
                    for (&w, sum) in w.iter().zip(sums) {
                        *sum = S::fma(w, x, *sum);
                    }
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                for (p, &sum) in sums.iter().enumerate() {
                    if depth.end == width {
                        chunk.out.put::<S>(panel + p, row + m, sum);
                    } else {
                        chunk.out.keep::<S>(panel + p, row + m, sum);
                    }
                }
            }
        }
        M
    }
}
