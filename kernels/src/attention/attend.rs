//! Computes attention of a tile of neighbouring tokens over the blocks of their sequence.

use std::marker::PhantomData;

use super::{
    kv_dtype::KvElement,
    layout::{BLOCK_TOKENS, KvRows, KvShape, QkvLayout},
    sum::SoftmaxSum,
};
use crate::{
    elementwise::capped,
    simd::{Kernel, LANES, Simd, prefetch},
};

/// Positions between two rescalings.
pub(super) const SPAN: usize = 256;

/// Positions per segment. Segment sums are joined in the order of positions, for any number of threads.
pub(super) const SEGMENT: usize = 2 * SPAN;

/// Queries (tokens x heads of a group) that share one read of a key.
pub(super) const TILE_ROWS: usize = 6;

/// Cuts slices into tiles of neighbouring tokens whose heads of a group are about `tile_rows` rows.
pub(super) fn tiles<'a>(batch: &[KvRows<'a>], layout: QkvLayout, tile_rows: usize) -> Vec<KvRows<'a>> {
    let tokens = (tile_rows / (layout.heads / layout.kv_heads)).max(1);
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

/// Returns the first segment that a tile sees, and one past the last.
pub(super) fn segments(tile: KvRows<'_>, window: usize) -> (usize, usize) {
    let begin = (tile.position + 1).saturating_sub(window);
    (begin / SEGMENT, (tile.position + tile.rows).div_ceil(SEGMENT))
}

/// Attention of one tile and one key head.
#[derive(Clone, Copy)]
pub(super) struct Attend<'a> {
    pub(super) data: *const u8,
    pub(super) shape: KvShape,
    pub(super) layer: usize,
    pub(super) qkv: &'a [f32],
    pub(super) layout: QkvLayout,
    pub(super) tile: KvRows<'a>,
    pub(super) kv_head: usize,
    pub(super) window: usize,
    /// Soft cap of scores.
    pub(super) cap: Option<f32>,
    /// Sink of each query head, or empty.
    pub(super) sinks: &'a [f32],
    /// First of the tile's segments to compute, and one past the last.
    pub(super) segments: (usize, usize),
    pub(super) to: TileTarget,
}

/// Destination of a tile's results.
#[derive(Clone, Copy)]
pub(super) enum TileTarget {
    /// Weighted means, in rows of all heads.
    Out(*mut f32),
    /// Unfinished sums, one for each row and head of the tile.
    Part(*mut f32),
}

/// [`Attend`] over blocks of elements `E`.
pub(super) struct AttendIn<'a, E>(pub(super) Attend<'a>, pub(super) PhantomData<E>);

impl<E: KvElement> Kernel for AttendIn<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let rows = self.0.rows();
        let mut first = 0;
        while first < rows {
            first += match S::TILE.min(rows - first) {
                6.. => self.rows::<S, 6, 2>(first),
                4.. => self.rows::<S, 4, 2>(first),
                3 => self.rows::<S, 3, 4>(first),
                2 => self.rows::<S, 2, 4>(first),
                _ => self.rows::<S, 1, 8>(first),
            };
        }
    }
}

