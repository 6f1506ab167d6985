//! Saved activations of a forward pass for the reverse pass.
//!
//! The forward pass is the serving one and does not know of the recording. Wrappers of its deltas and KV
//! cache record the values they receive. All other values are computed again from these, to the same bits.

use std::{cell::RefCell, convert::Infallible};

use kernels::{Activations, attention::QkvLayout, backward::attention::SequenceRows};

use super::dropout::{Dropout, Dropping, RowDropouts};
use crate::{
    cpu::{Compute, RowTable},
    forward::{Deltas, KvStore, LinearGroup, ModelContext, NormSite, Scratch, finish_update},
};

/// Values that are saved for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SavedScope {
    /// All values that the backward pass reads.
    #[default]
    All,
    /// The block's input only; the reverse pass runs the block again.
    Inputs,
}

#[derive(Debug, Default)]
pub(super) struct LayerActivations {
    /// Residual stream before the block, `[rows, hidden]`.
    pub(super) residual: Vec<f32>,
    /// `[q | k | v]` as attention reads them: scaled, rotated, with prefix, keys centered. Empty if only
    /// inputs are saved.
    pub(super) qkv: Vec<f32>,
    /// `[q | k | v]` before rotation and scaling, saved only if [`SavedActivations::projected`] is set.
    pub(super) projected: Vec<f32>,
    /// Attention output before scaling.
    pub(super) attended: Vec<f32>,
    pub(super) middle: Vec<f32>,
    /// `[gate | up]` before scaling.
    pub(super) gate_up: Vec<f32>,
    /// Outputs of attention and feed-forward before their norms, only in models that norm them.
    pub(super) updates: [Vec<f32>; 2],
}

impl LayerActivations {
    /// True if the reverse pass need not run the block again.
    pub(super) fn is_whole(&self) -> bool {
        !self.qkv.is_empty()
    }
}

/// Settings of the recording, and the activations recorded so far.
#[derive(Debug, Default)]
pub(super) struct SavedActivations {
    pub(super) layers: Vec<LayerActivations>,
    /// Residual stream at the current point of the pass; at the end, after the last block.
    pub(super) residual: Vec<f32>,
    /// Whether more than the blocks' inputs is saved.
    pub(super) is_whole: bool,
    /// Whether `[q | k | v]` are saved before rotation.
    pub(super) projected: bool,
    /// Whether the adapter scales outputs; then these are recorded before scaling.
    pub(super) before_scales: bool,
}

impl SavedActivations {
    fn note_outputs(&mut self, layer: usize, group: LinearGroup, out: &[f32]) {
        let Some(notes) = self.layers.get_mut(layer).filter(|_| self.is_whole) else { return };
        match group {
            LinearGroup::Qkv if self.projected => notes.projected = out.to_vec(),
            LinearGroup::GateUp => notes.gate_up = out.to_vec(),
            _ => {}
        }
    }

    /// Updates the residual stream to the input of the next norm.
    fn advance_residual(
        &mut self,
        device: &mut Compute,
        model: &ModelContext,
        layer: usize,
        group: LinearGroup,
        update: &[f32],
    ) {
        let (number, site) = match group {
            LinearGroup::O => (0, NormSite::AttentionUpdate(layer)),
            LinearGroup::Down => (1, NormSite::FeedForwardUpdate(layer)),
            _ => return,
        };
        let notes = &mut self.layers[layer];
        if group == LinearGroup::O {
            notes.residual.clone_from(&self.residual);
        }
        let add = |(residual, update): (&mut f32, &f32)| *residual += update;
        // A copy of all rows costs more than what most models do with it: nothing.
        let is_changed = model.config.norms_updates() || model.config.traits.update_scale.is_some();
        let finished = is_changed.then(|| {
            let mut finished = update.to_vec();
            finish_update(model, device, site, &mut finished).unwrap_or_else(|never| match never {});
            finished
        });
        self.residual.iter_mut().zip(finished.as_deref().unwrap_or(update)).for_each(add);
        if self.is_whole && model.config.norms_updates() {
            notes.updates[number] = update.to_vec();
        }
        if group == LinearGroup::O && self.is_whole {
            notes.middle.clone_from(&self.residual);
        }
    }
}

/// Deltas that apply dropout to their inputs and record activations.
pub(super) struct RecordingDeltas<'a, T> {
    pub(super) model: &'a ModelContext,
    pub(super) deltas: T,
    pub(super) dropping: Dropping<'a>,
    pub(super) notes: &'a RefCell<SavedActivations>,
}

