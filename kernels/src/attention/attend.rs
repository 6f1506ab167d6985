//! Queries over the blocks of their sequence, a tile of neighbouring tokens at a time.

use super::layout::{BLOCK_TOKENS, KvRows, KvShape, MAX_HEAD_DIM, QkvLayout};
use crate::{
    element::Element,
    simd::{Kernel, LANES, Simd},
};

/// Positions between two rescalings.
const SPAN: usize = 256;

/// Queries (tokens x heads of a group) that read a key together.
const TILE_ROWS: usize = 6;

/// Cuts slices into tiles of neighbouring tokens whose heads of a group fill a tile.
pub(super) fn tiles<'a>(batch: &[KvRows<'a>], layout: QkvLayout) -> Vec<KvRows<'a>> {
    let tokens = (TILE_ROWS / (layout.heads / layout.kv_heads)).max(1);
    let mut tiles = Vec::new();
    for slice in batch {
        for first in (0..slice.rows).step_by(tokens) {
            tiles.push(KvRows {
                first_row: slice.first_row + first,
                rows: tokens.min(slice.rows - first),
                position: slice.position + first,
                blocks: slice.blocks,
            });
        }
    }
    tiles
}

/// One tile and one key head.
#[derive(Clone, Copy)]
pub(super) struct Attend<'a> {
    pub(super) shape: KvShape,
    pub(super) layer: usize,
    pub(super) qkv: &'a [f32],
    pub(super) layout: QkvLayout,
    pub(super) tile: KvRows<'a>,
    pub(super) kv_head: usize,
    pub(super) window: usize,
    pub(super) out: *mut f32,
}

/// With the memory of the blocks.
pub(super) struct AttendIn<'a, E> {
    pub(super) data: *const E,
    pub(super) attend: Attend<'a>,
}

impl<E: Element> Kernel for AttendIn<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let group = self.attend.layout.heads / self.attend.layout.kv_heads;
        let rows = self.attend.tile.rows * group;
        let mut first = 0;
        while first < rows {
            first += match S::TILE.min(rows - first) {
                6.. => self.rows::<S, 6, 2>(first, group),
                4.. => self.rows::<S, 4, 2>(first, group),
                3 => self.rows::<S, 3, 4>(first, group),
                2 => self.rows::<S, 2, 4>(first, group),
                _ => self.rows::<S, 1, 8>(first, group),
            };
        }
    }
}

/// A query, what it may see, and its softmax so far.
#[derive(Clone, Copy)]
struct Query {
    q: *const f32,
    out: *mut f32,
    /// First and one past the last visible position.
    visible: (usize, usize),
    largest: f32,
    sum: f32,
}

