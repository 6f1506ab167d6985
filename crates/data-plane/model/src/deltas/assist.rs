//! Partial sums of an adapter's ranks that the device does not hold (CaraServe §4.1).
//!
//! A delta is a sum over ranks in ascending order. Rank blocks are copied to the device from the last to the
//! first, so the missing ones are always the leading ranks, `0..n`. The device continues from their sums,
//! which workers or the executor may compute with equal bits.

use std::{fmt::Debug, sync::Arc};

use kernels::{
    Activations,
    lora::{LeadingSegment, LoraMatrix},
};

use crate::{cpu::Compute, deltas::prepared::PreparedAdapter, shape::source::Target};

/// Request for the partial sums of some rows at one linear layer.
#[derive(Debug, Clone, Copy)]
pub struct PartialSum<'a> {
    /// Adapter of the rows.
    pub adapter: &'a PreparedAdapter,
    /// Transformer block; 0 for the model's head.
    pub layer: usize,
    /// Linear layer of the block.
    pub target: Target,
    /// The adapter's matrices of the layer.
    pub matrix: &'a LoraMatrix,
    /// First row of the activations.
    pub first_row: usize,
    /// Number of rows to sum.
    pub rows: usize,
    /// Number of leading ranks to sum.
    pub ranks: usize,
    /// Index of the first element of the sums, `[rows, outputs]`.
    pub offset: usize,
}

impl PartialSum<'_> {
    /// Returns the number of elements of the sums.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.rows * self.matrix.rows()
    }

    /// Returns the product of rows and ranks, a measure of work.
    #[must_use]
    pub fn rank_rows(&self) -> u64 {
        (self.rows * self.ranks) as u64
    }

    /// Returns the request in the kernels' form.
    #[must_use]
    pub fn segment(&self) -> LeadingSegment<'_> {
        let PartialSum { first_row, rows, matrix, ranks, offset, .. } = *self;
        LeadingSegment { first_row, rows, matrix, ranks, offset }
    }
}

/// Computes partial sums in parallel to the thread that runs the pass.
pub trait Assist: Debug + Send {
    /// Returns the number of helpers that share the work. With zero helpers, the executor computes incomplete
    /// adapters entirely from the host tier.
    fn helpers(&mut self) -> usize;

    /// Announces a pass with requests.
    fn begin_pass(&mut self);

    /// Announces the end of the pass.
    fn end_pass(&mut self);

    /// Starts as many of `asks` as possible, whose sums lie one after the other, and returns at once.
    fn begin(&mut self, x: &Activations, asks: &[PartialSum<'_>]);

    /// Writes the sums of all `asks` of the last [`begin`](Self::begin) to `sums`. The calling thread
    /// computes the sums that no helper has done.
    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[PartialSum<'_>], sums: &mut [f32]);
}

/// Partial sums for a device that continues asynchronously; the job keeps the adapters alive.
#[derive(Debug)]
pub struct AssistJob {
    /// Requests in the order of their sums.
    pub asks: Vec<OwnedPartialSum>,
    /// Number of values per row.
    pub width: usize,
    /// Number of rows that the device writes to the slab, from its beginning.
    pub x_rows: usize,
    /// Total number of elements of all sums.
    pub sums: usize,
}

/// A [`PartialSum`] request that owns its adapter; rows are counted in the slab.
#[derive(Debug, Clone)]
pub struct OwnedPartialSum {
    /// Adapter of the rows.
    pub adapter: Arc<PreparedAdapter>,
    /// Transformer block; 0 for the model's head.
    pub layer: usize,
    /// Linear layer of the block, which the adapter changes.
    pub target: Target,
    /// First row in the slab.
    pub first_row: usize,
    /// Number of rows to sum.
    pub rows: usize,
    /// Number of leading ranks to sum.
    pub ranks: usize,
    /// Index of the first element of the sums, `[rows, outputs]`.
    pub offset: usize,
}

impl OwnedPartialSum {
    /// Returns the request with borrowed matrices, or `None` if the adapter does not change the layer.
    #[must_use]
    pub fn ask(&self) -> Option<PartialSum<'_>> {
        let &Self { ref adapter, layer, target, first_row, rows, ranks, offset } = self;
        let matrix = adapter.matrix(layer, target)?;
        Some(PartialSum { adapter, layer, target, matrix, first_row, rows, ranks, offset })
    }
}