impl<T: Deltas<Compute>> Deltas<Compute> for RecordingDeltas<'_, T> {
    fn change_embeddings(
        &mut self,
        device: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        residual: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        self.deltas.change_embeddings(device, tokens, residual)
    }

    fn scale_inputs(
        &mut self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
    ) -> Result<(), Infallible> {
        let notes = &mut *self.notes.borrow_mut();
        if group == LinearGroup::O && notes.is_whole {
            notes.layers[layer].attended = x.values().to_vec();
        }
        self.deltas.scale_inputs(device, layer, group, x)
    }

    fn place_prefix(
        &mut self,
        device: &mut Compute,
        layer: usize,
        qkv: &mut Vec<f32>,
        layout: QkvLayout,
    ) -> Result<(), Infallible> {
        self.deltas.place_prefix(device, layer, qkv, layout)
    }

    fn begin(
        &mut self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &Activations,
    ) -> Result<(), Infallible> {
        self.deltas.begin(device, layer, group, x)
    }

    fn see_experts(
        &mut self,
        device: &mut Compute,
        layer: usize,
        update: &Vec<f32>,
    ) -> Result<(), Infallible> {
        // A mixture's output counts as that of a plain feed-forward, although it has no deltas.
        self.notes.borrow_mut().advance_residual(device, self.model, layer, LinearGroup::Down, update);
        Ok(())
    }

    fn add(
        &mut self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        let notes = &mut *self.notes.borrow_mut();
        if notes.before_scales {
            notes.note_outputs(layer, group, out);
        }
        let dropped = self.dropping.dropped(device, layer, group, x);
        self.deltas.add(device, layer, group, dropped.as_ref().unwrap_or(x), out)?;
        if !notes.before_scales {
            notes.note_outputs(layer, group, out);
        }
        notes.advance_residual(device, self.model, layer, group, out);
        Ok(())
    }
}

/// KV cache that records the rows `[q | k | v]` of each layer.
pub(super) struct RecordingKv<'a, K> {
    pub(super) kv: &'a mut K,
    pub(super) notes: &'a RefCell<SavedActivations>,
}

impl<K: KvStore<Compute>> KvStore<Compute> for RecordingKv<'_, K> {
    fn center_keys(&self, layer: usize, qkv: &mut Vec<f32>, layout: QkvLayout) {
        self.kv.center_keys(layer, qkv, layout);
    }

    fn append(
        &mut self,
        device: &mut Compute,
        layer: usize,
        qkv: &Vec<f32>,
        layout: QkvLayout,
        batch: &RowTable,
    ) -> Result<(), Infallible> {
        let notes = &mut *self.notes.borrow_mut();
        if notes.is_whole {
            notes.layers[layer].qkv = qkv.clone();
        }
        self.kv.append(device, layer, qkv, layout, batch)
    }

    fn attend(
        &self,
        device: &mut Compute,
        layer: usize,
        qkv: &Vec<f32>,
        layout: QkvLayout,
        batch: &RowTable,
        out: &mut Activations,
    ) -> Result<(), Infallible> {
        self.kv.attend(device, layer, qkv, layout, batch, out)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TargetRow {
    pub(super) row: usize,
    pub(super) token: u32,
    pub(super) sequence: usize,
}

/// Record of a batch's forward pass, for the reverse pass.
#[derive(Debug, Default)]
pub struct Tape {
    pub(super) layers: Vec<LayerActivations>,
    /// Residual stream after the last block.
    pub(super) residual: Vec<f32>,
    /// Tokens of each sequence, virtual ones first.
    pub(super) tokens: Vec<Vec<u32>>,
    pub(super) sequences: Vec<SequenceRows>,
    /// Targets, ascending by row.
    pub(super) targets: Vec<TargetRow>,
    /// Dropout of each sequence, or an empty list without dropout.
    pub(super) dropouts: Vec<Dropout>,
}

impl Tape {
    /// Returns the number of rows in the batch.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sequences.last().map_or(0, |last| last.first + last.count)
    }

    pub(super) fn row_dropouts(&self) -> RowDropouts {
        RowDropouts::of(&self.sequences, &self.dropouts)
    }

    /// Returns the number of targets in the batch.
    #[must_use]
    pub fn targets(&self) -> usize {
        self.targets.len()
    }
}

/// Places rows of the residual stream where a pass continues. The pass first adds an update, which is set to
/// minus zero, because that changes no value, not even the sign of a zero.
pub(super) fn place_residual(scratch: &mut Scratch<Compute>, residual: &[f32]) {
    scratch.residual.clear();
    scratch.residual.extend_from_slice(residual);
    scratch.update.clear();
    scratch.update.resize(residual.len(), -0.0);
}
