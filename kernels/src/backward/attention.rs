//! Gradients of attention over whole sequences, whose rows are all in the batch.
//!
//! The weights of a query are recomputed from queries and keys, so nothing of size rows x rows is kept. One
//! thread computes a key head of a sequence. The thread takes the queries in tiles of
//! [`SUM_ROWS`](super::SUM_ROWS) tokens and the heads of the group in sequence, so the order of all sums
//! depends on the sequence alone.

mod bf16;

use self::bf16::HeadGradientBf16;
use super::{
    SUM_ROWS,
    product::{SmallProduct, Strided, WriteMode},
};
use crate::{
    attention::{AttentionLimits, KvPrecision, QkvLayout},
    elementwise::{cap_slope, capped},
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Consecutive rows that form one whole sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceRows {
    /// First row in the batch.
    pub first: usize,
    /// Number of rows; the first has position 0.
    pub count: usize,
}

/// Inputs and output of the forward attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// Rows `[q | k | v]` as attention read them: queries scaled, queries and keys rotated.
    pub qkv: &'a [f32],
    /// Layout of a row of `qkv`.
    pub layout: QkvLayout,
    /// Precision of the KV cache; attention used keys and values rounded to it, with `Bf16` also queries.
    pub precision: KvPrecision,
    /// Sliding window and soft cap.
    pub limits: AttentionLimits,
    /// Sink of each query head, or empty; sinks are constants.
    pub sinks: &'a [f32],
    /// Output of attention, `[rows, heads * head_dim]`.
    pub out: &'a [f32],
}

/// Computes the gradient at `[q | k | v]`, of the same shape, from the gradient `g` at the output. The
/// gradient passes through the rounding of queries, keys and values unchanged (straight-through), and with
/// [`KvPrecision::Bf16`] through the rounding of weights: weights are recomputed in 32 bits. With `Bf16` all
/// factors of products are rounded to bf16.
///
/// # Panics
/// Panics if the shapes do not match, or sequences are not in ascending order.
pub fn attention_gradient(
    pool: &mut ThreadPool,
    isa: Isa,
    attended: AttentionInputs<'_>,
    sequences: &[SequenceRows],
    g: &[f32],
    gradient: &mut [f32],
) {
    let AttentionInputs { qkv, layout, out, .. } = attended;
    let (rows, width) = (qkv.len() / layout.stride(), layout.heads * layout.head_dim);
    assert!(layout.heads.is_multiple_of(layout.kv_heads), "whole groups of heads");
    assert_eq!(gradient.len(), qkv.len(), "a gradient for each element");
    assert!(out.len() >= rows * width && g.len() >= rows * width, "a row for each row of qkv");
    let in_order = |pair: &[SequenceRows]| pair[0].first + pair[0].count <= pair[1].first;
    assert!(sequences.windows(2).all(in_order), "sequences have rows of their own, in ascending order");
    assert!(sequences.last().is_none_or(|last| last.first + last.count <= rows), "the rows exist");
    gradient.fill(0.0);
    let to = OutPtr(gradient.as_mut_ptr());
    pool.run(sequences.len() * layout.kv_heads, |i| {
        let (sequence, kv_head) = (sequences[i / layout.kv_heads], i % layout.kv_heads);
        let head = HeadGradient { attended, sequence, kv_head, g, to: &to };
        match attended.precision {
            KvPrecision::Bf16 => isa.dispatch(HeadGradientBf16 { head, isa }),
            _ => isa.dispatch(head),
        }
    });
}

struct OutPtr(*mut f32);
// SAFETY: each thread writes the rows of its sequence and the columns of its heads; the buffer outlives the region.
unsafe impl Sync for OutPtr {}

struct HeadGradient<'a> {
    attended: AttentionInputs<'a>,
    sequence: SequenceRows,
    kv_head: usize,
    g: &'a [f32],
    to: &'a OutPtr,
}

/// Some queries of a head, and the range of keys that they see.
#[derive(Debug, Clone, Copy)]
struct QueryTile {
    head: usize,
    /// First token in the sequence, and number of tokens.
    first: usize,
    count: usize,
    /// First key that any query sees, and one past the last.
    from: usize,
    to: usize,
}

