//! Code shared by all products: the parts of one call, and their division into blocks.

use std::{mem::MaybeUninit, ops::Range};

use super::pack::PackedMatrix;
use crate::pool::ThreadPool;

/// A matrix, and the columns of `out` for its outputs.
#[derive(Debug, Clone, Copy)]
pub struct LinearPart<'a> {
    /// Packed weights, `[outputs, inputs]`.
    pub matrix: &'a PackedMatrix,
    /// Bias per output feature, added to the outputs.
    pub bias: Option<&'a [f32]>,
    /// Column of `out` of the first output feature.
    pub column: usize,
}

/// Panics unless `parts` have rows of `width` and take disjoint, ascending columns of rows of `stride`.
pub(super) fn check_parts(parts: &[LinearPart<'_>], width: usize, stride: usize) {
    for part in parts {
        assert_eq!(part.matrix.columns(), width, "weights and activations have the same inner width");
        assert!(part.column + part.matrix.rows() <= stride, "the part's outputs lie within a row of out");
        assert!(part.bias.is_none_or(|bias| bias.len() == part.matrix.rows()), "one bias an output feature");
    }
    let in_order = |pair: &[LinearPart<'_>]| pair[0].column + pair[0].matrix.rows() <= pair[1].column;
    assert!(parts.windows(2).all(in_order), "parts write disjoint columns, in ascending order");
}

/// Splits `range` into blocks of `step`; the last may be smaller.
#[inline(always)]
pub(super) fn blocks(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(step).map(move |start| start..range.end.min(start + step))
}

/// Stack buffer for decoded values, aligned to a cache line.
#[repr(align(64))]
pub(super) struct DecodeScratch<const N: usize>([MaybeUninit<f32>; N]);

impl<const N: usize> DecodeScratch<N> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; N])
    }

    #[inline(always)]
    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// Calls `each` on all threads of `pool` with the panel ranges of the parts. `panels_a_chunk` returns the
/// panels of a chunk from the number of all panels and of threads.
pub(super) fn for_each_chunk<'a>(
    pool: &mut ThreadPool,
    parts: &[LinearPart<'a>],
    panels_a_chunk: impl FnOnce(usize, usize) -> usize,
    each: impl Fn(LinearPart<'a>, usize, usize) + Sync,
) {
    let panels: usize = parts.iter().map(|part| part.matrix.panels()).sum();
    let chunk = panels_a_chunk(panels, pool.threads());
    pool.run(panels.div_ceil(chunk), |i| {
        for_each_part(parts, i * chunk, panels.min((i + 1) * chunk), &each);
    });
}

/// Calls `each` with the panel range of each part within the range `first..last` over all parts.
fn for_each_part<'a>(
    parts: &[LinearPart<'a>],
    first: usize,
    last: usize,
    mut each: impl FnMut(LinearPart<'a>, usize, usize),
) {
    let mut base = 0;
    for part in parts {
        let end = base + part.matrix.panels();
        let (from, to) = (first.max(base), last.min(end));
        if from < to {
            each(*part, from - base, to - base);
        }
        base = end;
    }
}

pub(super) struct OutPtr(pub(super) *mut f32);
// SAFETY: chunks write disjoint columns of a buffer that outlives the parallel region.
unsafe impl Sync for OutPtr {}
