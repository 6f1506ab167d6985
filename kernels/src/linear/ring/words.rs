//! Sums over whole numbers of 32 bits, for weights of any packing: the product that needs no explanation.
//!
//! A word is two numbers of 32 bits with signs, `low + 2^32 high`, so that products are those of 32 bits:
//!
//! ```text
//! forward    out[r, o] = sum over k: w[o, k] low[r, k] + 2^32 (sum over k: w[o, k] high[r, k])      a lane is an output
//! backward   the same over outputs, a lane being every sixteenth of them, and then over the lanes
//! ```
//!
//! Weights are decoded once to a buffer that stays in the first-level cache, and all rows pass over it.

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

use super::{
    OutWords,
    form::Factors,
    halves,
    whole::{Whole, decode},
};
use crate::{
    activations::GROUP,
    isa::Isa,
    linear::{
        pack::PackedMatrix,
        part::{LinearPart, blocks, for_each_part},
        values::with_values,
    },
    pool::Pool,
    simd::{Kernel, LANES, Simd},
};

/// Elements of a panel that are decoded at once: 16 KB.
const DEPTH: usize = 256;
/// Panels that a group's inputs are summed over before their lanes are: 16 KB too.
const TALL: usize = DEPTH / GROUP;

/// Words in halves.
pub(super) struct Split {
    low: Vec<i32>,
    high: Vec<i32>,
}

impl Split {
    /// The halves of `words`, and zeroes where the last panel has no output.
    pub(super) fn of(words: &[u64]) -> Self {
        let behind = std::iter::repeat_n((0, 0), LANES);
        let (low, high) = words.iter().map(|&word| halves(word)).chain(behind).unzip();
        Self { low, high }
    }
}

/// Decoded numbers, `[_, LANES]`.
#[repr(align(64))]
struct Room([MaybeUninit<i32>; DEPTH * LANES]);

impl Room {
    #[inline(always)]
    fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; DEPTH * LANES])
    }
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub(super) fn forward(
    pool: &mut Pool,
    isa: Isa,
    x: &Split,
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [u64],
    stride: usize,
) {
    let out = OutWords(out.as_mut_ptr());
    let panels: usize = parts.iter().map(|part| part.matrix.panels()).sum();
    let chunk = panels.div_ceil(4 * pool.threads()).max(1);
    pool.run(panels.div_ceil(chunk), |i| {
        let out = &out;
        for_each_part(parts, i * chunk, panels.min((i + 1) * chunk), |part, first, last| {
            let factors = part.matrix.factors(exponent);
            isa.dispatch(Forward { x, rows, part, panels: first..last, factors, out: out.0, stride });
        });
    });
}

/// Some panels of a part, for all rows.
struct Forward<'a> {
    x: &'a Split,
    rows: usize,
    part: LinearPart<'a>,
    panels: Range<usize>,
    factors: Factors,
    out: *mut u64,
    stride: usize,
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        with_values!(self.part.matrix.packing(), V => S::call(Panels::<V>(&self, PhantomData)));
    }
}

struct Panels<'a, V>(&'a Forward<'a>, PhantomData<V>);

impl<V: Whole> Kernel for Panels<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Forward { rows, part, panels, factors, .. } = self.0;
        let mut room = Room::new();
        let weights = room.0.as_mut_ptr().cast::<i32>();
        for panel in panels.clone() {
            for depth in blocks(0..part.matrix.columns(), DEPTH) {
                // SAFETY: panel and elements exist, and the room holds `DEPTH` vectors.
                unsafe { decode::<S, V>(part.matrix, panel, depth.clone(), *factors, weights) };
                for row in 0..*rows {
                    // SAFETY: as above, and the row exists.
                    let sums = unsafe { self.0.sums::<S>(row, &depth, weights) };
                    self.0.put(row, panel, depth.start == 0, &sums);
                }
            }
        }
    }
}