/// Keys and values of a head, and the buffers of a tile.
struct AttentionScratch {
    /// `[SUM_ROWS, head_dim]`: queries of a tile, rounded as in the forward pass.
    queries: Vec<f32>,
    /// `[tokens, head_dim]`, rounded as attention read them.
    keys: Vec<f32>,
    keys_transposed: Vec<f32>,
    values_transposed: Vec<f32>,
    /// `[SUM_ROWS, tokens]`: weights of a tile.
    weights: Vec<f32>,
    /// `[SUM_ROWS, tokens]`: gradients of the weights, later of the scores.
    scores: Vec<f32>,
    /// Derivatives of a row's capped scores by its scores; empty without a cap.
    slopes: Vec<f32>,
}

impl Kernel for HeadGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let layout = self.attended.layout;
        let group = layout.heads / layout.kv_heads;
        let tokens = self.sequence.count;
        let mut scratch = self.scratch();
        for head in self.kv_head * group..(self.kv_head + 1) * group {
            for first in (0..tokens).step_by(SUM_ROWS) {
                let tile = self.query_tile(head, first);
                // SAFETY: `attention_gradient` has checked that rows and columns exist and gave them to this thread
                // alone.
                unsafe { self.tile::<S>(tile, &mut scratch) };
            }
        }
    }
}

