//! Distribution of a modular product to threads.

use std::ops::Range;

use super::{
    bytes::{number, to_u64},
    form::Factors,
};
use crate::{
    activations::GROUP,
    linear::part::{LinearPart, blocks, for_each_chunk},
    pool::ThreadPool,
    simd::LANES,
};

/// Some panels of a part, for all rows, prepared as `X`; integers of rows have `B` bytes.
pub(super) struct PanelRange<'a, X, const B: usize> {
    pub(super) x: &'a X,
    pub(super) rows: usize,
    pub(super) part: LinearPart<'a>,
    pub(super) panels: Range<usize>,
    pub(super) factors: Factors,
    out: *mut [u8; B],
    stride: usize,
}

impl<X, const B: usize> PanelRange<'_, X, B> {
    /// Writes the sums of a row with a panel, or adds them to those of earlier elements.
    #[inline(always)]
    pub(super) fn put(&self, row: usize, panel: usize, is_first: bool, sums: &[u64; LANES]) {
        let lanes = LANES.min(self.part.matrix.rows() - panel * LANES);
        let to = self.out.wrapping_add(row * self.stride + self.part.column + panel * LANES);
        // SAFETY: columns were checked to lie within `out`, and no other chunk uses these.
        unsafe {
            if is_first {
                // The excess bytes of a word lie where the next integer is written.
                for (lane, &sum) in sums.iter().enumerate().take(lanes - 1) {
                    to.add(lane).cast::<u64>().write_unaligned(sum);
                }
                *to.add(lanes - 1) = number(sums[lanes - 1]);
                return;
            }
            for (lane, &sum) in sums.iter().enumerate().take(lanes) {
                let to = to.add(lane);
                *to = number(to_u64(&*to).wrapping_add(sum));
            }
        }
    }
}

/// Distributes the panels of all parts to the threads of `pool`. Rows of `out` have `stride` integers.
#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub(super) fn for_panels<X: Sync, const B: usize>(
    pool: &mut ThreadPool,
    x: &X,
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [[u8; B]],
    stride: usize,
    each: impl Fn(PanelRange<'_, X, B>) + Sync,
) {
    let out = OutBytes(out.as_mut_ptr());
    let chunk = |panels: usize, threads: usize| panels.div_ceil(4 * threads).max(1);
    for_each_chunk(pool, parts, chunk, |part, first, last| {
        let out = &out;
        let factors = part.matrix.factors(exponent);
        each(PanelRange { x, rows, part, panels: first..last, factors, out: out.0, stride });
    });
}

/// Some inputs of a part, at most a group, for all rows, prepared as `G`; integers of rows have `B` bytes.
pub(super) struct Inputs<'a, G, const B: usize> {
    pub(super) g: &'a G,
    pub(super) rows: usize,
    pub(super) part: LinearPart<'a>,
    pub(super) inputs: Range<usize>,
    pub(super) factors: Factors,
    out: *mut [u8; B],
}

impl<G, const B: usize> Inputs<'_, G, B> {
    #[inline(always)]
    pub(super) fn add(&self, row: usize, input: usize, sum: u64) {
        let to = self.out.wrapping_add(row * self.part.matrix.columns() + input);
        // SAFETY: inputs lie within `out`, and no other chunk uses these.
        unsafe { *to = number(to_u64(&*to).wrapping_add(sum)) };
    }
}

/// Distributes the inputs of all parts, each with its own rows `G`, to the threads, a group at a time.
pub(super) fn for_inputs<G: Sync, const B: usize>(
    pool: &mut ThreadPool,
    rows: usize,
    parts: &[(LinearPart<'_>, &G)],
    exponent: i32,
    out: &mut [[u8; B]],
    each: impl Fn(Inputs<'_, G, B>) + Sync,
) {
    let columns = parts[0].0.matrix.columns();
    let out = OutBytes(out.as_mut_ptr());
    let groups = columns.div_ceil(GROUP);
    let chunk = groups.div_ceil(4 * pool.threads());
    pool.run(groups.div_ceil(chunk), |i| {
        let out = &out;
        for inputs in blocks(i * chunk * GROUP..columns.min((i + 1) * chunk * GROUP), GROUP) {
            for &(part, g) in parts {
                let (factors, inputs) = (part.matrix.factors(exponent), inputs.clone());
                each(Inputs { g, rows, part, inputs, factors, out: out.0 });
            }
        }
    });
}

struct OutBytes<const B: usize>(*mut [u8; B]);
// SAFETY: chunks write disjoint columns of a buffer that outlives the parallel region.
unsafe impl<const B: usize> Sync for OutBytes<B> {}
