//! Backward pass of linear layers: the gradient at the inputs, `out = Σ g · W` over parts with one input.
//!
//! ```text
//! out[r, k] = sum over parts, over o: g[r, column + o] * w[o, k]     w: values of the weights (`values`)
//! ```
//!
//! Biases have no effect. Each element of `out` is a sum of sums: [`TALL`] outputs at a time form a chain of
//! fused multiply-adds from zero, `o` ascending, and these chains are added in the order of parts. A single
//! chain over a vocabulary would lose low digits. The bits depend on the weights and the row of `g` alone.
//!
//! [`linear_transposed_rounded`] rounds to 16-bit integers, gradients by a scale per row of a tile, values by
//! a scale per input of a tile, and multiplies two outputs per step: twice the rate of 32 bits on all
//! processors. The sum of a tile is exact, so its bits depend on the row alone and are equal on every
//! processor.
//!
//! Panels hold sixteen *outputs* in a vector, but this product needs sixteen *inputs* in a vector, each
//! summing over the outputs. A tile of [`TALL`] outputs by [`WIDE`] inputs is therefore decoded and
//! transposed into a buffer in the first-level cache, and all rows of `g` use it; `out` keeps the sums so
//! far. Threads divide the inputs, so no thread waits for another's sums.

mod arithmetic;
mod words;

use std::{marker::PhantomData, ops::Range};

use arithmetic::{Floats, Gradients, TileOffset};
use words::RoundedGradients;

use super::{
    pack::PackedMatrix,
    part::{DecodeScratch, LinearPart, OutPtr, blocks, check_parts},
    values::{Values, decode_outputs, with_values},
};
use crate::{
    activations::GROUP,
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Outputs and inputs of a decoded tile: 16 KB.
const TALL: usize = 64;
const WIDE: usize = 64;
/// Size of a tile buffer: `TALL` x `WIDE` decoded values, and `WIDE` more numbers.
const TILE: usize = (TALL + 1) * WIDE;

/// Initial value of the sums over outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SumFrom {
    /// Zero; the earlier contents of `out` are ignored.
    Zero,
    /// The contents of `out`: sums over earlier outputs. If a matrix is cut at a multiple of
    /// [`PackedLayout::CUT_ROWS`](super::PackedLayout::CUT_ROWS), the bits equal those of the uncut matrix.
    Out,
}

const _: () = assert!(super::PackedLayout::CUT_ROWS == TALL);

/// Computes the gradient at the inputs of `parts` for `rows` rows of `g`, which have `stride` elements; `out`
/// is `[rows, columns]`. Without parts it is the initial value of the sums.
///
/// # Panics
/// Panics if the shapes do not match.
#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub fn linear_transposed(
    pool: &mut ThreadPool,
    isa: Isa,
    g: &[f32],
    rows: usize,
    stride: usize,
    parts: &[LinearPart<'_>],
    from: SumFrom,
    out: &mut [f32],
) {
    assert!(g.len() >= rows * stride, "g holds {rows} rows of {stride}");
    over_chunks(pool, isa, Floats { g, rows, stride }, stride, parts, from, out);
}

/// Computes [`linear_transposed`] with rounded gradients and values: to 14 bits of the largest gradient of a
/// row in [`TALL`] outputs, and to 13 bits of the largest value of an input in them.
///
/// # Panics
/// Panics if the shapes do not match.
#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub fn linear_transposed_rounded(
    pool: &mut ThreadPool,
    isa: Isa,
    g: &[f32],
    rows: usize,
    stride: usize,
    parts: &[LinearPart<'_>],
    from: SumFrom,
    out: &mut [f32],
) {
    assert!(g.len() >= rows * stride, "g holds {rows} rows of {stride}");
    let rounded = RoundedGradients::new(pool, isa, &g[..rows * stride], stride, parts);
    over_chunks(pool, isa, rounded.words(), stride, parts, from, out);
}

fn tiles(part: &LinearPart<'_>) -> usize {
    part.matrix.rows().div_ceil(TALL)
}

fn over_chunks<G: Gradients>(
    pool: &mut ThreadPool,
    isa: Isa,
    g: G,
    stride: usize,
    parts: &[LinearPart<'_>],
    from: SumFrom,
    out: &mut [f32],
) {
    let Some(columns) = parts.first().map(|part| part.matrix.columns()) else {
        return if from == SumFrom::Zero {
            out.fill(0.0)
        };
    };
    check_parts(parts, columns, stride);
    assert_eq!(out.len(), g.rows() * columns, "out is {} rows of {columns}", g.rows());
    let out = OutPtr(out.as_mut_ptr());
    let tiles = columns.div_ceil(WIDE);
    let chunk = tiles.div_ceil(4 * pool.threads());
    pool.run(tiles.div_ceil(chunk), |i| {
        let out = &out;
        let inputs = i * chunk * WIDE..columns.min((i + 1) * chunk * WIDE);
        isa.dispatch(GradientChunk { g, parts, inputs, from, out: out.0, columns });
    });
}

struct GradientChunk<'a, G> {
    g: G,
    parts: &'a [LinearPart<'a>],
    inputs: Range<usize>,
    from: SumFrom,
    out: *mut f32,
    columns: usize,
}