impl HeadGradient<'_> {
    /// Returns the tile of queries of `head` from `first` on.
    fn query_tile(&self, head: usize, first: usize) -> QueryTile {
        let count = SUM_ROWS.min(self.sequence.count - first);
        let window = self.attended.limits.window.unwrap_or(usize::MAX);
        let from = (first + 1).saturating_sub(window);
        QueryTile { head, first, count, from, to: first + count }
    }

    /// Gathers keys and values, `[tokens, head_dim]`, rounded to the precision of the KV cache.
    fn keys_and_values(&self) -> [Vec<f32>; 2] {
        let AttentionInputs { qkv, layout, precision, .. } = self.attended;
        let (tokens, width) = (self.sequence.count, layout.head_dim);
        [layout.key_column(), layout.value_column()].map(|column| {
            let mut rows = Vec::with_capacity(tokens * width);
            for token in 0..tokens {
                let at = self.column(token, column + self.kv_head * width);
                rows.extend_from_slice(&qkv[at..at + width]);
                precision.round(&mut rows[token * width..]);
            }
            rows
        })
    }

    /// Makes room for the slopes of a row.
    fn slopes(&self) -> Vec<f32> {
        vec![0.0; if self.attended.limits.cap.is_some() { self.sequence.count } else { 0 }]
    }

    fn scratch(&self) -> AttentionScratch {
        let (tokens, width) = (self.sequence.count, self.attended.layout.head_dim);
        let [keys, values] = self.keys_and_values();
        let [keys_transposed, values_transposed] = [&keys, &values].map(|rows| {
            let mut transposed = vec![0.0; tokens * width];
            for (token, row) in rows.chunks_exact(width).enumerate() {
                for (d, &value) in row.iter().enumerate() {
                    transposed[d * tokens + token] = value;
                }
            }
            transposed
        });
        let tile = vec![0.0; SUM_ROWS * tokens];
        AttentionScratch {
            queries: vec![0.0; SUM_ROWS * width],
            keys,
            keys_transposed,
            values_transposed,
            weights: tile.clone(),
            scores: tile,
            slopes: self.slopes(),
        }
    }

    /// Gathers the queries of a tile, rounded as in the forward pass.
    fn gather_queries(&self, tile: QueryTile, queries: &mut [f32]) {
        let AttentionInputs { qkv, layout, precision, .. } = self.attended;
        let width = layout.head_dim;
        for (row, query) in queries.chunks_mut(width).take(tile.count).enumerate() {
            query.copy_from_slice(&qkv[self.column(tile.first + row, tile.head * width)..][..width]);
            precision.round_query(query);
        }
    }

    /// Returns the index in `qkv` of a column of a token of the sequence.
    fn column(&self, token: usize, column: usize) -> usize {
        (self.sequence.first + token) * self.attended.layout.stride() + column
    }

    /// Returns the index in `out` of a head of a token of the sequence.
    fn out(&self, token: usize, head: usize) -> usize {
        let layout = self.attended.layout;
        ((self.sequence.first + token) * layout.heads + head) * layout.head_dim
    }

    /// # Safety
    /// Rows and columns exist, and no other thread uses them.
    #[inline(always)]
    unsafe fn tile<S: Simd>(&self, tile: QueryTile, scratch: &mut AttentionScratch) {
        let layout = self.attended.layout;
        let (tokens, width, stride) = (self.sequence.count, layout.head_dim, layout.stride());
        let QueryTile { head, first, count, from, to } = tile;
        let seen = to - from;
        self.gather_queries(tile, &mut scratch.queries);
        let queries = scratch.queries.as_ptr();
        let g = self.g[self.out(first, head)..].as_ptr();
        let g_stride = layout.heads * width;
        let scratch_stride = tokens;
        let products = |a: *const f32, a_stride: usize, transposed: &[f32], c: *mut f32| SmallProduct {
            a: Strided::rows(a, a_stride),
            b: transposed[from..].as_ptr(),
            b_stride: tokens,
            c,
            c_stride: scratch_stride,
            m: count,
            n: seen,
            k: width,
            into: WriteMode::Place,
        };
        let (weights, scores) = (scratch.weights.as_mut_ptr(), scratch.scores.as_mut_ptr());
        // SAFETY: keys `from..to` exist, the scratch buffers hold a tile, and the rows of the sequence are this
        // thread's.
        unsafe {
            products(queries, width, &scratch.keys_transposed, weights).run::<S>();
            products(g, g_stride, &scratch.values_transposed, scores).run::<S>();
            self.soften_tile::<S>(tile, weights, scores, scratch_stride, &mut scratch.slopes);
            let to_queries = self.to.0.add(self.column(first, head * width));
            let to_keys = self.to.0.add(self.column(from, layout.key_column() + self.kv_head * width));
            let to_values = self.to.0.add(self.column(from, layout.value_column() + self.kv_head * width));
            let keys = scratch.keys[from * width..].as_ptr();
            let of_queries = SmallProduct {
                a: Strided::rows(scores, scratch_stride),
                b: keys,
                b_stride: width,
                c: to_queries,
                c_stride: stride,
                m: count,
                n: width,
                k: seen,
                into: WriteMode::Place,
            };
            of_queries.run::<S>();
            let of_keys = |a: *const f32, b: *const f32, b_stride: usize, c: *mut f32| SmallProduct {
                a: Strided::transposed(a, scratch_stride),
                b,
                b_stride,
                c,
                c_stride: stride,
                m: seen,
                n: width,
                k: count,
                into: WriteMode::Sum,
            };
            of_keys(scores, queries, width, to_keys).run::<S>();
            of_keys(weights, g, g_stride, to_values).run::<S>();
        }
    }

    /// Turns scores of a tile in `weights` into weights, and gradients of the weights in `scores` into those
    /// of the scores.
    ///
    /// # Safety
    /// Both have `stride` floats for each row of the tile.
    #[inline(always)]
    unsafe fn soften_tile<S: Simd>(
        &self,
        tile: QueryTile,
        weights: *mut f32,
        scores: *mut f32,
        stride: usize,
        slopes: &mut [f32],
    ) {
        let (seen, width) = (tile.to - tile.from, self.attended.layout.head_dim);
        for row in 0..tile.count {
            let at = self.out(tile.first + row, tile.head);
            let along = dot::<S>(&self.attended.out[at..at + width], &self.g[at..at + width]);
            // SAFETY: the caller upholds this function's contract.
            let [weights, scores] = [weights, scores]
                .map(|rows| unsafe { std::slice::from_raw_parts_mut(rows.add(row * stride), seen) });
            if let Some(cap) = self.attended.limits.cap {
                cap_scores::<S>(weights, slopes, cap);
            }
            soften::<S>(weights, scores, (along, self.sink(tile.head)), self.visible(tile, row));
            scores.iter_mut().zip(&*slopes).for_each(|(g, slope)| *g *= slope);
        }
    }

    /// Returns the attention sink of a query head.
    fn sink(&self, head: usize) -> Option<f32> {
        self.attended.sinks.get(head).copied()
    }

    /// Returns the keys that a row of a tile sees, relative to the tile's first key.
    #[inline(always)]
    fn visible(&self, tile: QueryTile, row: usize) -> (usize, usize) {
        let end = tile.first + row + 1;
        let from = end.saturating_sub(self.attended.limits.window.unwrap_or(usize::MAX));
        (from - tile.from, end - tile.from)
    }
}

