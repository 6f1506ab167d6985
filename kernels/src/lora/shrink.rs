//! Product with A: `sums[m][r] = scale * A[r] · x[m]`, with sixteen ranks in the lanes.
//!
//! A product is summed over blocks of [`BLOCK`] columns, each in one chain of multiply-adds from the first to
//! the last column, and the blocks' sums are added from the first to the last. This order never depends on
//! the tile: a tile of many rows computes one block at a time, a tile of few rows several blocks, because the
//! additions of one chain depend on each other.
//!
//! A block of 1, 2, 4 or 8 ranks (the last of a small adapter) has several columns in the lanes. Each column
//! is a chain of its own, and the chains are added pairwise at the end.

use std::ops::Range;

use super::{
    layout::{MatrixLayout, RANK_BLOCK},
    matrix::FactorView,
    stored::{SPAN, StoredElement},
};
use crate::simd::{Kernel, LANES, Simd};

/// Columns that are summed in one chain.
const BLOCK: usize = 64;

const _: () =
    assert!(SPAN.is_multiple_of(BLOCK), "a chain ends where a span does, or its order would depend on it");

pub(super) struct Shrink<'a> {
    pub(super) layout: &'a MatrixLayout,
    pub(super) a: FactorView<'a>,
    /// Inputs as rows, `[rows, columns]`.
    pub(super) x: *const f32,
    pub(super) rows: usize,
    /// Buffer for inputs converted to another kind.
    pub(super) scratch: *mut u32,
    /// `[rows, ranks of blocks]`; short blocks are padded to [`RANK_BLOCK`].
    pub(super) sums: *mut f32,
    pub(super) blocks: Range<usize>,
}

/// Consecutive columns of `V` neighbouring rank blocks of equal width.
struct Strip<X, const V: usize> {
    a: [*const u8; V],
    width: usize,
    /// Lanes from one step to the next.
    step_lanes: usize,
    steps: usize,
    /// Steps whose weights may be read as whole vectors.
    whole_steps: usize,
    /// Lanes of the other steps.
    tail_lanes: usize,
    x: *const X,
    /// Inputs from one step to the next.
    step_inputs: usize,
    x_stride: usize,
    sums: *mut f32,
    sums_stride: usize,
}

impl<X, const V: usize> Clone for Strip<X, V> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<X, const V: usize> Copy for Strip<X, V> {}