impl<E: Element> AttendIn<'_, E> {
    /// `R` (token, head) rows of the tile from `first` on; returns `R`. Scores of `B` blocks are taken together: each is a chain of
    /// multiply-adds that wait for each other, and `R * B` chains side by side fill the time.
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const B: usize>(&self, first: usize, group: usize) -> usize {
        let mut queries: [Query; R] = std::array::from_fn(|r| self.query(first + r, group));
        let mut sums = [[0.0f32; MAX_HEAD_DIM]; R];
        let mut scores = [[0.0f32; SPAN]; R];
        let begin = queries.iter().map(|q| q.visible.0).min().unwrap_or(0);
        let end = queries.iter().map(|q| q.visible.1).max().unwrap_or(0);
        let mut span = begin / SPAN * SPAN;
        while span < end {
            let blocks = (span.max(begin) / BLOCK_TOKENS, end.min(span + SPAN).div_ceil(BLOCK_TOKENS));
            let mut block = blocks.0;
            while block < blocks.1 {
                block += match blocks.1 - block {
                    left if left >= B => self.score::<S, R, B>(&queries, block, span, &mut scores),
                    _ => self.score::<S, R, 1>(&queries, block, span, &mut scores),
                };
            }
            let seen = (span.max(begin) - span, end.min(span + SPAN) - span);
            for ((query, scores), sums) in queries.iter_mut().zip(&mut scores).zip(&mut sums) {
                self.soften::<S>(query, span, seen, scores, sums);
            }
            self.mix::<S, R>(span, seen, &scores, &mut sums);
            span += SPAN;
        }
        for (query, sums) in queries.iter().zip(&sums) {
            self.finish::<S>(query, sums);
        }
        R
    }

    #[inline(always)]
    fn query(&self, row: usize, group: usize) -> Query {
        let Attend { layout, tile, kv_head, window, .. } = self.attend;
        let (token, head) = (row / group, kv_head * group + row % group);
        let position = tile.position + token;
        let row = tile.first_row + token;
        let width = layout.heads * layout.head_dim;
        Query {
            q: self.attend.qkv[row * layout.stride() + head * layout.head_dim..].as_ptr(),
            // SAFETY: `attend` has checked that out has this row.
            out: unsafe { self.attend.out.add(row * width + head * layout.head_dim) },
            visible: ((position + 1).saturating_sub(window), position + 1),
            largest: f32::NEG_INFINITY,
            sum: 0.0,
        }
    }

    /// The keys of this head in a block of the sequence.
    #[inline(always)]
    fn keys(&self, block: usize) -> *const E {
        let Attend { shape, layer, kv_head, tile, .. } = self.attend;
        let at = tile.blocks[block] as usize * shape.block_elements()
            + (layer * shape.kv_heads + kv_head) * shape.head_elements();
        // SAFETY: `check` has seen that the block exists.
        unsafe { self.data.add(at) }
    }

    /// Scores of the sixteen positions of each of `B` blocks from `block` on; returns `B`.
    #[inline(always)]
    fn score<S: Simd, const R: usize, const B: usize>(
        &self,
        queries: &[Query; R],
        block: usize,
        span: usize,
        scores: &mut [[f32; SPAN]; R],
    ) -> usize {
        let keys: [_; B] = std::array::from_fn(|b| self.keys(block + b));
        let mut sums = [[S::splat(0.0); B]; R];
        for d in 0..self.attend.shape.head_dim {
            // SAFETY: the blocks have `head_dim` vectors of keys, a query `head_dim` features.
            unsafe {
                let mut of_blocks = [S::splat(0.0); B];
                for (key, keys) in of_blocks.iter_mut().zip(&keys) {
                    *key = E::load::<S>(keys.add(d * BLOCK_TOKENS));
                }
                for (sums, query) in sums.iter_mut().zip(queries) {
                    let q = S::splat(*query.q.add(d));
                    for (sum, &key) in sums.iter_mut().zip(&of_blocks) {
                        *sum = S::fma(key, q, *sum);
                    }
                }
            }
        }
        for (scores, sums) in scores.iter_mut().zip(&sums) {
            for (b, &sum) in sums.iter().enumerate() {
                let at = (block + b) * BLOCK_TOKENS - span;
                // SAFETY: the block lies within the span.
                unsafe { S::store(scores[at..at + BLOCK_TOKENS].as_mut_ptr(), sum) };
            }
        }
        B
    }

    /// Turns the scores of positions `seen` of a span into weights, 0 where this query does not look, and rescales what
    /// was summed before.
    #[inline(always)]
    fn soften<S: Simd>(
        &self,
        query: &mut Query,
        span: usize,
        seen: (usize, usize),
        scores: &mut [f32; SPAN],
        sums: &mut [f32],
    ) {
        let (from, to) = visible_in(query, span);
        if from >= to {
            scores[seen.0..seen.1].fill(0.0);
            return;
        }
        // Lanes outside are set apart, whatever unused slots hold.
        let (first, last) = (seen.0 / LANES * LANES, seen.1.next_multiple_of(LANES));
        scores[first..from].fill(f32::NEG_INFINITY);
        scores[to..last].fill(f32::NEG_INFINITY);
        let mut largest = S::splat(f32::NEG_INFINITY);
        for at in (first..last).step_by(LANES) {
            // SAFETY: whole vectors of the array.
            largest = S::max(largest, unsafe { S::load(scores[at..at + LANES].as_ptr()) });
        }
        let largest = query.largest.max(S::max_lane(largest));
        let rescale = exp_one::<S>(query.largest - largest);
        let mut total = S::splat(0.0);
        for at in (first..last).step_by(LANES) {
            // SAFETY: whole vectors of the array.
            unsafe {
                let p = scores[at..at + LANES].as_mut_ptr();
                let weight = S::exp(S::sub(S::load(p), S::splat(largest)));
                let below_end = S::select_head(to.saturating_sub(at).min(LANES), weight, S::splat(0.0));
                let weight = S::select_head(from.saturating_sub(at).min(LANES), S::splat(0.0), below_end);
                S::store(p, weight);
                total = S::add(total, weight);
            }
        }
        query.largest = largest;
        query.sum = query.sum * rescale + S::sum(total);
        for at in (0..self.attend.shape.padded()).step_by(LANES) {
            // SAFETY: whole vectors of an array of the widest head.
            unsafe {
                let p = sums[at..at + LANES].as_mut_ptr();
                S::store(p, S::mul(S::load(p), S::splat(rescale)));
            }
        }
    }

    /// `sums += weights * values` over positions `range` of the span. A row that does not see a position has the weight 0
    /// for it; what it is multiplied with was written by the row's own sequence, so it is a number.
    #[inline(always)]
    fn mix<S: Simd, const R: usize>(
        &self,
        span: usize,
        range: (usize, usize),
        weights: &[[f32; SPAN]; R],
        sums: &mut [[f32; MAX_HEAD_DIM]; R],
    ) {
        let padded = self.attend.shape.padded();
        let mut column = 0;
        while column < padded {
            column += match (padded - column) / LANES {
                4.. => self.add_columns::<S, R, 4>(span, range, weights, sums, column),
                _ => self.add_columns::<S, R, 1>(span, range, weights, sums, column),
            };
        }
    }

    #[inline(always)]
    fn add_columns<S: Simd, const R: usize, const V: usize>(
        &self,
        span: usize,
        range: (usize, usize),
        weights: &[[f32; SPAN]; R],
        sums: &mut [[f32; MAX_HEAD_DIM]; R],
        column: usize,
    ) -> usize {
        let shape = self.attend.shape;
        let mut acc = [[S::splat(0.0); V]; R];
        // SAFETY: columns lie within the padded head; blocks exist for every visible position.
        unsafe {
            for (acc, sums) in acc.iter_mut().zip(sums.iter()) {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = S::load(sums.as_ptr().add(column + v * LANES));
                }
            }
            let mut at = range.0;
            while at < range.1 {
                let position = span + at;
                let values = self.keys(position / BLOCK_TOKENS).add(shape.key_elements() + column);
                let end = range.1.min((position / BLOCK_TOKENS + 1) * BLOCK_TOKENS - span);
                while at < end {
                    let value = values.add((span + at) % BLOCK_TOKENS * shape.padded());
                    let mut vectors = [S::splat(0.0); V];
                    for (v, vector) in vectors.iter_mut().enumerate() {
                        *vector = E::load::<S>(value.add(v * LANES));
                    }
                    for (acc, weights) in acc.iter_mut().zip(weights) {
                        let weight = S::splat(*weights.as_ptr().add(at));
                        for (acc, &vector) in acc.iter_mut().zip(&vectors) {
                            *acc = S::fma(vector, weight, *acc);
                        }
                    }
                    at += 1;
                }
            }
            for (acc, sums) in acc.iter().zip(sums.iter_mut()) {
                for (v, &acc) in acc.iter().enumerate() {
                    S::store(sums.as_mut_ptr().add(column + v * LANES), acc);
                }
            }
        }
        V * LANES
    }

    #[inline(always)]
    fn finish<S: Simd>(&self, query: &Query, sums: &[f32; MAX_HEAD_DIM]) {
        let inverse = S::splat(1.0 / query.sum);
        let head_dim = self.attend.shape.head_dim;
        let mut c = 0;
        while c < head_dim {
            // SAFETY: out has `head_dim` elements for this head, the array more.
            unsafe {
                let v = S::mul(S::load(sums.as_ptr().add(c)), inverse);
                S::store_head(query.out.add(c), v, LANES.min(head_dim - c));
            }
            c += LANES;
        }
    }
}

/// The visible positions of a span, relative to it.
#[inline(always)]
fn visible_in(query: &Query, span: usize) -> (usize, usize) {
    let (from, to) = query.visible;
    (from.max(span) - span, to.min(span + SPAN).max(span) - span)
}

#[inline(always)]
fn exp_one<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: a whole vector of the array.
    unsafe { S::store(lanes.as_mut_ptr(), S::exp(S::splat(x))) };
    lanes[0]
}
