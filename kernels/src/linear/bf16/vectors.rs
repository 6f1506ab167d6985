//! Products in bf16 by vectors: the sums of the matrix unit, in its order.
//!
//! Activations and weights are decoded to floats that are bf16, [`DEPTH`] columns of [`SIDE`] panels at a
//! time, and all rows of a block use them. Between these blocks the sums are kept exactly in `out`.
//!
//! The unit takes and gives denormals as zero. Where no product and no sum of products can be one, a plain
//! fused multiply-add gives the same bits: all products are whole multiples of the product of the smallest
//! bits, and so are their sums. Each block of a row and of a panel keeps the [`Magnitudes`] for this check.

use std::{marker::PhantomData, ops::Range};

use super::Chunk;
use crate::{
    activations::{GROUP, TiledRows},
    linear::{
        out_panels::OutPanels,
        pack::PackedMatrix,
        part::{DecodeScratch, blocks},
        transposed::SumFrom,
        values::{Values, decode_columns, with_values},
    },
    simd::{Kernel, LANES, Simd},
};

/// Columns that are decoded at once, for [`SIDE`] panels: 32 KB.
const DEPTH: usize = 4 * GROUP;
const SIDE: usize = 4;

/// Rows per decoding of the weights.
const ROW_BLOCK: usize = 64;

/// Weights whose values are decoded to floats.
pub(super) trait DecodedWeights: Copy {
    /// Decodes `columns`, whole groups, of a panel to one vector per column; missing columns are zeros.
    ///
    /// # Safety
    /// The panel exists, and `to` has room for the vectors.
    unsafe fn decode<S: Simd>(self, panel: usize, columns: Range<usize>, to: *mut f32);
}

impl DecodedWeights for &PackedMatrix {
    #[inline(always)]
    unsafe fn decode<S: Simd>(self, panel: usize, columns: Range<usize>, to: *mut f32) {
        with_values!(self.packing(), V => {
            S::call(DecodePanel::<V> { w: self, panel, columns, to, values: PhantomData });
        });
    }
}

struct DecodePanel<'a, V> {
    w: &'a PackedMatrix,
    panel: usize,
    columns: Range<usize>,
    to: *mut f32,
    values: PhantomData<V>,
}

impl<V: Values> Kernel for DecodePanel<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: the caller of `decode` guarantees panel and room.
        unsafe { decode_columns::<V, S>(self.w, self.panel, self.columns, self.to) };
    }
}

pub(super) struct VectorChunk<'a, W>(pub(super) Chunk<'a, W>);

impl<W: DecodedWeights> Kernel for VectorChunk<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Chunk { x, weights, panels, from, out } = self.0;
        let mut decoded = DecodeScratch::<{ SIDE * DEPTH * LANES }>::new();
        let mut activations = DecodeScratch::<{ ROW_BLOCK * DEPTH }>::new();
        let mut block = Block {
            x,
            from,
            out,
            rows: 0..0,
            panels: 0..0,
            depth: 0..0,
            weights: decoded.as_mut_ptr(),
            activations: activations.as_mut_ptr(),
            of_panels: [Magnitudes::NONE; SIDE],
            of_rows: [Magnitudes::NONE; ROW_BLOCK],
        };
        for rows in blocks(0..x.rows(), ROW_BLOCK) {
            block.rows = rows;
            for depth in blocks(0..x.groups() * GROUP, DEPTH) {
                block.depth = depth;
                S::call(DecodeRows(&mut block));
                for panels in blocks(panels.clone(), SIDE) {
                    block.panels = panels;
                    block.decode_panels::<S>(weights);
                    S::call(BlockSums(&block));
                }
            }
        }
    }
}

/// Bits of the smallest value that is not zero, and of the largest, without signs.
#[derive(Debug, Clone, Copy)]
struct Magnitudes {
    smallest: u32,
    largest: u32,
}

impl Magnitudes {
    const NONE: Self = Self { smallest: u32::MAX, largest: 0 };

