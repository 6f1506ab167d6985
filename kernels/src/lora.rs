//! Low-rank deltas of many adapters in one call: `out[row] += scale * B (A x[row])`.
//!
//! Rows that use the same adapter form a *segment*; rows without an adapter are in no segment and cost
//! nothing. Every adapter keeps its own rank, without padding.
//!
//! - `layout`: layout of the factors in memory. `matrix`: one adapted layer in shared memory.
//! - `pieces`, `staged`: factors in pieces of device blocks.
//! - `shrink` multiplies with A, `expand` with B; `stored` loads the elements of both.
//! - `work_item`: both products for the rows of one thread.
//!
//! The order of sums is part of the contract. An output element's delta is one chain of multiply-adds over
//! the ranks, ascending, from 0; the delta is added to the output once. The chain can therefore be split at
//! *any* rank: [`sum_ranks`] or [`sum_heads`] computes the leading ranks, and [`add_deltas`] continues from
//! their sums. The bits equal those of a single computation.
//!
//! An adapter is copied to a device in blocks of [`RANK_BLOCK`] ranks, from the last to the first
//! ([`StagedMatrix`]), so only leading ranks can be missing.

mod expand;
mod layout;
mod matrix;
mod pieces;
mod shrink;
mod staged;
mod stored;
mod work_item;

use std::{ops::Range, ptr};

use crate::{activations::Activations, isa::Isa, pool::ThreadPool};

use expand::Finish;
pub use layout::{
    ElementKind, FACTOR_ALIGNMENT, FactorLayout, LayoutError, LoraPrecision, MAX_RANK, MatrixLayout,
    RANK_BLOCK,
};
use matrix::FactorView;
pub use matrix::{LoraMatrix, SharedBytes};
pub use pieces::{Factor, FactorCut, PIECE_ALIGNMENT, Packing, PieceOffset, PieceTable};
pub use staged::StagedMatrix;
use work_item::WorkItem;

/// Rows of a segment per work item.
const ROWS_A_UNIT: usize = 16;

/// A delta to add: consecutive rows of one adapter, one linear layer.
#[derive(Debug, Clone, Copy)]
pub struct LoraSegment<'a> {
    /// First row of the segment.
    pub first_row: usize,
    /// Number of consecutive rows.
    pub rows: usize,
    /// The adapter's matrices for this layer.
    pub matrix: &'a LoraMatrix,
    /// Column of `out` of the layer's first output feature.
    pub column: usize,
    /// The device's copy of `matrix`, read instead of it.
    pub staged: Option<&'a StagedMatrix>,
    /// Sums of the leading ranks that were computed elsewhere.
    pub head: LeadingSums<'a>,
}

/// Sums of a delta's leading ranks that were computed elsewhere.
#[derive(Debug, Clone, Copy)]
pub enum LeadingSums<'a> {
    /// No sums: all ranks are computed here.
    None,
    /// The sums of ranks `0..ranks`.
    Sums {
        /// Number of leading ranks.
        ranks: usize,
        /// Sums per row and output, `[rows, matrix.rows()]`.
        values: &'a [f32],
    },
}

/// Leading ranks of a segment, to be summed.
#[derive(Debug, Clone, Copy)]
pub struct LeadingSegment<'a> {
    /// First row of the segment.
    pub first_row: usize,
    /// Number of consecutive rows.
    pub rows: usize,
    /// The adapter's matrices for this layer.
    pub matrix: &'a LoraMatrix,
    /// Number of leading ranks.
    pub ranks: usize,
    /// Index in the output of this segment's `[rows, matrix.rows()]` sums.
    pub offset: usize,
}

