//! Who sums the ranks of an adapter that the device does not hold (CaraServe §4.1).
//!
//! A delta is a sum over ranks, from the first to the last. The blocks of an adapter travel to the device from the last
//! to the first, so what is missing is always a *head*, the ranks `0..n`. Its sums are where the device goes on: they
//! may come from anyone, and the bits are the same.

use kernels::{
    Activations,
    lora::{HeadSegment, LoraMatrix},
};

use crate::{forward::Compute, prepared_adapter::PreparedAdapter, source::Target};

/// The head's sums of some rows at one linear layer.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
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

impl Ask<'_> {
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
    pub fn segment(&self) -> HeadSegment<'_> {
        let Ask { first_row, rows, matrix, ranks, offset, .. } = *self;
        HeadSegment { first_row, rows, matrix, ranks, offset }
    }
}

/// Whoever sums heads beside the thread that runs the pass.
pub trait Assist: std::fmt::Debug + Send {
    /// How many there are to share the work. With none, whoever runs the pass computes all of an adapter that is not
    /// wholly on the device from the host tier.
    fn helpers(&mut self) -> usize;

    /// A pass begins in which something will be asked.
    fn begin_pass(&mut self);

    /// It has ended.
    fn end_pass(&mut self);

    /// Takes on what it can of `asks`, whose sums lie one after the other; returns at once.
    fn begin(&mut self, x: &Activations, asks: &[Ask<'_>]);

    /// Writes the sums of all `asks`, which are those of the last [`begin`](Self::begin), to `sums`: what nobody else
    /// has summed it sums itself.
    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[Ask<'_>], sums: &mut [f32]);
}