impl Forward<'_> {
    /// # Safety
    ///
    /// The row has these elements, which lie decoded at `weights`.
    #[inline(always)]
    unsafe fn sums<S: Simd>(&self, row: usize, depth: &Range<usize>, weights: *const i32) -> [u64; LANES] {
        let (mut low, mut high) = (S::zero_wide(), S::zero_wide());
        let at = row * self.part.matrix.columns() + depth.start;
        // SAFETY: the caller's.
        unsafe {
            let (x_low, x_high) = (self.x.low.as_ptr().add(at), self.x.high.as_ptr().add(at));
            for k in 0..depth.len() {
                let w = S::load_i32(weights.add(k * LANES));
                low = S::add_product(low, w, S::splat_i32(*x_low.add(k)));
                high = S::add_product(high, w, S::splat_i32(*x_high.add(k)));
            }
        }
        let mut sums = [0; LANES];
        // SAFETY: there are sixteen.
        unsafe { S::store_wide(sums.as_mut_ptr(), S::add_shifted::<32>(low, high)) };
        sums
    }

    /// Writes the sums of a stretch, or adds them to those before.
    #[inline(always)]
    fn put(&self, row: usize, panel: usize, is_first: bool, sums: &[u64; LANES]) {
        let lanes = LANES.min(self.part.matrix.rows() - panel * LANES);
        let to = self.out.wrapping_add(row * self.stride + self.part.column + panel * LANES);
        for (lane, &sum) in sums.iter().enumerate().take(lanes) {
            // SAFETY: columns were checked to lie within `out`, and no other chunk uses these.
            unsafe {
                let to = to.add(lane);
                *to = if is_first { sum } else { sum.wrapping_add(*to) };
            }
        }
    }
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub(super) fn backward(
    pool: &mut Pool,
    isa: Isa,
    g: &Split,
    rows: usize,
    stride: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [u64],
) {
    let columns = parts[0].matrix.columns();
    let out = OutWords(out.as_mut_ptr());
    let groups = columns.div_ceil(GROUP);
    let chunk = groups.div_ceil(4 * pool.threads());
    pool.run(groups.div_ceil(chunk), |i| {
        let out = &out;
        for inputs in blocks(i * chunk * GROUP..columns.min((i + 1) * chunk * GROUP), GROUP) {
            for &part in parts {
                let factors = part.matrix.factors(exponent);
                let inputs = inputs.clone();
                isa.dispatch(Backward { g, rows, stride, part, inputs, factors, out: out.0 });
            }
        }
    });
}

/// Some inputs of a part, at most a group of them, for all rows.
struct Backward<'a> {
    g: &'a Split,
    rows: usize,
    stride: usize,
    part: LinearPart<'a>,
    inputs: Range<usize>,
    factors: Factors,
    out: *mut u64,
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        with_values!(self.part.matrix.packing(), V => S::call(Inputs::<V>(&self, PhantomData)));
    }
}

struct Inputs<'a, V>(&'a Backward<'a>, PhantomData<V>);

impl<V: Whole> Kernel for Inputs<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Backward { rows, part, inputs, factors, .. } = self.0;
        let w: &PackedMatrix = part.matrix;
        let mut room = Room::new();
        let weights = room.0.as_mut_ptr().cast::<i32>();
        for panels in blocks(0..w.panels(), TALL) {
            for (tall, panel) in panels.clone().enumerate() {
                w.prefetch(panel + TALL, inputs.start / GROUP * V::GROUP_BYTES, V::GROUP_BYTES);
                // SAFETY: panel and inputs exist, and the room holds a group of `TALL` panels.
                unsafe {
                    decode::<S, V>(w, panel, inputs.clone(), *factors, weights.add(tall * GROUP * LANES));
                }
            }
            for row in 0..*rows {
                // SAFETY: as above, and the row exists.
                unsafe { self.0.add::<S>(row, &panels, weights) };
            }
        }
    }
}

impl Backward<'_> {
    /// Adds what some panels, which lie decoded at `weights`, contribute to a row's inputs.
    ///
    /// # Safety
    ///
    /// Row and panels exist.
    #[inline(always)]
    unsafe fn add<S: Simd>(&self, row: usize, panels: &Range<usize>, weights: *const i32) {
        let at = row * self.stride + self.part.column + panels.start * LANES;
        let out = self.out.wrapping_add(row * self.part.matrix.columns() + self.inputs.start);
        // SAFETY: the caller's. Where the last panel has no output, its weights are zeroes and there are halves all the same;
        // inputs lie within `out`, and no other chunk uses them.
        unsafe {
            let (g_low, g_high) = (self.g.low.as_ptr().add(at), self.g.high.as_ptr().add(at));
            for k in 0..self.inputs.len() {
                let (mut low, mut high) = (S::zero_wide(), S::zero_wide());
                for tall in 0..panels.len() {
                    let w = S::load_i32(weights.add((tall * GROUP + k) * LANES));
                    low = S::add_product(low, w, S::load_i32(g_low.add(tall * LANES)));
                    high = S::add_product(high, w, S::load_i32(g_high.add(tall * LANES)));
                }
                let to = out.add(k);
                *to = (*to).wrapping_add(S::sum_wide(S::add_shifted::<32>(low, high)));
            }
        }
    }
}
