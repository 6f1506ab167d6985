//! State of a reverse pass: the model, the current gradients, and the turn at the sums.

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

#[derive(Debug, Clone, Copy)]
pub(super) struct GroupActivations<'a> {
    pub(super) layer: usize,
    pub(super) group: LinearGroup,
    /// Inputs before vectors scale them.
    pub(super) x: &'a [f32],
    /// Outputs before scaling; read only where vectors scale them.
    pub(super) out: &'a [f32],
    /// Rows of each sequence, or for the head of each sum of targets.
    pub(super) sequences: &'a [SequenceRows],
}

/// Buffers of the reverse pass, reused for each batch.
#[derive(Debug, Default)]
pub(super) struct BackwardScratch {
    /// Gradient at the residual stream, `[rows, hidden]`.
    pub(super) residual: Vec<f32>,
    pub(super) outputs: Activations,
    pub(super) inputs: Vec<f32>,
    pub(super) x: Vec<f32>,
    /// Inputs of a group after dropout, and the gradient at them.
    pub(super) dropped: Vec<f32>,
    pub(super) of_dropped: Vec<f32>,
    pub(super) lora: LoraScratch,
}

impl BackwardScratch {
    pub(super) fn outputs_of_residual(&mut self, width: usize) {
        self.outputs.reshape(self.residual.len() / width, width);
        self.outputs.values_mut().copy_from_slice(&self.residual);
    }
}

pub(super) struct Reverse<'a, 'g, B> {
    pub(super) model: &'a ModelContext,
    pub(super) base: &'a mut B,
    pub(super) device: &'a mut Compute,
    pub(super) precision: KvPrecision,
    pub(super) adapter: &'a MethodWeights,
    pub(super) turn: &'a mut ReductionTurn<'g>,
    pub(super) buffers: &'a mut BackwardScratch,
    pub(super) rows: &'a RowTable,
    pub(super) sequences: &'a [SequenceRows],
    pub(super) dropouts: &'a RowDropouts,
    /// First site that learns; the reverse pass ends there.
    pub(super) first: TrainableSite,
}

impl<B> Reverse<'_, '_, B> {
    pub(super) fn goes_below(&self, place: TrainableSite) -> bool {
        self.first < place
    }
}
