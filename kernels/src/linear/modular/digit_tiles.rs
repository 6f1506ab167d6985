//! Sums over digits on a matrix unit, for many rows and any packing of weights, forward and backward.
//!
//! An integer of a row has `B` signed bytes, eight or six; an integer weight has at most four. The bytes are
//! the integer's *digits*, `sum over i: 256^i digit_i`:
//!
//! ```text
//! out = sum over p < B: 256^p (sum over i + j = p: sum over k: x_j[k] w_i[k])        modulo 2^8B
//! ```
//!
//! The sum takes 26 tile products for eight bytes, or 21 where three digits hold all weights of a panel, and
//! 18 or 15 for six bytes. Scales and minima are part of the integer weights and need no products of their
//! own. For a single row, byte planes (`byte_planes`) are faster, but their groups are scaled for each row,
//! so many rows are slower. Sums of a digit position are 32-bit integers, joined to words once per 1536
//! elements. The sums of one product are joined while the unit computes the next.
//!
//! # Layout
//!
//! - this file: both products.
//! - `rows`, `weights`: rows and weights cut to digits.

mod rows;
mod weights;

use std::{marker::PhantomData, ops::Range};

use super::{
    integer_weights::{DecodeIntegers, decode},
    partition::{Inputs, PanelRange, for_inputs, for_panels},
};
use crate::{
    isa::{Isa, MatrixUnit},
    linear::{
        part::{LinearPart, blocks},
        values::with_values,
    },
    pool::ThreadPool,
    simd::{
        Kernel, LANES, Simd,
        amx::gemm::{AmxGemm, DEPTH},
    },
};

use rows::{DigitRows, OperandSide, SIDE};
use weights::{DEPTHS, DigitScratch, RowSink};

/// Minimum number of rows: with fewer, planes and words are faster.
const WORTH: usize = 8;

/// Bytes of rows that stay in the second-level cache.
const CACHED_BYTES: usize = 5 << 18;

/// True if this module is the fastest for `rows` rows.
pub(super) fn are_worth_it(isa: Isa, rows: usize) -> bool {
    rows >= WORTH && isa.matrix_unit() == MatrixUnit::Amx
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub(super) fn forward<const B: usize>(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &[[u8; B]],
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [[u8; B]],
    stride: usize,
) {
    let width = parts[0].matrix.columns();
    let x = DigitRows::of(pool, isa, OperandSide::Left, x, rows, width, 0..width);
    for_panels(pool, &x, rows, parts, exponent, out, stride, |share| isa.dispatch(Forward(share)));
}

struct Forward<'a, const B: usize>(PanelRange<'a, DigitRows<B>, B>);

impl<const B: usize> Kernel for Forward<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let packing = self.0.part.matrix.packing();
        with_values!(packing, V => S::call(ForwardOf::<V, B>(&self.0, PhantomData)));
    }
}

struct ForwardOf<'a, V, const B: usize>(&'a PanelRange<'a, DigitRows<B>, B>, PhantomData<V>);

impl<V: DecodeIntegers, const B: usize> Kernel for ForwardOf<'_, V, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let PanelRange { x, rows, part, panels, factors, .. } = self.0;
        // SAFETY: the set says that the unit may be used, and this thread does not use it otherwise.
        let (unit, mut desk) = (unsafe { AmxGemm::lay_out() }, DigitScratch::new());
        let mut last = Block { share: self.0, rows: 0..0, panel: 0, is_first: true };
        for rows in blocks(0..*rows, rows_together(B * part.matrix.columns())) {
            for panel in panels.clone() {
                for elements in blocks(0..part.matrix.columns(), DEPTHS * DEPTH) {
                    desk.clear();
                    for (depth, elements) in blocks(elements.clone(), DEPTH).enumerate() {
                        desk.whole[elements.len()..].fill([0; LANES]);
                        let whole = desk.whole.as_mut_ptr().cast();
                        // SAFETY: panel and elements exist, and there is room for 64 vectors.
                        unsafe { decode::<S, V>(part.matrix, panel, elements, *factors, whole) };
                        desk.cut(depth);
                    }
                    for rows in blocks(rows.clone(), SIDE) {
                        let x = x.tiles(rows.start / SIDE, elements.start / DEPTH);
                        let depths = elements.len().div_ceil(DEPTH);
                        // SAFETY: rows have tiles of all elements.
                        unsafe { desk.multiply::<B, false>(&unit, x, 0, depths, &last) };
                        last = Block { rows, panel, is_first: elements.start == 0, ..last };
                    }
                }
            }
        }
        desk.drain_rows::<B>(&last);
    }
}