impl Attend<'_> {
    /// Returns the number of (token, head) pairs of the tile.
    #[inline(always)]
    pub(super) fn rows(&self) -> usize {
        self.tile.rows * self.group()
    }

    /// Returns one past the last position that any row of the tile sees.
    #[inline(always)]
    pub(super) fn positions(&self) -> usize {
        self.tile.position + self.tile.rows
    }

    #[inline(always)]
    fn group(&self) -> usize {
        self.layout.heads / self.layout.kv_heads
    }

    /// Returns the query of a tile row, the first position that the row sees, and one past the last.
    #[inline(always)]
    pub(super) fn query(&self, row: usize) -> Query {
        let (token, head) = self.place(row);
        let position = self.tile.position + token - self.tile.first_row;
        Query {
            q: self.qkv[token * self.layout.stride() + head * self.layout.head_dim..].as_ptr(),
            visible: ((position + 1).saturating_sub(self.window), position + 1),
        }
    }

    /// Returns the keys of this head in a block of the sequence.
    #[inline(always)]
    pub(super) fn keys(&self, block: usize) -> *const u8 {
        let block = self.tile.blocks[block] as usize;
        let at = block * self.shape.block_bytes() + self.shape.head_offset(self.layer, self.kv_head);
        // SAFETY: `check` has verified that the block exists.
        unsafe { self.data.add(at) }
    }

    /// Returns the batch row and the head of a tile row.
    #[inline(always)]
    fn place(&self, row: usize) -> (usize, usize) {
        (self.tile.first_row + row / self.group(), self.kv_head * self.group() + row % self.group())
    }

    #[inline(always)]
    pub(super) fn put<S: Simd>(&self, row: usize, sum: &SoftmaxSum) {
        let (head_dim, padded) = (self.layout.head_dim, self.shape.padded());
        match self.to {
            TileTarget::Out(out) => {
                let (token, head) = self.place(row);
                let inverse = 1.0 / sum.total::<S>(self.sinks.get(head).copied());
                // SAFETY: `attend` has checked that `out` has this row.
                unsafe {
                    let out = out.add((token * self.layout.heads + head) * head_dim);
                    sum.finish::<S>(inverse, out, head_dim);
                }
            }
            // SAFETY: the target has room for a sum of each row.
            TileTarget::Part(part) => unsafe { sum.save(part.add(row * SoftmaxSum::saved(padded)), padded) },
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Query {
    pub(super) q: *const f32,
    /// First visible position and one past the last.
    pub(super) visible: (usize, usize),
}

impl Query {
    /// Returns the visible positions of a span, relative to its start.
    #[inline(always)]
    pub(super) fn visible_in(&self, span: usize) -> (usize, usize) {
        let (from, to) = self.visible;
        (from.max(span) - span, to.min(span + SPAN).max(span) - span)
    }
}

impl<E: KvElement> AttendIn<'_, E> {
    /// Computes `R` (token, head) rows of the tile from `first` on; returns `R`. Scores of `B` blocks are
    /// computed together: each is a chain of dependent multiply-adds, and `R * B` parallel chains hide their
    /// latency.
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const B: usize>(&self, first: usize) -> usize {
        let queries: [Query; R] = std::array::from_fn(|r| self.0.query(first + r));
        let (begin, end) = self.0.segments;
        let padded = self.0.shape.padded();
        let mut sums = [SoftmaxSum::empty(padded); R];
        self.segment::<S, R, B>(&queries, begin, &mut sums);
        for segment in begin + 1..end {
            let mut more = [SoftmaxSum::empty(padded); R];
            self.segment::<S, R, B>(&queries, segment, &mut more);
            for (sum, more) in sums.iter_mut().zip(&more) {
                sum.join::<S>(more, padded);
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            self.0.put::<S>(first + r, sum);
        }
        R
    }

    /// Sums the positions of `segment` that these queries see.
    #[inline(always)]
    fn segment<S: Simd, const R: usize, const B: usize>(
        &self,
        queries: &[Query; R],
        segment: usize,
        sums: &mut [SoftmaxSum; R],
    ) {
        let mut scores = [[0.0f32; SPAN]; R];
        let begin = queries.iter().map(|q| q.visible.0).min().unwrap_or(0).max(segment * SEGMENT);
        let end = queries.iter().map(|q| q.visible.1).max().unwrap_or(0).min((segment + 1) * SEGMENT);
        let mut span = begin / SPAN * SPAN;
        while span < end {
            let blocks = (span.max(begin) / BLOCK_TOKENS, end.min(span + SPAN).div_ceil(BLOCK_TOKENS));
            let mut block = blocks.0;
            while block < blocks.1 {
                block += match blocks.1 - block {
                    left if left >= B => self.score::<S, R, B>(queries, block, span, &mut scores),
                    _ => self.score::<S, R, 1>(queries, block, span, &mut scores),
                };
            }
            let seen = (span.max(begin) - span, end.min(span + SPAN) - span);
            for ((query, scores), sum) in queries.iter().zip(&mut scores).zip(sums.iter_mut()) {
                self.soften::<S>(query, span, seen, scores, sum);
            }
            self.mix::<S, R>(span, seen, &scores, sums);
            span += SPAN;
        }
    }

    #[inline(always)]
    fn keys(&self, block: usize) -> *const E {
        self.0.keys(block).cast()
    }

    /// Returns the key scales of a block of [`KvElement::SCALED`] elements; the value scales follow them.
    #[inline(always)]
    fn scales(&self, block: usize) -> *const f32 {
        // SAFETY: the scales follow the elements of a head.
        unsafe { self.keys(block).add(self.0.shape.head_elements()).cast() }
    }

    /// Computes the scores of the sixteen positions of each of `B` blocks from `block` on; returns `B`.
    #[inline(always)]
    fn score<S: Simd, const R: usize, const B: usize>(
        &self,
        queries: &[Query; R],
        block: usize,
        span: usize,
        scores: &mut [[f32; SPAN]; R],
    ) -> usize {
        let keys: [_; B] = std::array::from_fn(|b| self.keys(block + b));
        // The hardware prefetcher cannot predict the next blocks, so keys and values are prefetched line by line.
        let end = self.0.positions().div_ceil(BLOCK_TOKENS);
        let later: [_; B] = std::array::from_fn(|b| self.keys((block + B + b).min(end - 1)).cast::<u8>());
        let stride = self.0.shape.head_bytes() / self.0.shape.head_dim;
        let mut sums = [[S::splat(0.0); B]; R];
        for d in 0..self.0.shape.head_dim {
            // SAFETY: the blocks have `head_dim` vectors of keys, a query `head_dim` features.
            unsafe {
                let mut of_blocks = [S::splat(0.0); B];
                for ((key, keys), later) in of_blocks.iter_mut().zip(&keys).zip(&later) {
                    *key = E::load::<S>(keys.add(d * BLOCK_TOKENS));
                    prefetch(later.wrapping_add(d * stride));
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
                // SAFETY: the block lies within the span, and has a scale for each position if its elements are scaled.
                unsafe {
                    let score = if E::SCALED { S::mul(sum, S::load(self.scales(block + b))) } else { sum };
                    let score = self.0.cap.map_or(score, |cap| capped::<S>(score, cap));
                    S::store(scores[at..at + BLOCK_TOKENS].as_mut_ptr(), score);
                }
            }
        }
        B
    }

    /// Turns the scores of positions `seen` of a span into softmax weights and rescales the earlier sums. A
    /// position that this query does not see gets weight 0.
    #[inline(always)]
    fn soften<S: Simd>(
        &self,
        query: &Query,
        span: usize,
        seen: (usize, usize),
        scores: &mut [f32; SPAN],
        sum: &mut SoftmaxSum,
    ) {
        let (from, to) = query.visible_in(span);
        if from >= to {
            scores[seen.0..seen.1].fill(0.0);
            return;
        }
        // Positions outside the visible range are masked, so contents of unused slots have no effect.
        let (first, last) = (seen.0 / LANES * LANES, seen.1.next_multiple_of(LANES));
        scores[first..from].fill(f32::NEG_INFINITY);
        scores[to..last].fill(f32::NEG_INFINITY);
        let mut largest = S::splat(f32::NEG_INFINITY);
        for at in (first..last).step_by(LANES) {
            // SAFETY: the access covers whole vectors of the array.
            largest = S::max(largest, unsafe { S::load(scores[at..at + LANES].as_ptr()) });
        }
        let largest = sum.largest.max(S::max_lane(largest));
        let mut total = S::splat(0.0);
        for at in (first..last).step_by(LANES) {
            // SAFETY: the accesses cover whole vectors of the array, and the scales of a block's values.
            unsafe {
                let p = scores[at..at + LANES].as_mut_ptr();
                let weight = S::exp(S::sub(S::load(p), S::splat(largest)));
                let below_end = S::select_head(to.saturating_sub(at).min(LANES), weight, S::splat(0.0));
                let weight = S::select_head(from.saturating_sub(at).min(LANES), S::splat(0.0), below_end);
                total = S::add(total, weight);
                if E::SCALED {
                    let scales = self.scales((span + at) / BLOCK_TOKENS).add(BLOCK_TOKENS);
                    S::store(p, S::mul(weight, S::load(scales)));
                } else {
                    S::store(p, weight);
                }
            }
        }
        sum.rescale::<S>(largest, self.0.shape.padded());
        sum.weight += S::sum(total);
    }

    /// Computes `sums += weights * values` over positions `range` of the span. A row has weight 0 for a
    /// position that it does not see; the value there was written by the row's own sequence, so it is finite.
    #[inline(always)]
    fn mix<S: Simd, const R: usize>(
        &self,
        span: usize,
        range: (usize, usize),
        weights: &[[f32; SPAN]; R],
        sums: &mut [SoftmaxSum; R],
    ) {
        let padded = self.0.shape.padded();
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
        sums: &mut [SoftmaxSum; R],
        column: usize,
    ) -> usize {
        let shape = self.0.shape;
        let mut acc = [[S::splat(0.0); V]; R];
        // SAFETY: columns lie within the padded head; blocks exist for every visible position.
        unsafe {
            for (acc, sum) in acc.iter_mut().zip(sums.iter()) {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = S::load(sum.values().add(column + v * LANES));
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
            for (acc, sum) in acc.iter().zip(sums.iter_mut()) {
                for (v, &acc) in acc.iter().enumerate() {
                    S::store(sum.values_mut().add(column + v * LANES), acc);
                }
            }
        }
        V * LANES
    }
}
