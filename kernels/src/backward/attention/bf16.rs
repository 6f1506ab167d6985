//! Gradients of attention beside keys and values in bf16, in the order of the matrix unit.
//!
//! ```text
//! scores = q kT      weights = softmax(scores)      of_scores = weights (g vT - along)
//! of_q = of_scores k      of_kT = sum over heads and tiles: qT of_scores      of_vT: gT weights
//! ```
//!
//! All factors are rounded to bf16, to nearest even, and all sums are those of
//! [`linear_bf16`](crate::linear_bf16): groups of 32 columns, keys or queries. So scores have the bits of the
//! forward pass. Weights and gradients of scores are computed in 32 bits.

use super::{HeadGradient, QueryTile};
use crate::{
    activations::GROUP,
    backward::SUM_ROWS,
    isa::Isa,
    linear::{MatrixProduct, PairFactor, PairTiles, RowTiles, SumFrom},
    simd::{Kernel, Simd},
};

/// [`HeadGradient`] with products in bf16.
pub(super) struct HeadGradientBf16<'a> {
    pub(super) head: HeadGradient<'a>,
    pub(super) isa: Isa,
}

/// Keys and values of a head, the sums of their gradients, and the buffers of a tile of queries.
struct HeadMatrices {
    keys: PairTiles,
    keys_transposed: PairTiles,
    values_transposed: PairTiles,
    /// Gradient sums of the keys, of shape `[head_dim, tokens]`.
    key_sums: Vec<f32>,
    value_sums: Vec<f32>,
    queries: RowTiles,
    queries_transposed: RowTiles,
    /// Gradients at the outputs.
    g: RowTiles,
    g_transposed: RowTiles,
    /// `[SUM_ROWS, tokens]`: scores, then weights.
    weights: Vec<f32>,
    weight_pairs: PairTiles,
    /// `[SUM_ROWS, tokens]`: gradients of the weights, then of the scores.
    scores: Vec<f32>,
    score_rows: RowTiles,
    score_pairs: PairTiles,
    slopes: Vec<f32>,
}

impl Kernel for HeadGradientBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let layout = self.head.attended.layout;
        let group = layout.heads / layout.kv_heads;
        let mut scratch = self.scratch();
        for head in self.head.kv_head * group..(self.head.kv_head + 1) * group {
            for first in (0..self.head.sequence.count).step_by(SUM_ROWS) {
                let mut tile = self.head.query_tile(head, first);
                tile.from = tile.from / GROUP * GROUP;
                // SAFETY: `attention_gradient` has checked that rows and columns exist and gave them to this thread
                // alone.
                unsafe { self.tile::<S>(tile, &mut scratch) };
            }
        }
        self.put(layout.key_column(), &scratch.key_sums);
        self.put(layout.value_column(), &scratch.value_sums);
    }
}

impl HeadGradientBf16<'_> {
    #[inline(always)]
    fn scratch(&self) -> HeadMatrices {
        let (tokens, width) = (self.head.sequence.count, self.head.attended.layout.head_dim);
        let [keys, values] = self.head.keys_and_values();
        let mut scratch = HeadMatrices {
            keys: PairTiles::new(tokens, width),
            keys_transposed: PairTiles::new(width, tokens),
            values_transposed: PairTiles::new(width, tokens),
            key_sums: vec![0.0; tokens * width],
            value_sums: vec![0.0; tokens * width],
            queries: RowTiles::new(SUM_ROWS, width),
            queries_transposed: RowTiles::new(width, SUM_ROWS),
            g: RowTiles::new(SUM_ROWS, width),
            g_transposed: RowTiles::new(width, SUM_ROWS),
            weights: vec![0.0; SUM_ROWS * tokens],
            weight_pairs: PairTiles::new(SUM_ROWS, tokens),
            scores: vec![0.0; SUM_ROWS * tokens],
            score_rows: RowTiles::new(SUM_ROWS, tokens),
            score_pairs: PairTiles::new(SUM_ROWS, tokens),
            slopes: self.head.slopes(),
        };
        scratch.keys.fill(tokens, width, |token| &keys[token * width..]);
        scratch.keys_transposed.fill_transposed(tokens, width, |token| &keys[token * width..][..width]);
        scratch.values_transposed.fill_transposed(tokens, width, |token| &values[token * width..][..width]);
        scratch
    }

    /// # Safety
    /// Rows and columns exist, and no other thread uses them.
    #[inline(always)]
    unsafe fn tile<S: Simd>(&self, tile: QueryTile, scratch: &mut HeadMatrices) {
        let (head, layout) = (&self.head, self.head.attended.layout);
        let (tokens, width) = (head.sequence.count, layout.head_dim);
        let (count, seen) = (tile.count, tile.to - tile.from);
        let mut queries = vec![0.0; count * width];
        head.gather_queries(tile, &mut queries);
        scratch.queries.fill(count, width, |row| &queries[row * width..]);
        scratch.queries_transposed.fill_transposed(count, width, |row| &queries[row * width..]);
        let g = |row: usize| &head.g[head.out(tile.first + row, tile.head)..];
        scratch.g.fill(count, width, g);
        scratch.g_transposed.fill_transposed(count, width, g);
        let isa = self.isa;
        let run = |a: &RowTiles, b: PairFactor<'_>, from, c: *mut f32, stride, columns| {
            // SAFETY: the rows of `c` lie in a buffer of a tile, or belong to this thread.
            unsafe { MatrixProduct { a, b, from, c, stride, columns }.run(isa) };
        };
        let zero = SumFrom::Zero;
        let (weights, scores) = (scratch.weights.as_mut_ptr(), scratch.scores.as_mut_ptr());
        run(&scratch.queries, scratch.keys_transposed.from(0, tile.from), zero, weights, tokens, seen);
        run(&scratch.g, scratch.values_transposed.from(0, tile.from), zero, scores, tokens, seen);
        // SAFETY: both buffers hold a tile, and the rows exist.
        unsafe { head.soften_tile::<S>(tile, weights, scores, tokens, &mut scratch.slopes) };
        scratch.score_rows.fill(count, seen, |row| &scratch.scores[row * tokens..]);
        scratch.score_pairs.fill(count, seen, |row| &scratch.scores[row * tokens..]);
        scratch.weight_pairs.fill(count, seen, |row| &scratch.weights[row * tokens..]);
        let to_queries = head.to.0.wrapping_add(head.column(tile.first, tile.head * width));
        run(&scratch.score_rows, scratch.keys.from(tile.from, 0), zero, to_queries, layout.stride(), width);
        let key_sums = scratch.key_sums[tile.from..].as_mut_ptr();
        let of_scores = scratch.score_pairs.from(0, 0);
        run(&scratch.queries_transposed, of_scores, SumFrom::Out, key_sums, tokens, seen);
        let value_sums = scratch.value_sums[tile.from..].as_mut_ptr();
        let of_values = scratch.weight_pairs.from(0, 0);
        run(&scratch.g_transposed, of_values, SumFrom::Out, value_sums, tokens, seen);
    }

    /// Writes the transpose of `sums` to the columns of the head from `column` on.
    fn put(&self, column: usize, sums: &[f32]) {
        let (tokens, width) = (self.head.sequence.count, self.head.attended.layout.head_dim);
        for token in 0..tokens {
            let at = self.head.column(token, column + self.head.kv_head * width);
            for c in 0..width {
                // SAFETY: row and columns exist, and no other thread uses them.
                unsafe { self.head.to.0.add(at + c).write(sums[c * tokens + token]) };
            }
        }
    }
}