#[inline(always)]
fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = S::splat(0.0);
    for c in (0..a.len()).step_by(LANES) {
        let n = LANES.min(a.len() - c);
        // SAFETY: `a` and `b` have the same number of elements.
        unsafe { sum = S::fma(S::load_head(a.as_ptr().add(c), n), S::load_head(b.as_ptr().add(c), n), sum) };
    }
    S::sum(sum)
}

/// Caps the scores of a row and stores the derivatives in `slopes`.
#[inline(always)]
fn cap_scores<S: Simd>(scores: &mut [f32], slopes: &mut [f32], cap: f32) {
    for (scores, slopes) in scores.chunks_mut(LANES).zip(slopes.chunks_mut(LANES)) {
        let n = scores.len();
        // SAFETY: `scores` has `n` elements; `slopes` has one for each token of the sequence.
        unsafe {
            let score = capped::<S>(S::load_head(scores.as_ptr(), n), cap);
            S::store_head(scores.as_mut_ptr(), score, n);
            S::store_head(slopes.as_mut_ptr(), cap_slope::<S>(score, cap), n);
        }
    }
}

/// Turns the scores of a row in `weights` into softmax weights, 0 outside the visible range. Turns the
/// gradients of the weights in `scores` into those of the scores, `w (g - along)`, where `along` is the sum
/// of `w g`. The weight of a sink has no gradient, because the sink has no value.
#[inline(always)]
fn soften<S: Simd>(
    weights: &mut [f32],
    scores: &mut [f32],
    (along, sink): (f32, Option<f32>),
    (from, to): (usize, usize),
) {
    for outside in [0..from, to..weights.len()] {
        weights[outside.clone()].fill(0.0);
        scores[outside].fill(0.0);
    }
    let (weights, scores) = (&mut weights[from..to], &mut scores[from..to]);
    let mut largest = S::splat(f32::NEG_INFINITY);
    for c in (0..weights.len()).step_by(LANES) {
        let n = LANES.min(weights.len() - c);
        // SAFETY: `n` lanes exist.
        let v = unsafe { S::load_head(weights.as_ptr().add(c), n) };
        largest = S::max(largest, S::select_head(n, v, S::splat(f32::NEG_INFINITY)));
    }
    let sink = sink.unwrap_or(f32::NEG_INFINITY);
    let largest = S::max_lane(largest).max(sink);
    let of_sink = if sink > f32::NEG_INFINITY { S::max_lane(S::exp(S::splat(sink - largest))) } else { 0.0 };
    let largest = S::splat(largest);
    let mut total = S::splat(0.0);
    for c in (0..weights.len()).step_by(LANES) {
        let n = LANES.min(weights.len() - c);
        // SAFETY: `n` lanes exist.
        unsafe {
            let at = weights.as_mut_ptr().add(c);
            let weight = S::exp(S::sub(S::load_head(at, n), largest));
            total = S::add(total, S::select_head(n, weight, S::splat(0.0)));
            S::store_head(at, weight, n);
        }
    }
    let (inverse, along) = (S::splat(1.0 / (S::sum(total) + of_sink)), S::splat(along));
    for c in (0..weights.len()).step_by(LANES) {
        let n = LANES.min(weights.len() - c);
        // SAFETY: `n` lanes exist in both slices, which have the same length.
        unsafe {
            let (weight, score) = (weights.as_mut_ptr().add(c), scores.as_mut_ptr().add(c));
            let w = S::mul(S::load_head(weight, n), inverse);
            S::store_head(weight, w, n);
            S::store_head(score, S::mul(w, S::sub(S::load_head(score, n), along)), n);
        }
    }
}
