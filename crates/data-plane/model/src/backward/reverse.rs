//! Reverse pass through the transformer blocks.

use kernels::{
    backward::{
        attention::{AttentionInputs, attention_gradient},
        elementwise::{gate_mul_gradient, norm_gradient, rotate_gradient},
    },
    elementwise::{add_norm, gate_mul},
};

use super::{
    error::TrainError,
    ordered_reduction::UpstreamFailed,
    pass::{GroupActivations, Reverse},
    saved_activations::LayerActivations,
    trainable_site::TrainableSite,
};
use crate::{
    adapter::{MethodWeights, ScaledSide},
    cpu::Compute,
    forward::{LinearGroup, NormSite, ReverseLayers},
    shape::layout::group_targets,
};

impl<B: ReverseLayers<Compute>> Reverse<'_, '_, B> {
    /// Reverses a block: turns the gradient after it, in `buffers.residual`, into the gradient before it.
    /// Returns false, without that gradient, if no earlier site learns.
    pub(super) fn block(
        &mut self,
        layer: usize,
        notes: &LayerActivations,
    ) -> Result<bool, TrainError<B::Error>> {
        Ok(self.feed_forward(layer, notes)? && self.attention(layer, notes)?)
    }

    fn feed_forward(&mut self, layer: usize, notes: &LayerActivations) -> Result<bool, TrainError<B::Error>> {
        if let Some(experts) = self.model.config.experts_of(layer) {
            return self.mixture(layer, experts, notes);
        }
        let (gate, width) = (self.model.config.traits.gate, self.model.config.intermediate_size);
        let scaled = self.scaled(layer, LinearGroup::GateUp, &notes.gate_up);
        let gate_up = scaled.as_deref().unwrap_or(&notes.gate_up);
        let mut x = std::mem::take(&mut self.buffers.x);
        x.resize(gate_up.len() / 2, 0.0);
        gate_mul(&mut self.device.pool, self.device.isa, gate, gate_up, width, &mut x);
        self.outputs_of_residual(NormSite::FeedForwardUpdate(layer), &notes.updates[1]);
        let down = self.notes(layer, LinearGroup::Down, &x, &[]);
        let goes_on = self.whole_group(down)?;
        if goes_on {
            let Compute { pool, isa } = &mut *self.device;
            let (outputs, g) = (&mut self.buffers.outputs, &self.buffers.inputs);
            outputs.reshape(g.len() / width, 2 * width);
            gate_mul_gradient(pool, *isa, gate, gate_up, g, width, outputs.values_mut());
        }
        let goes_on = goes_on && {
            self.normed(NormSite::FeedForward(layer), &notes.middle, &mut x);
            let gate_up = self.notes(layer, LinearGroup::GateUp, &x, &notes.gate_up);
            self.whole_group(gate_up)?
        };
        if goes_on {
            self.through_norm(NormSite::FeedForward(layer), &notes.middle);
        }
        self.buffers.x = x;
        Ok(goes_on)
    }

    fn attention(&mut self, layer: usize, notes: &LayerActivations) -> Result<bool, TrainError<B::Error>> {
        self.outputs_of_residual(NormSite::AttentionUpdate(layer), &notes.updates[0]);
        let o = self.notes(layer, LinearGroup::O, &notes.attended, &[]);
        if !self.whole_group(o)? {
            return Ok(false);
        }
        self.attended(layer, notes);
        self.prefix(layer)?;
        if !self.goes_below(TrainableSite::keys_and_values(layer)) {
            return Ok(false);
        }
        self.rotated(layer, notes);
        let mut x = std::mem::take(&mut self.buffers.x);
        self.normed(NormSite::Attention(layer), &notes.residual, &mut x);
        let qkv = self.notes(layer, LinearGroup::Qkv, &x, &notes.projected);
        let goes_on = self.whole_group(qkv)?;
        if goes_on {
            self.through_norm(NormSite::Attention(layer), &notes.residual);
        }
        self.buffers.x = x;
        Ok(goes_on)
    }

    /// Computes the gradient at a block part's output from that at the residual stream, through the output's
    /// scale and norm if the model has them.
    pub(super) fn outputs_of_residual(&mut self, site: NormSite, update: &[f32]) {
        let hidden = self.model.config.hidden_size;
        if let Some(norm) = self.model.norm(site) {
            let (Compute { pool, isa }, g) = (&mut *self.device, &self.buffers.residual);
            let outputs = &mut self.buffers.outputs;
            outputs.reshape(g.len() / hidden, hidden);
            outputs.values_mut().fill(0.0);
            norm_gradient(pool, *isa, update, g, norm, outputs.values_mut());
        } else {
            self.buffers.outputs_of_residual(hidden);
        }
        if let Some(factor) = self.model.config.traits.update_scale {
            self.buffers.outputs.values_mut().iter_mut().for_each(|g| *g *= factor);
        }
    }