    /// True if no sum of products can be a denormal, and no product exceeds the largest float.
    #[inline(always)]
    fn are_tame(self, other: Self) -> bool {
        // A bf16 with the exponent field `e` is a multiple of 2^(e - 134), and less than 2^(e - 126).
        let (least, most) = (self.smallest >> 23, self.largest >> 23);
        least + (other.smallest >> 23) >= 2 * 134 - 126 && most + (other.largest >> 23) <= 2 * 126 + 127
    }
}

/// Sums of `rows` with `panels` over the columns `depth`.
struct Block<'a> {
    x: TiledRows<'a>,
    from: SumFrom,
    out: OutPanels<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    depth: Range<usize>,
    /// `[SIDE, DEPTH, LANES]`: the values of the weights.
    weights: *mut f32,
    /// `[ROW_BLOCK, DEPTH]`: the values of the activations.
    activations: *mut f32,
    of_panels: [Magnitudes; SIDE],
    of_rows: [Magnitudes; ROW_BLOCK],
}

/// Rounds `len` values half up to bf16, replaces denormals by zeros, and measures them.
// Integers, which the compiler turns into vectors.
#[inline(always)]
unsafe fn round_in_place(values: *mut f32, len: usize) -> Magnitudes {
    let (mut smallest, mut largest) = (u32::MAX, 0);
    let mut i = 0;
    while i < len {
        // SAFETY: the caller guarantees the values.
        let value = unsafe { &mut *values.add(i).cast::<u32>() };
        let (sign, magnitude) = (*value & 0x8000_0000, *value & 0x7fff_ffff);
        let rounded = if magnitude > 0x7f80_0000 { 0x7fc0_0000 } else { (magnitude + 0x8000) & 0xffff_0000 };
        let magnitude = if rounded < 0x0080_0000 { 0 } else { rounded };
        *value = sign | magnitude;
        // Zero becomes the largest number.
        let other_than_zero = magnitude.wrapping_sub(1);
        smallest = if other_than_zero < smallest { other_than_zero } else { smallest };
        largest = if magnitude > largest { magnitude } else { largest };
        i += 1;
    }
    Magnitudes { smallest: smallest.saturating_add(1), largest }
}

struct DecodeRows<'a, 'b>(&'a mut Block<'b>);

impl Kernel for DecodeRows<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let block = self.0;
        for (i, row) in block.rows.clone().enumerate() {
            let to = block.activations.wrapping_add(i * DEPTH);
            for group in block.depth.start / GROUP..block.depth.end / GROUP {
                let at = group * GROUP - block.depth.start;
                for (k, &bits) in block.x.row(row, group).iter().enumerate() {
                    // SAFETY: there is room for `DEPTH` columns of each row.
                    unsafe { to.add(at + k).write(f32::from_bits(u32::from(bits) << 16)) };
                }
            }
            // SAFETY: these columns were just written.
            block.of_rows[i] = unsafe { round_in_place(to, block.depth.len()) };
        }
    }
}

impl Block<'_> {
    #[inline(always)]
    fn decode_panels<S: Simd>(&mut self, weights: impl DecodedWeights) {
        for (side, panel) in self.panels.clone().enumerate() {
            let to = self.weights.wrapping_add(side * DEPTH * LANES);
            // SAFETY: the panel exists, and the buffer holds `DEPTH` vectors for each panel.
            unsafe { weights.decode::<S>(panel, self.depth.clone(), to) };
            self.of_panels[side] = S::call(RoundPanel { values: to, len: self.depth.len() * LANES });
        }
    }
}

struct RoundPanel {
    values: *mut f32,
    len: usize,
}

impl Kernel for RoundPanel {
    type Output = Magnitudes;

    #[inline(always)]
    fn run<S: Simd>(self) -> Magnitudes {
        // SAFETY: the block has just decoded these values.
        unsafe { round_in_place(self.values, self.len) }
    }
}

struct BlockSums<'a, 'b>(&'a Block<'b>);

impl Kernel for BlockSums<'_, '_> {
    type Output = ();