impl<G: Gradients> Kernel for GradientChunk<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut scratch = DecodeScratch::<TILE>::new();
        let weights = scratch.as_mut_ptr();
        for inputs in blocks(self.inputs.clone(), WIDE) {
            if self.from == SumFrom::Zero {
                self.clear(&inputs);
            }
            let mut number = 0;
            for part in self.parts {
                for outputs in blocks(0..part.matrix.rows(), TALL) {
                    let tile = MatrixTile { w: part.matrix, outputs, inputs: inputs.clone(), weights };
                    with_values!(part.matrix.packing(), V => S::call(Decode::<V, G>(&tile, PhantomData)));
                    S::call(TileSums { chunk: &self, tile: &tile, number, column: part.column });
                    number += 1;
                }
            }
        }
    }
}

impl<G: Gradients> GradientChunk<'_, G> {
    #[inline(always)]
    fn clear(&self, inputs: &Range<usize>) {
        for row in 0..self.g.rows() {
            // SAFETY: the inputs lie within a row of `out`, and no other chunk uses them; zero bytes are 0.0.
            unsafe { self.out.add(row * self.columns + inputs.start).write_bytes(0, inputs.len()) };
        }
    }
}

struct MatrixTile<'a> {
    w: &'a PackedMatrix,
    outputs: Range<usize>,
    inputs: Range<usize>,
    /// `[TALL, WIDE]`: the decoded values as gradients use them, and room for `[WIDE]` more numbers.
    weights: *mut f32,
}

impl MatrixTile<'_> {
    #[inline(always)]
    fn vectors(&self) -> usize {
        self.inputs.len().div_ceil(LANES)
    }
}

struct Decode<'a, V, G>(&'a MatrixTile<'a>, PhantomData<(V, G)>);

impl<V: Values, G: Gradients> Kernel for Decode<'_, V, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let MatrixTile { w, outputs, inputs, weights } = self.0;
        for panel in outputs.start / LANES..outputs.end.div_ceil(LANES) {
            let to = weights.wrapping_add((panel * LANES - outputs.start) * WIDE);
            for sixteen in blocks(inputs.clone(), LANES) {
                if sixteen.start.is_multiple_of(GROUP) {
                    let group = sixteen.start / GROUP;
                    w.prefetch(panel + TALL / LANES, group * V::GROUP_BYTES, V::GROUP_BYTES);
                }
                // SAFETY: panel and inputs exist and lie in the tile.
                unsafe {
                    let outputs = decode_outputs::<V, S>(w, panel, sixteen.start);
                    for (o, inputs) in outputs.into_iter().enumerate() {
                        S::store(to.add(o * WIDE + sixteen.start - self.0.inputs.start), inputs);
                    }
                }
            }
        }
        // SAFETY: the tile holds the values of these outputs and vectors.
        unsafe { G::pack::<S>(self.0.weights, outputs.len(), self.0.vectors()) };
    }
}

struct TileSums<'a, G> {
    chunk: &'a GradientChunk<'a, G>,
    tile: &'a MatrixTile<'a>,
    /// Index of the tile among those of all parts.
    number: usize,
    column: usize,
}

impl<G: Gradients> Kernel for TileSums<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let vectors = self.tile.vectors();
        let mut vector = 0;
        while vector < vectors {
            // Several vectors share the loads of gradients, as many as leave registers for the sums of some rows. For a
            // single row several vectors hide the latency of dependent sums.
            vector += match (self.chunk.g.rows(), vectors - vector) {
                (1, 4..) => self.rows::<S, 1, 4>(vector),
                (_, 4..) if S::TILE == 8 => self.rows::<S, 6, 4>(vector),
                (_, 2..) if S::TILE == 8 => self.rows::<S, 8, 2>(vector),
                _ if S::TILE == 8 => self.rows::<S, 8, 1>(vector),
                _ => self.rows::<S, 4, 1>(vector),
            };
        }
    }
}

impl<G: Gradients> TileSums<'_, G> {
    /// Computes all rows, up to `M` at a time, for `V` vectors.
    #[inline(always)]
    fn rows<S: Simd, const M: usize, const V: usize>(&self, vector: usize) -> usize {
        let (mut row, end) = (0, self.chunk.g.rows());
        while row + M <= end {
            row += self.sums::<S, M, V>(row, vector);
        }
        while row + 2 <= end {
            row += self.sums::<S, 2, V>(row, vector);
        }
        if row < end {
            self.sums::<S, 1, V>(row, vector);
        }
        V
    }

    /// Sums the tile's outputs for `M` rows and `V` vectors of inputs, and adds the sums to `out`.
    #[inline(always)]
    fn sums<S: Simd, const M: usize, const V: usize>(&self, row: usize, vector: usize) -> usize {
        let MatrixTile { outputs, inputs, weights, .. } = self.tile;
        let from = TileOffset { row, tile: self.number, column: self.column + outputs.start };
        let (first, columns) = (inputs.start + vector * LANES, self.chunk.columns);
        let out = self.chunk.out.wrapping_add(row * columns + first);
        let lanes = inputs.end - first;
        // SAFETY: rows, inputs and outputs exist; no other chunk uses these columns of `out`.
        unsafe {
            let sums = self.chunk.g.sums::<S, M, V>(from, weights.add(vector * LANES), outputs.len());
            for (m, sums) in sums.into_iter().enumerate() {
                let out = out.add(m * columns);
                // Only the last vector of a row can be incomplete.
                for (v, &sum) in sums.iter().enumerate().take(V - 1) {
                    let to = out.add(v * LANES);
                    S::store(to, S::add(S::load(to), sum));
                }
                let (to, lanes) = (out.add((V - 1) * LANES), lanes - (V - 1) * LANES);
                if lanes >= LANES {
                    S::store(to, S::add(S::load(to), sums[V - 1]));
                } else {
                    S::store_head(to, S::add(S::load_head(to, lanes), sums[V - 1]), lanes);
                }
            }
        }
        M
    }
}