    /// Reverses a group with all rows of the batch and passes the group's sums to the following batch.
    fn whole_group(&mut self, notes: GroupActivations<'_>) -> Result<bool, TrainError<B::Error>> {
        let goes_on = self.group(notes)?;
        self.turn.pass_on();
        Ok(goes_on)
    }

    fn notes<'n>(
        &self,
        layer: usize,
        group: LinearGroup,
        x: &'n [f32],
        out: &'n [f32],
    ) -> GroupActivations<'n>
    where
        Self: 'n,
    {
        GroupActivations { layer, group, x, out, sequences: self.sequences }
    }

    /// Returns a group's outputs after scaling, or `None` if the adapter has no scales.
    fn scaled(&self, layer: usize, group: LinearGroup, out: &[f32]) -> Option<Vec<f32>> {
        let scales = self.adapter.as_scales()?;
        let targets = group_targets(&self.model.config, group);
        let mut scaled = out.to_vec();
        let stride = scaled.len() / self.rows();
        for row in scaled.chunks_exact_mut(stride) {
            for &(target, column) in &targets {
                let Some(factors) = scales.get(layer, target, ScaledSide::Output) else { continue };
                row[column..].iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
            }
        }
        Some(scaled)
    }

    fn rows(&self) -> usize {
        self.sequences.last().map_or(0, |last| last.first + last.count)
    }

    /// Computes `x = norm(residual)` as in the forward pass.
    pub(super) fn normed(&mut self, site: NormSite, residual: &[f32], x: &mut Vec<f32>) {
        x.resize(residual.len(), 0.0);
        let Some(norm) = self.model.norm(site) else { return x.copy_from_slice(residual) };
        // Without an update the kernel does not change the residual, but it needs a mutable copy.
        add_norm(&mut self.device.pool, self.device.isa, &mut residual.to_vec(), None, norm, x);
    }

    /// Adds the gradient at a norm's input, computed from `buffers.inputs`, to that at the residual stream.
    pub(super) fn through_norm(&mut self, site: NormSite, residual: &[f32]) {
        let (Compute { pool, isa }, g) = (&mut *self.device, &self.buffers.inputs);
        match self.model.norm(site) {
            Some(norm) => norm_gradient(pool, *isa, residual, g, norm, &mut self.buffers.residual),
            None => self.buffers.residual.iter_mut().zip(g).for_each(|(sum, g)| *sum += g),
        }
    }

    /// Turns the gradient at the attention output, `buffers.inputs`, into that at `[q | k | v]`,
    /// `buffers.outputs`.
    fn attended(&mut self, layer: usize, notes: &LayerActivations) {
        let layout = self.model.qkv_layout();
        let from = AttentionInputs {
            qkv: &notes.qkv,
            layout,
            precision: self.precision,
            limits: self.model.config.limits_of(layer),
            sinks: self.model.attention.sinks(layer),
            out: &notes.attended,
        };
        let Compute { pool, isa } = &mut *self.device;
        let (g, outputs) = (&self.buffers.inputs, &mut self.buffers.outputs);
        outputs.reshape(notes.qkv.len() / layout.stride(), layout.stride());
        attention_gradient(pool, *isa, from, self.sequences, g, outputs.values_mut());
    }

    /// Adds up the gradients at virtual tokens' keys and values, and clears them for the layers below.
    fn prefix(&mut self, layer: usize) -> Result<(), UpstreamFailed> {
        let MethodWeights::Prefix(_) = self.adapter else { return Ok(()) };
        let sums = self.turn.at(TrainableSite::keys_and_values(layer))?.tokens();
        let layout = self.model.qkv_layout();
        let (stride, keys) = (layout.stride(), layout.heads * layout.head_dim);
        let g = self.buffers.outputs.values_mut();
        for sequence in self.sequences {
            for (token, sum) in sums.iter_mut().enumerate() {
                let row = &mut g[(sequence.first + token) * stride..][..stride];
                sum.iter_mut().zip(&row[keys..]).for_each(|(sum, g)| *sum += g);
                row.fill(0.0);
            }
        }
        self.turn.pass_on();
        Ok(())
    }

    /// Turns the gradient at rotated queries and keys into that at the outputs of the linear layers.
    fn rotated(&mut self, layer: usize, notes: &LayerActivations) {
        let scaled = self.scaled(layer, LinearGroup::Qkv, &notes.projected);
        let before = scaled.as_deref().unwrap_or(&notes.projected);
        let (layout, heads) = (self.model.qkv_layout(), Compute::heads(self.model, layer));
        let by = self.rows.rotation(&self.model.config, layer);
        let Compute { pool, isa } = &mut *self.device;
        let g = self.buffers.outputs.values_mut();
        rotate_gradient(pool, *isa, g, before, layout.stride(), layout.head_dim, by, &heads);
    }
}