impl Shrink<'_> {
    /// # Safety
    /// `a` is valid for the blocks, `x` and `sums` for the rows, `scratch` for `rows * SPAN / 2` elements.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd, A: StoredElement>(&self) {
        if self.blocks.is_empty() {
            return;
        }
        let stride = self.blocks.len() * RANK_BLOCK;
        let columns = self.layout.columns;
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            std::ptr::write_bytes(self.sums, 0, self.rows * stride);
            // Pieces and spans both have a power of two of columns, so no span crosses pieces.
            let each = SPAN.min(1 << self.a.cut().shift);
            for column in (0..columns).step_by(each) {
                let count = each.min(columns - column);
                let (x, x_stride) =
                    A::inputs::<S>(self.x.add(column), columns, self.rows, count, self.scratch);
                self.span::<S, A>(column, count, x, x_stride);
            }
            let last = RANK_BLOCK.min(self.layout.rank - (self.blocks.end - 1) * RANK_BLOCK);
            if A::is_narrow(last) {
                for row in 1..=self.rows {
                    gather(self.sums.add(row * stride - LANES), last);
                }
            }
            for first in (0..self.rows * stride).step_by(LANES) {
                let at = self.sums.add(first);
                S::store(at, S::mul(S::load(at), S::splat(self.layout.scale)));
            }
        }
    }

    #[inline(always)]
    unsafe fn span<S: Simd, A: StoredElement>(
        &self,
        column: usize,
        count: usize,
        x: *const A::Input,
        x_stride: usize,
    ) {
        let mut block = self.blocks.start;
        while block < self.blocks.end {
            let full = self.blocks.end.min(self.layout.rank / RANK_BLOCK).saturating_sub(block);
            // SAFETY: the caller upholds this function's contract.
            unsafe {
                block += if const { S::TILE == 8 } && full >= 4 {
                    columns_of::<S, A, 4, 1>(self.strip::<A, 4>(block, column, count, x, x_stride), self.rows)
                } else if full == 0 && A::is_narrow(self.layout.rank % RANK_BLOCK) {
                    let strip = self.strip::<A::Narrow, 1>(block, column, count, x, x_stride);
                    columns_of::<S, A::Narrow, 1, 4>(strip, self.rows)
                } else {
                    columns_of::<S, A, 1, 4>(self.strip::<A, 1>(block, column, count, x, x_stride), self.rows)
                };
            }
        }
    }

    #[inline(always)]
    unsafe fn strip<A: StoredElement, const V: usize>(
        &self,
        block: usize,
        column: usize,
        count: usize,
        x: *const A::Input,
        x_stride: usize,
    ) -> Strip<A::Input, V> {
        let width = RANK_BLOCK.min(self.layout.rank - block * RANK_BLOCK);
        let cut = self.a.cut();
        let number = column >> cut.shift;
        let piece = cut.features(number, self.layout.columns);
        let each = A::columns_a_step(width);
        let (first, all) = ((column - piece.start) / each, piece.len().div_ceil(each));
        let is_narrow = each > A::STEP;
        let (step_lanes, whole, tail_lanes) = if is_narrow {
            (LANES, piece.len() / each, piece.len() % each * width)
        } else {
            // A vector of a short block reaches into the next steps, whose lanes are ignored; the last steps have no
            // next ones.
            (width, (all + 1).saturating_sub(LANES.div_ceil(width)), width)
        };
        // SAFETY: the caller guarantees that the block and the column exist.
        unsafe {
            Strip {
                a: std::array::from_fn(|v| {
                    let before = self.layout.a_bytes_before((block + v) * RANK_BLOCK);
                    self.a.piece(block + v, number, before).add(first * step_lanes * A::LANE_BYTES)
                }),
                width,
                step_lanes,
                steps: count.div_ceil(each),
                whole_steps: whole.saturating_sub(first),
                tail_lanes,
                x,
                step_inputs: each / A::STEP,
                x_stride,
                sums: self.sums.add((block - self.blocks.start) * RANK_BLOCK),
                sums_stride: self.blocks.len() * RANK_BLOCK,
            }
        }
    }
}

/// Adds the lanes of the same one of `width` ranks, pairwise, halving each time.
///
/// # Safety
/// `sums` is valid for 16 elements.
#[inline(always)]
unsafe fn gather(sums: *mut f32, width: usize) {
    let mut half = LANES / 2;
    while half >= width {
        for lane in 0..half {
            // SAFETY: the caller upholds this function's contract.
            unsafe { *sums.add(lane) += *sums.add(half + lane) };
        }
        half /= 2;
    }
}

/// Adds the products of a strip of `V` rank blocks; few rows sum `C` blocks of columns at once. Returns `V`.
#[inline(always)]
unsafe fn columns_of<S: Simd, A: StoredElement, const V: usize, const C: usize>(
    strip: Strip<A::Input, V>,
    rows: usize,
) -> usize {
    let block = BLOCK / A::columns_a_step(strip.width);
    let mut step = 0;
    while step < strip.steps {
        let last = step + C * block;
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let part = strip.from::<A>(step, block);
            step += if rows < 4 && last <= strip.steps && last <= strip.whole_steps {
                few_rows_of::<S, A, V, C>(part, rows);
                C * block
            } else {
                rows_of::<S, A, V>(part, rows);
                block
            };
        }
    }
    V
}

impl<X, const V: usize> Strip<X, V> {
    /// Returns at most `count` steps from `first` on.
    #[inline(always)]
    unsafe fn from<A: StoredElement<Input = X>>(self, first: usize, count: usize) -> Self {
        // SAFETY: the caller guarantees that the steps exist.
        unsafe {
            Self {
                a: self.a.map(|a| a.add(first * self.step_lanes * A::LANE_BYTES)),
                steps: count.min(self.steps - first),
                whole_steps: self.whole_steps.saturating_sub(first),
                x: self.x.add(first * self.step_inputs),
                ..self
            }
        }
    }

    #[inline(always)]
    unsafe fn row(self, row: usize) -> Self {
        // SAFETY: the caller guarantees that the row exists.
        unsafe {
            Self { x: self.x.add(row * self.x_stride), sums: self.sums.add(row * self.sums_stride), ..self }
        }
    }
}