/// Product of at most sixteen rows with some elements of a panel.
struct Block<'a, const B: usize> {
    share: &'a PanelRange<'a, DigitRows<B>, B>,
    rows: Range<usize>,
    panel: usize,
    is_first: bool,
}

impl<const B: usize> RowSink for Block<'_, B> {
    #[inline(always)]
    fn write_row(&self, row: usize, words: [u64; LANES]) {
        if row < self.rows.len() {
            self.share.put(self.rows.start + row, self.panel, self.is_first, &words);
        }
    }
}

/// Returns the rows whose digits stay in the second-level cache for all panels, a multiple of [`SIDE`].
fn rows_together(row_bytes: usize) -> usize {
    (CACHED_BYTES / row_bytes.max(1) / SIDE * SIDE).max(SIDE)
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub(super) fn backward<const B: usize>(
    pool: &mut ThreadPool,
    isa: Isa,
    g: &[[u8; B]],
    rows: usize,
    stride: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [[u8; B]],
) {
    let cut: Vec<DigitRows<B>> = parts
        .iter()
        .map(|part| {
            let columns = part.column..part.column + part.matrix.rows();
            DigitRows::of(pool, isa, OperandSide::Right, g, rows, stride, columns)
        })
        .collect();
    let parts: Vec<_> = parts.iter().copied().zip(&cut).collect();
    for_inputs(pool, rows, &parts, exponent, out, |share| isa.dispatch(Backward(share)));
}

struct Backward<'a, const B: usize>(Inputs<'a, DigitRows<B>, B>);

impl<const B: usize> Kernel for Backward<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let packing = self.0.part.matrix.packing();
        with_values!(packing, V => S::call(BackwardOf::<V, B>(&self.0, PhantomData)));
    }
}

struct BackwardOf<'a, V, const B: usize>(&'a Inputs<'a, DigitRows<B>, B>, PhantomData<V>);

/// Panels whose outputs fill half of the scratch buffer.
const TALL: usize = DEPTHS / 2 * DEPTH / LANES;

impl<V: DecodeIntegers, const B: usize> Kernel for BackwardOf<'_, V, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Inputs { g, rows, part, inputs, factors, .. } = self.0;
        let w = part.matrix;
        // SAFETY: the set says that the unit may be used, and this thread does not use it otherwise.
        let (unit, mut desk) = (unsafe { AmxGemm::lay_out() }, DigitScratch::new());
        let mut last = Gradients { share: self.0, rows: 0..0, inputs: 0..0 };
        for panels in blocks(0..w.panels(), TALL) {
            desk.clear();
            for (tall, panel) in panels.clone().enumerate() {
                let whole = desk.whole.as_mut_ptr().cast();
                // SAFETY: panel and inputs exist, and there is room for a group of vectors.
                unsafe { decode::<S, V>(w, panel, inputs.clone(), *factors, whole) };
                desk.cut_across(tall);
            }
            let depths = (panels.len() * LANES).div_ceil(DEPTH);
            for rows in blocks(0..*rows, SIDE) {
                for (half, inputs) in blocks(inputs.clone(), LANES).enumerate() {
                    let g = g.tiles(rows.start / SIDE, panels.start * LANES / DEPTH);
                    // SAFETY: rows have tiles of all outputs.
                    unsafe { desk.multiply::<B, true>(&unit, g, half * (DEPTHS / 2), depths, &last) };
                    last = Gradients { rows: rows.clone(), inputs, ..last };
                }
            }
        }
        desk.drain_rows::<B>(&last);
    }
}

/// Product of at most sixteen rows for at most sixteen inputs, over some outputs.
struct Gradients<'a, const B: usize> {
    share: &'a Inputs<'a, DigitRows<B>, B>,
    rows: Range<usize>,
    inputs: Range<usize>,
}

impl<const B: usize> RowSink for Gradients<'_, B> {
    #[inline(always)]
    fn write_row(&self, input: usize, words: [u64; LANES]) {
        if input < self.inputs.len() {
            for (row, word) in self.rows.clone().zip(words) {
                self.share.add(row, self.inputs.start + input, word);
            }
        }
    }
}
