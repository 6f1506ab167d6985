//! What a forward pass leaves behind for the way back.
//!
//! The pass is the one that serves, and knows nothing of this: whoever adds its deltas and keeps its keys and values notes what
//! they are given. Everything else follows from it, to the same bits.

use std::{cell::RefCell, convert::Infallible};

use kernels::{Activations, attention::QkvLayout, backward::attention::SequenceRows};

use super::dropout::{Dropout, Dropping, RowDropouts};
use crate::{
    cpu::{Compute, RowTable},
    forward::{Deltas, KvStore, LinearGroup, ModelContext, NormSite, Scratch, finish_update},
};

/// What is kept of each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SavedScope {
    /// Everything that the way back reads.
    #[default]
    All,
    /// What goes in; the way back runs the block once more.
    Inputs,
}

/// What went through a transformer block.
#[derive(Debug, Default)]
pub(super) struct LayerActivations {
    /// What goes in: the residual stream before the block, `[rows, hidden]`.
    pub(super) residual: Vec<f32>,
    /// `[q | k | v]` as attention met them: scaled, rotated, a prefix in its place. Empty if only inputs are kept.
    pub(super) qkv: Vec<f32>,
    /// The same before the rotation, and before vectors scaled them; only where somebody asks for it ([`SavedActivations::projected`]).
    pub(super) projected: Vec<f32>,
    /// What attention found, before a vector scaled it.
    pub(super) attended: Vec<f32>,
    /// The residual stream before the feed-forward.
    pub(super) middle: Vec<f32>,
    /// `[gate | up]`, before vectors scaled them.
    pub(super) gate_up: Vec<f32>,
    /// What attention and feed-forward gave, before it was normed; only in models that norm it.
    pub(super) updates: [Vec<f32>; 2],
}

impl LayerActivations {
    /// True if the way back need not run the block once more.
    pub(super) fn is_whole(&self) -> bool {
        !self.qkv.is_empty()
    }
}

/// What is noted, and what was.
#[derive(Debug, Default)]
pub(super) struct SavedActivations {
    pub(super) layers: Vec<LayerActivations>,
    /// The residual stream where the pass is now: behind the last block, in the end.
    pub(super) residual: Vec<f32>,
    /// Whether more than inputs is kept.
    pub(super) is_whole: bool,
    /// Whether `[q | k | v]` are kept as they leave the linear layers.
    pub(super) projected: bool,
    /// Whether the adapter scales outputs, which are noted before it does.
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

    /// The residual stream goes on as the next norm will have it.
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
        let mut finished = update.to_vec();
        finish_update(model, device, site, &mut finished).unwrap_or_else(|never| match never {});
        self.residual.iter_mut().zip(&finished).for_each(add);
        if self.is_whole && model.config.norms_updates() {
            notes.updates[number] = update.to_vec();
        }
        if group == LinearGroup::O && self.is_whole {
            notes.middle.clone_from(&self.residual);
        }
    }
}

/// Deltas of inputs of which something may be dropped, noting what they are given.
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
        // As what a plain feed-forward gives, though there are no deltas.
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

/// Keys and values, noting what they are.
pub(super) struct RecordingKv<'a, K> {
    pub(super) kv: &'a mut K,
    pub(super) notes: &'a RefCell<SavedActivations>,
}

impl<K: KvStore<Compute>> KvStore<Compute> for RecordingKv<'_, K> {
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

/// A row of which the log-probability of a token is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TargetRow {
    /// In the batch.
    pub(super) row: usize,
    pub(super) token: u32,
    /// The sequence that it is of.
    pub(super) sequence: usize,
}

/// What a batch left behind on its way forward.
#[derive(Debug, Default)]
pub struct Tape {
    pub(super) layers: Vec<LayerActivations>,
    /// Behind the last block.
    pub(super) residual: Vec<f32>,
    /// Tokens of each sequence, virtual ones first.
    pub(super) tokens: Vec<Vec<u32>>,
    /// Where their rows are.
    pub(super) sequences: Vec<SequenceRows>,
    /// Ascending by row.
    pub(super) targets: Vec<TargetRow>,
    /// What is dropped of each sequence; none if nothing is.
    pub(super) dropouts: Vec<Dropout>,
}

impl Tape {
    /// Rows of the batch.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sequences.last().map_or(0, |last| last.first + last.count)
    }

    /// What is dropped of each row.
    pub(super) fn row_dropouts(&self) -> RowDropouts {
        RowDropouts::of(&self.sequences, &self.dropouts)
    }

    /// Rows whose log-probabilities were asked for.
    #[must_use]
    pub fn targets(&self) -> usize {
        self.targets.len()
    }
}

/// Puts rows of the residual stream where a pass takes them up. To them it adds an update first: minus zero, which changes
/// no number, not even a zero.
pub(super) fn place_residual(scratch: &mut Scratch<Compute>, residual: &[f32]) {
    scratch.residual.clear();
    scratch.residual.extend_from_slice(residual);
    scratch.update.clear();
    scratch.update.resize(residual.len(), -0.0);
}