/// Adds the deltas of all `segments` to `out`, rows of `stride` elements, on all threads of `pool`.
///
/// Ranks after the leading sums are read from the segment's staged copy, or else from its matrix.
///
/// # Panics
/// Panics if the shapes do not match, a staged copy lacks a rank after the leading sums, or segments are not
/// in ascending order of rows and then columns.
pub fn add_deltas(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &Activations,
    segments: &[LoraSegment<'_>],
    out: &mut [f32],
    stride: usize,
) {
    assert!(out.len() >= x.rows() * stride, "out has as many rows as x");
    assert!(
        segments.windows(2).all(|pair| in_order(&pair[0], &pair[1])),
        "segments are disjoint and in order"
    );
    let out = out.as_mut_ptr();
    let mut units = Vec::with_capacity(segments.len());
    // Guards keep the blocks of staged copies lent until all products are computed.
    let _held: Vec<_> = segments.iter().filter_map(|segment| Some(segment.staged?.guard())).collect();
    for segment in segments {
        let matrix = segment.matrix;
        assert_rows(x, matrix, segment.first_row, segment.rows);
        assert!(segment.column + matrix.rows() <= stride, "B's outputs lie within a row of out");
        let (ranks, head) = match segment.head {
            LeadingSums::None => (0, ptr::null()),
            LeadingSums::Sums { ranks, values } => {
                assert!(ranks <= matrix.rank(), "a head has no more ranks than the matrix");
                assert_eq!(values.len(), segment.rows * matrix.rows(), "a head has a sum for each output");
                (ranks, values.as_ptr())
            }
        };
        let unit = WorkItem {
            layout: matrix.layout(),
            factors: segment.staged.map_or_else(|| whole(matrix), |staged| staged.factors(matrix, ranks)),
            ranks: ranks..matrix.rank(),
            rows: segment.rows,
            x: x.values()[segment.first_row * x.width()..].as_ptr(),
            head,
            out: out.wrapping_add(segment.first_row * stride + segment.column),
            stride,
            finish: Finish::Add,
        };
        push_parts(&mut units, &unit);
    }
    run(pool, isa, &units);
}

/// Computes `out = B[.., ranks] (scale * A[ranks] x)` for all rows of `x`, without allocation or system call.
///
/// `x` is `[rows, matrix.columns()]`, `out` is `[rows, matrix.rows()]`. [`LeadingSums::Sums`] takes the sums
/// of ranks `0..p`.
///
/// # Panics
/// Panics if the shapes do not match or the ranks do not exist.
pub fn sum_ranks(isa: Isa, x: &[f32], matrix: &LoraMatrix, ranks: Range<usize>, out: &mut [f32]) {
    let rows = x.len() / matrix.columns();
    assert_eq!(x.len(), rows * matrix.columns(), "x has whole rows of A's width");
    assert_eq!(out.len(), rows * matrix.rows(), "out has a sum for each output");
    assert!(ranks.start <= ranks.end && ranks.end <= matrix.rank(), "the ranks exist");
    isa.dispatch(WorkItem {
        layout: matrix.layout(),
        factors: whole(matrix),
        ranks,
        rows,
        x: x.as_ptr(),
        head: ptr::null(),
        out: out.as_mut_ptr(),
        stride: matrix.rows(),
        finish: Finish::Store,
    });
}

/// Computes the leading sums of all `segments`, each at its offset of `sums`, on all threads of `pool`.
///
/// # Panics
/// Panics if the shapes do not match, or segments are not in ascending order of offsets.
pub fn sum_heads(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &Activations,
    segments: &[LeadingSegment<'_>],
    sums: &mut [f32],
) {
    let mut units = Vec::with_capacity(segments.len());
    let (available, out) = (sums.len(), sums.as_mut_ptr());
    let mut taken = 0;
    for segment in segments {
        let matrix = segment.matrix;
        assert_rows(x, matrix, segment.first_row, segment.rows);
        assert!(segment.ranks <= matrix.rank(), "a head has no more ranks than the matrix");
        assert!(segment.offset >= taken, "segments are disjoint and in order");
        taken = segment.offset + segment.rows * matrix.rows();
        assert!(taken <= available, "a head's sums lie within the output");
        let unit = WorkItem {
            layout: matrix.layout(),
            factors: whole(matrix),
            ranks: 0..segment.ranks,
            rows: segment.rows,
            x: x.values()[segment.first_row * x.width()..].as_ptr(),
            head: ptr::null(),
            out: out.wrapping_add(segment.offset),
            stride: matrix.rows(),
            finish: Finish::Store,
        };
        push_parts(&mut units, &unit);
    }
    run(pool, isa, &units);
}

fn whole(matrix: &LoraMatrix) -> [FactorView<'_>; 2] {
    matrix.factors().map(FactorView::Whole)
}

fn assert_rows(x: &Activations, matrix: &LoraMatrix, first_row: usize, rows: usize) {
    assert_eq!(matrix.columns(), x.width(), "A has the width of the activations");
    assert!(first_row + rows <= x.rows(), "the segment's rows exist");
}

/// True if two segments are disjoint and ascend by rows, or by columns within equal rows.
fn in_order(a: &LoraSegment<'_>, b: &LoraSegment<'_>) -> bool {
    let same_rows = (a.first_row, a.rows) == (b.first_row, b.rows);
    a.first_row + a.rows <= b.first_row || same_rows && a.column + a.matrix.rows() <= b.column
}

/// Splits `unit` into work items of [`ROWS_A_UNIT`] rows.
fn push_parts<'a>(units: &mut Vec<WorkItem<'a>>, unit: &WorkItem<'a>) {
    let parts = (0..unit.rows).step_by(ROWS_A_UNIT);
    units.extend(parts.map(|first| unit.part(first, ROWS_A_UNIT.min(unit.rows - first))));
}

fn run(pool: &mut ThreadPool, isa: Isa, units: &[WorkItem<'_>]) {
    pool.run(units.len(), |i| isa.dispatch(units[i].clone()));
}