#[inline(always)]
unsafe fn rows_of<S: Simd, A: StoredElement, const V: usize>(strip: Strip<A::Input, V>, rows: usize) {
    let mut row = 0;
    while row < rows {
        // SAFETY: the caller upholds this function's contract.
        let (part, left) = unsafe { (strip.row(row), rows - row) };
        row += if const { tile_holds::<S>(8, V) } && left >= 8 {
            S::call(ShrinkTile::<A, 8, V, 1>(part))
        } else if const { tile_holds::<S>(6, V) && V > 1 } && left >= 6 {
            S::call(ShrinkTile::<A, 6, V, 1>(part))
        } else if const { tile_holds::<S>(4, V) } && left >= 4 {
            S::call(ShrinkTile::<A, 4, V, 1>(part))
        } else if const { tile_holds::<S>(2, V) } && left >= 2 {
            S::call(ShrinkTile::<A, 2, V, 1>(part))
        } else {
            S::call(ShrinkTile::<A, 1, V, 1>(part))
        };
    }
}

#[inline(always)]
unsafe fn few_rows_of<S: Simd, A: StoredElement, const V: usize, const C: usize>(
    strip: Strip<A::Input, V>,
    rows: usize,
) {
    let mut row = 0;
    while row < rows {
        // SAFETY: the caller upholds this function's contract.
        let part = unsafe { strip.row(row) };
        row += if const { tile_holds::<S>(2, V * C) } && rows - row >= 2 {
            S::call(ShrinkTile::<A, 2, V, C>(part))
        } else {
            S::call(ShrinkTile::<A, 1, V, C>(part))
        };
    }
}

/// True if the registers hold the sums of `rows` rows of `vectors` vectors with their operands.
pub(super) const fn tile_holds<S: Simd>(rows: usize, vectors: usize) -> bool {
    match S::TILE {
        8 => rows * vectors <= 24,
        most => rows * vectors <= most,
    }
}

/// Product of `M` rows, `V` rank blocks and `C` blocks of columns, each of `strip.steps` steps. Returns `M`.
struct ShrinkTile<A: StoredElement, const M: usize, const V: usize, const C: usize>(Strip<A::Input, V>);

impl<A: StoredElement, const M: usize, const V: usize, const C: usize> Kernel for ShrinkTile<A, M, V, C> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self) -> usize {
        let strip = self.0;
        let mut sums = [[[S::splat(0.0); V]; M]; C];
        // SAFETY: the caller that made the strip guarantees its steps and rows.
        unsafe {
            let whole = if V > 1 { strip.steps } else { strip.steps.min(strip.whole_steps) };
            for step in 0..whole {
                add_step::<S, A, M, V, C>(&strip, step, LANES, |from| A::load::<S>(from), &mut sums);
            }
            for step in whole..strip.steps {
                let load = |from| A::load_head::<S>(from, strip.tail_lanes);
                add_step::<S, A, M, V, C>(&strip, step, strip.tail_lanes, load, &mut sums);
            }
            for m in 0..M {
                for v in 0..V {
                    let at = strip.sums.add(m * strip.sums_stride + v * RANK_BLOCK);
                    let mut total = S::load(at);
                    for sums in &sums {
                        total = S::add(total, sums[m][v]);
                    }
                    S::store(at, total);
                }
            }
        }
        M
    }
}

#[inline(always)]
unsafe fn add_step<S: Simd, A: StoredElement, const M: usize, const V: usize, const C: usize>(
    strip: &Strip<A::Input, V>,
    step: usize,
    lanes: usize,
    load: impl Fn(*const u8) -> A::Weights<S>,
    sums: &mut [[[S::F; V]; M]; C],
) {
    // A short block is never combined with others.
    let step_lanes = if V > 1 { RANK_BLOCK } else { strip.step_lanes };
    let step_inputs = if V > 1 { 1 } else { strip.step_inputs };
    for (c, sums) in sums.iter_mut().enumerate() {
        let step = c * strip.steps + step;
        // SAFETY: the caller guarantees that the strip has the step.
        unsafe {
            let at = step * step_lanes * A::LANE_BYTES;
            let weights: [A::Weights<S>; V] = std::array::from_fn(|v| load(strip.a[v].add(at)));
            for (m, sums) in sums.iter_mut().enumerate() {
                let x = strip.x.add(m * strip.x_stride + step * step_inputs);
                let factor = A::factor::<S>(x, strip.width, lanes);
                for (sum, &weight) in sums.iter_mut().zip(&weights) {
                    *sum = A::dot::<S>(*sum, weight, factor);
                }
            }
        }
    }
}