    // Eight chains of sums or more hide the latency of additions, as far as the registers allow.
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Range { start: mut row, end } = self.0.rows;
        while row < end {
            row += match (S::TILE, end - row) {
                (8.., 8..) => self.panels::<S, 8, 1>(row),
                (8.., 4..) => self.panels::<S, 4, 1>(row),
                (8.., 2..) => self.panels::<S, 2, 2>(row),
                (8.., _) => self.panels::<S, 1, 4>(row),
                (2.., 2..) => self.panels::<S, 2, 1>(row),
                (2.., _) => self.panels::<S, 1, 2>(row),
                _ => self.panels::<S, 1, 1>(row),
            };
        }
    }
}

impl BlockSums<'_, '_> {
    #[inline(always)]
    fn panels<S: Simd, const M: usize, const P: usize>(&self, row: usize) -> usize {
        let panels = self.0.panels.len();
        let mut side = 0;
        while side < panels {
            side += if panels - side >= P {
                self.tile::<S, M, P>(row, side)
            } else {
                self.tile::<S, M, 1>(row, side)
            };
        }
        M
    }

    #[inline(always)]
    fn tile<S: Simd, const M: usize, const P: usize>(&self, row: usize, side: usize) -> usize {
        let mut are_tame = true;
        for m in 0..M {
            for p in 0..P {
                let of_row = self.0.of_rows[row - self.0.rows.start + m];
                are_tame &= of_row.are_tame(self.0.of_panels[side + p]);
            }
        }
        if are_tame {
            self.sum::<S, M, P, false>(row, side);
        } else {
            self.sum::<S, M, P, true>(row, side);
        }
        P
    }

    /// Sums `M` rows with `P` panels, continuing from the sums of the previous block in `out`.
    #[inline(always)]
    fn sum<S: Simd, const M: usize, const P: usize, const FLUSH: bool>(&self, row: usize, side: usize) {
        let Block { x, out, rows, panels, depth, weights, activations, .. } = self.0;
        let panel = panels.start + side;
        let mut sums = [[S::splat(0.0); P]; M];
        // SAFETY: rows, panels and columns exist; the outputs lie within `out`, and no other chunk uses them.
        unsafe {
            if depth.start > 0 || self.0.from == SumFrom::Out {
                for (m, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = out.kept::<S>(panel + p, row + m);
                    }
                }
            }
            let values = activations.add((row - rows.start) * DEPTH);
            let w = weights.add(side * DEPTH * LANES);
            for group in 0..depth.len() / GROUP {
                let (mut even, mut odd) = ([[S::splat(0.0); P]; M], [[S::splat(0.0); P]; M]);
                for k in (group * GROUP..(group + 1) * GROUP).step_by(2) {
                    add::<S, M, P, FLUSH>(values.add(k), w.add(k * LANES), &mut even);
                    add::<S, M, P, FLUSH>(values.add(k + 1), w.add((k + 1) * LANES), &mut odd);
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        let both = S::flushed(S::add(even[m][p], odd[m][p]));
                        *sum = S::flushed(S::add(*sum, both));
                    }
                }
            }
            let is_complete = depth.end == x.groups() * GROUP;
            for (m, sums) in sums.iter().enumerate() {
                for (p, &sum) in sums.iter().enumerate() {
                    if is_complete {
                        out.put::<S>(panel + p, row + m, sum);
                    } else {
                        out.keep::<S>(panel + p, row + m, sum);
                    }
                }
            }
        }
    }
}

/// Adds the products of one column of `M` rows at `x` and `P` panels at `w`.
#[inline(always)]
unsafe fn add<S: Simd, const M: usize, const P: usize, const FLUSH: bool>(
    x: *const f32,
    w: *const f32,
    sums: &mut [[S::F; P]; M],
) {
    // SAFETY: the caller guarantees the column in rows and panels.
    unsafe {
        let mut weights = [S::splat(0.0); P];
        for (p, weights) in weights.iter_mut().enumerate() {
            *weights = S::load(w.add(p * DEPTH * LANES));
        }
        for (m, sums) in sums.iter_mut().enumerate() {
            let x = S::splat(*x.add(m * DEPTH));
            for (sum, &w) in sums.iter_mut().zip(&weights) {
                *sum = if FLUSH { S::fma_flushed(x, w, *sum) } else { S::fma(x, w, *sum) };
            }
        }
    }
}
