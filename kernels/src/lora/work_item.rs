//! Work of one thread: some rows, one adapter, one layer, a range of ranks.
//!
//! [`Shrink`] multiplies with A into scratch memory on the stack, then [`Expand`] with B into the output.

use std::{mem::MaybeUninit, ops::Range};

use super::{
    expand::{Expand, Finish},
    layout::{ElementKind, MAX_RANK, MatrixLayout, RANK_BLOCK},
    matrix::FactorView,
    shrink::Shrink,
    stored::{Bf16Pairs, SPAN},
};
use crate::simd::{Kernel, Simd};

/// Capacity of the scratch memory in sums over A: [`MAX_RANK`] for eight rows.
const SUMS: usize = 8 * MAX_RANK;

/// Capacity of the scratch memory in rows of inputs.
const ROWS: usize = 64;

/// Computes `out = finish(head + sum over ranks of B[rank] (scale * A[rank] · x))`.
#[derive(Clone)]
pub(super) struct WorkItem<'a> {
    pub(super) layout: &'a MatrixLayout,
    pub(super) factors: [FactorView<'a>; 2],
    pub(super) ranks: Range<usize>,
    pub(super) rows: usize,
    /// Inputs as rows, `[rows, columns]`.
    pub(super) x: *const f32,
    /// Sums of the ranks below `ranks`, `[rows, layout.rows]`; null if there are none.
    pub(super) head: *const f32,
    /// Rows of `layout.rows` elements, `stride` apart.
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    pub(super) finish: Finish,
}

// SAFETY: work items read memory that outlives the parallel region and write disjoint elements.
unsafe impl Sync for WorkItem<'_> {}

struct Scratch {
    sums: MaybeUninit<[f32; SUMS]>,
    inputs: MaybeUninit<[u32; ROWS * SPAN / 2]>,
}

impl WorkItem<'_> {
    pub(super) fn part(&self, first: usize, rows: usize) -> Self {
        // SAFETY: the rows belong to this work item, so its pointers are valid for them.
        unsafe {
            let head = if self.head.is_null() { self.head } else { self.head.add(first * self.layout.rows) };
            Self {
                rows,
                x: self.x.add(first * self.layout.columns),
                head,
                out: self.out.add(first * self.stride),
                ..self.clone()
            }
        }
    }

    /// Returns the blocks of the ranks; none for an empty range, whose block may be missing on the device.
    fn blocks(&self) -> Range<usize> {
        if self.ranks.is_empty() {
            return 0..0;
        }
        self.ranks.start / RANK_BLOCK..self.ranks.end.div_ceil(RANK_BLOCK)
    }

    /// # Safety
    /// The pointers are valid for the rows, the factors for the ranks, and no other thread uses these
    /// outputs.
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, scratch: &mut Scratch) {
        let blocks = self.blocks();
        let sums: *mut f32 = scratch.sums.as_mut_ptr().cast();
        let shrink = Shrink {
            layout: self.layout,
            a: self.factors[0],
            x: self.x,
            rows: self.rows,
            scratch: scratch.inputs.as_mut_ptr().cast(),
            sums,
            blocks: blocks.clone(),
        };
        let expand = Expand {
            layout: self.layout,
            b: self.factors[1],
            ranks: self.ranks.clone(),
            blocks: blocks.clone(),
            rows: self.rows,
            sums,
            head: self.head,
            out: self.out,
            stride: self.stride,
            finish: self.finish,
        };
        // SAFETY: the caller upholds this function's contract; `Kernel::run` takes no more rows than the scratch memory
        // holds.
        unsafe {
            match self.layout.a.kind {
                ElementKind::F32 => shrink.run::<S, f32>(),
                ElementKind::F16 => shrink.run::<S, u16>(),
                ElementKind::Bf16 => shrink.run::<S, Bf16Pairs>(),
            }
            match self.layout.b.kind {
                ElementKind::F32 => expand.run::<S, f32>(),
                ElementKind::F16 => expand.run::<S, u16>(),
                ElementKind::Bf16 => expand.run::<S, Bf16Pairs>(),
            }
        }
    }
}

impl Kernel for WorkItem<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut scratch = Scratch { sums: MaybeUninit::uninit(), inputs: MaybeUninit::uninit() };
        let at_once = (SUMS / RANK_BLOCK / self.blocks().len().max(1)).min(ROWS);
        for first in (0..self.rows).step_by(at_once) {
            let part = self.part(first, at_once.min(self.rows - first));
            // SAFETY: the caller that made the item has checked the shapes, and no other item has these outputs.
            unsafe { part.rows::<S>(&mut scratch) };
        }
    }
}
