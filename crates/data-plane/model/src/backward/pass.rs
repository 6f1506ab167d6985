//! What a reverse pass has: the model, what goes through it now, and its turn at the sums.

use kernels::{
    Activations,
    attention::KvPrecision,
    backward::{attention::SequenceRows, lora::LoraScratch},
};

use super::{dropout::RowDropouts, ordered_reduction::ReductionTurn, trainable_site::TrainableSite};
use crate::{
    adapter::MethodWeights,
    cpu::{Compute, RowTable},
    forward::{LinearGroup, ModelContext},
};

/// A linear group of a block, on the way back.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupActivations<'a> {
    pub(super) layer: usize,
    pub(super) group: LinearGroup,
    /// What went in, before a vector scaled it.
    pub(super) x: &'a [f32],
    /// What came out before vectors scaled it; read only where they do.
    pub(super) out: &'a [f32],
    /// The sequences, or of the head their targets, that rows are of.
    pub(super) sequences: &'a [SequenceRows],
}

/// What the way back computes with, kept from one batch to the next.
#[derive(Debug, Default)]
pub(super) struct BackwardScratch {
    /// The gradient at the residual stream, `[rows, hidden]`.
    pub(super) residual: Vec<f32>,
    /// The gradient at a group's outputs.
    pub(super) outputs: Activations,
    /// The gradient at a group's inputs.
    pub(super) inputs: Vec<f32>,
    /// A group's inputs.
    pub(super) x: Vec<f32>,
    /// The same without what is dropped of it, and the gradient at that.
    pub(super) dropped: Vec<f32>,
    pub(super) of_dropped: Vec<f32>,
    pub(super) lora: LoraScratch,
}

impl BackwardScratch {
    /// Makes the gradient at a group's outputs that at the residual stream.
    pub(super) fn outputs_of_residual(&mut self, width: usize) {
        self.outputs.reshape(self.residual.len() / width, width);
        self.outputs.values_mut().copy_from_slice(&self.residual);
    }
}

/// A reverse pass on its way.
pub(super) struct Reverse<'a, 'g, B> {
    pub(super) model: &'a ModelContext,
    pub(super) base: &'a mut B,
    pub(super) device: &'a mut Compute,
    pub(super) precision: KvPrecision,
    pub(super) adapter: &'a MethodWeights,
    pub(super) turn: &'a mut ReductionTurn<'g>,
    pub(super) room: &'a mut BackwardScratch,
    pub(super) rows: &'a RowTable,
    pub(super) sequences: &'a [SequenceRows],
    /// What the way forward dropped of each row.
    pub(super) dropouts: &'a RowDropouts,
    /// Below it, nothing learns.
    pub(super) first: TrainableSite,
}

impl<B> Reverse<'_, '_, B> {
    /// Whether something learns before `place`.
    pub(super) fn goes_below(&self, place: TrainableSite) -> bool {
        self.first < place
    }
}
