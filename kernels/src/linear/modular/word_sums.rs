//! Sums over 32-bit integer weights of any packing: the plain method. Integers of rows have `B` bytes.
//!
//! A word is two signed 32-bit halves, `low + 2^32 high`, so that products have 32-bit factors:
//!
//! ```text
//! forward    out[r, o] = sum over k: w[o, k] low[r, k] + 2^32 (sum over k: w[o, k] high[r, k])      lane: an
//! output
//! backward   the same sum over outputs; a lane sums every sixteenth output, then the lanes are summed
//! ```
//!
//! Weights are decoded once to a buffer in the first-level cache, and all rows use it.

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

use super::{
    bytes::to_u64,
    halves,
    integer_weights::{DecodeIntegers, decode},
    partition::{Inputs, PanelRange, for_inputs, for_panels},
};
use crate::{
    activations::GROUP,
    isa::Isa,
    linear::{
        pack::PackedMatrix,
        part::{LinearPart, blocks},
        values::with_values,
    },
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// Elements of a panel that are decoded at once: 16 KB.
const DEPTH: usize = 256;
/// Panels that a group's inputs are summed over before the lanes are summed: also 16 KB.
const TALL: usize = DEPTH / GROUP;

/// Words as signed low and high halves.
struct SplitWords {
    low: Vec<i32>,
    high: Vec<i32>,
}

impl SplitWords {
    /// Splits integers, and appends zeros for the missing outputs of the last panel.
    fn of<const B: usize>(numbers: &[[u8; B]]) -> Self {
        let behind = std::iter::repeat_n((0, 0), LANES);
        let (low, high) = numbers.iter().map(|number| halves(to_u64(number))).chain(behind).unzip();
        Self { low, high }
    }
}

/// Decoded integers, `[_, LANES]`.
#[repr(align(64))]
struct IntegerScratch([MaybeUninit<i32>; DEPTH * LANES]);

impl IntegerScratch {
    #[inline(always)]
    fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; DEPTH * LANES])
    }
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
    let x = SplitWords::of(x);
    for_panels(pool, &x, rows, parts, exponent, out, stride, |share| isa.dispatch(Forward(share)));
}

struct Forward<'a, const B: usize>(PanelRange<'a, SplitWords, B>);

impl<const B: usize> Kernel for Forward<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let packing = self.0.part.matrix.packing();
        with_values!(packing, V => S::call(ForwardOf::<V, B>(&self.0, PhantomData)));
    }
}

struct ForwardOf<'a, V, const B: usize>(&'a PanelRange<'a, SplitWords, B>, PhantomData<V>);

impl<V: DecodeIntegers, const B: usize> Kernel for ForwardOf<'_, V, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let PanelRange { rows, part, panels, factors, .. } = self.0;
        let mut scratch = IntegerScratch::new();
        let weights = scratch.0.as_mut_ptr().cast::<i32>();
        for panel in panels.clone() {
            for depth in blocks(0..part.matrix.columns(), DEPTH) {
                // SAFETY: panel and elements exist, and the buffer holds `DEPTH` vectors.
                unsafe { decode::<S, V>(part.matrix, panel, depth.clone(), *factors, weights) };
                for row in 0..*rows {
                    // SAFETY: the buffer holds the decoded elements, and the row exists.
                    let sums = unsafe { sums::<S, B>(self.0, row, &depth, weights) };
                    self.0.put(row, panel, depth.start == 0, &sums);
                }
            }
        }
    }
}

/// Computes the sums of a row with a panel over the elements `depth`, decoded at `weights`.
///
/// # Safety
/// The row has these elements, and `weights` holds them.
#[inline(always)]
unsafe fn sums<S: Simd, const B: usize>(
    share: &PanelRange<'_, SplitWords, B>,
    row: usize,
    depth: &Range<usize>,
    weights: *const i32,
) -> [u64; LANES] {
    let (mut low, mut high) = (S::zero_wide(), S::zero_wide());
    let at = row * share.part.matrix.columns() + depth.start;
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let (x_low, x_high) = (share.x.low.as_ptr().add(at), share.x.high.as_ptr().add(at));
        for k in 0..depth.len() {
            let w = S::load_i32(weights.add(k * LANES));
            low = S::add_product(low, w, S::splat_i32(*x_low.add(k)));
            high = S::add_product(high, w, S::splat_i32(*x_high.add(k)));
        }
    }
    let mut sums = [0; LANES];
    // SAFETY: `sums` has room for sixteen.
    unsafe { S::store_wide(sums.as_mut_ptr(), S::add_shifted::<32>(low, high)) };
    sums
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
    let g = SplitWords::of(g);
    let parts: Vec<_> = parts.iter().map(|&part| (part, &g)).collect();
    for_inputs(pool, rows, &parts, exponent, out, |share| isa.dispatch(Backward { share, stride }));
}

struct Backward<'a, const B: usize> {
    share: Inputs<'a, SplitWords, B>,
    stride: usize,
}

impl<const B: usize> Kernel for Backward<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let packing = self.share.part.matrix.packing();
        with_values!(packing, V => S::call(BackwardOf::<V, B>(&self, PhantomData)));
    }
}

struct BackwardOf<'a, V, const B: usize>(&'a Backward<'a, B>, PhantomData<V>);

impl<V: DecodeIntegers, const B: usize> Kernel for BackwardOf<'_, V, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Inputs { rows, part, inputs, factors, .. } = &self.0.share;
        let w: &PackedMatrix = part.matrix;
        let mut scratch = IntegerScratch::new();
        let weights = scratch.0.as_mut_ptr().cast::<i32>();
        for panels in blocks(0..w.panels(), TALL) {
            for (tall, panel) in panels.clone().enumerate() {
                w.prefetch(panel + TALL, inputs.start / GROUP * V::GROUP_BYTES, V::GROUP_BYTES);
                // SAFETY: panel and inputs exist, and the buffer holds a group of `TALL` panels.
                unsafe {
                    decode::<S, V>(w, panel, inputs.clone(), *factors, weights.add(tall * GROUP * LANES));
                }
            }
            for row in 0..*rows {
                // SAFETY: the buffer holds the decoded panels, and the row exists.
                unsafe { self.0.add::<S>(row, &panels, weights) };
            }
        }
    }
}

impl<const B: usize> Backward<'_, B> {
    /// Adds the products of some panels, decoded at `weights`, to a row's inputs.
    ///
    /// # Safety
    /// Row and panels exist, and `weights` holds the panels.
    #[inline(always)]
    unsafe fn add<S: Simd>(&self, row: usize, panels: &Range<usize>, weights: *const i32) {
        let Inputs { g, part, inputs, .. } = &self.share;
        let at = row * self.stride + part.column + panels.start * LANES;
        for (k, input) in inputs.clone().enumerate() {
            let (mut low, mut high) = (S::zero_wide(), S::zero_wide());
            // SAFETY: the caller guarantees row and panels. Missing outputs of the last panel have zero weights, and
            // `SplitWords` pads their halves.
            unsafe {
                let (g_low, g_high) = (g.low.as_ptr().add(at), g.high.as_ptr().add(at));
                for tall in 0..panels.len() {
                    let w = S::load_i32(weights.add((tall * GROUP + k) * LANES));
                    low = S::add_product(low, w, S::load_i32(g_low.add(tall * LANES)));
                    high = S::add_product(high, w, S::load_i32(g_high.add(tall * LANES)));
                }
            }
            self.share.add(row, input, S::sum_wide(S::add_shifted::<32>(low, high)));
        }
    }
}
