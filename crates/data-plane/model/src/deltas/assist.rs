//! Who sums the ranks of an adapter that the device does not hold (CaraServe §4.1).
//!
//! A delta is a sum over ranks, from the first to the last. The blocks of an adapter travel to the device from the last
//! to the first, so what is missing is always a *head*, the ranks `0..n`. Its sums are where the device goes on: they
//! may come from anyone, and the bits are the same.

use std::{fmt::Debug, sync::Arc};

use kernels::{
    Activations,
    lora::{LeadingSegment, LoraMatrix},
};

use crate::{cpu::Compute, deltas::prepared::PreparedAdapter, shape::source::Target};

/// The head's sums of some rows at one linear layer.
#[derive(Debug, Clone, Copy)]
pub struct PartialSum<'a> {
    /// The adapter.
    pub adapter: &'a PreparedAdapter,
    /// Transformer block; 0 for the head of the model.
    pub layer: usize,
    /// Which of its linear layers.
    pub target: Target,
    /// The adapter's matrices there.
    pub matrix: &'a LoraMatrix,
    /// First row of the activations.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// Ranks to sum, from the first.
    pub ranks: usize,
    /// Element at which the sums begin, `[rows, outputs]`.
    pub offset: usize,
}

impl PartialSum<'_> {
    /// Elements of the sums.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.rows * self.matrix.rows()
    }

    /// Rows times ranks.
    #[must_use]
    pub fn rank_rows(&self) -> u64 {
        (self.rows * self.ranks) as u64
    }

    /// The same for the arithmetic.
    #[must_use]
    pub fn segment(&self) -> LeadingSegment<'_> {
        let PartialSum { first_row, rows, matrix, ranks, offset, .. } = *self;
        LeadingSegment { first_row, rows, matrix, ranks, offset }
    }
}

/// Whoever sums heads beside the thread that runs the pass.
pub trait Assist: Debug + Send {
    /// How many there are to share the work. With none, whoever runs the pass computes all of an adapter that is not
    /// wholly on the device from the host tier.
    fn helpers(&mut self) -> usize;

    /// A pass begins in which something will be asked.
    fn begin_pass(&mut self);

    /// It has ended.
    fn end_pass(&mut self);

    /// Takes on what it can of `asks`, whose sums lie one after the other; returns at once.
    fn begin(&mut self, x: &Activations, asks: &[PartialSum<'_>]);

    /// Writes the sums of all `asks`, which are those of the last [`begin`](Self::begin), to `sums`: what nobody else
    /// has summed it sums itself.
    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[PartialSum<'_>], sums: &mut [f32]);
}

/// Some heads to sum for a device that goes on by itself, with what they are of kept alive.
#[derive(Debug)]
pub struct AssistJob {
    /// The heads, in the order of their sums.
    pub asks: Vec<OwnedPartialSum>,
    /// Numbers of a row.
    pub width: usize,
    /// Rows that the device puts into the slab, one behind the other from its beginning.
    pub x_rows: usize,
    /// Elements of all sums together.
    pub sums: usize,
}

/// The head's sums of some rows at one linear layer; as [`PartialSum`], with the rows counted in the slab.
#[derive(Debug, Clone)]
pub struct OwnedPartialSum {
    /// The adapter.
    pub adapter: Arc<PreparedAdapter>,
    /// Transformer block; 0 for the head of the model.
    pub layer: usize,
    /// Which of its linear layers; the adapter changes it.
    pub target: Target,
    /// First row in the slab.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// Ranks to sum, from the first.
    pub ranks: usize,
    /// Element at which the sums begin, `[rows, outputs]`.
    pub offset: usize,
}

impl OwnedPartialSum {
    /// The same, borrowed; `None` if the adapter does not change the layer.
    #[must_use]
    pub fn ask(&self) -> Option<PartialSum<'_>> {
        let &Self { ref adapter, layer, target, first_row, rows, ranks, offset } = self;
        let matrix = adapter.matrix(layer, target)?;
        Some(PartialSum { adapter, layer, target, matrix, first_row, rows, ranks, offset })
    }
}
