//! Reverse pass through a linear group: frozen layers, and an adapter's deltas or scales.

use kernels::backward::{
    SUM_ROWS,
    attention::SequenceRows,
    lora::{DeltaGradient, FactorGradients, Factors, lora_gradients},
};

use super::{
    dropout::has_low_rank,
    error::TrainError,
    ordered_reduction::UpstreamFailed,
    pass::{GroupActivations, Reverse},
    trainable_site::TrainableSite,
};
use crate::{
    adapter::{ScaleVector, ScaledSide},
    cpu::Compute,
    forward::{LinearGroup, ReverseLayers},
    shape::layout::{group_targets, linear_shape},
};

impl<B: ReverseLayers<Compute>> Reverse<'_, '_, B> {
    /// Turns the gradient at a group's outputs, `buffers.outputs`, into that at its inputs, `buffers.inputs`;
    /// adds up the adapter's gradients. Returns false, without the inputs' gradient, if nothing earlier
    /// learns.
    pub(super) fn group(&mut self, notes: GroupActivations<'_>) -> Result<bool, TrainError<B::Error>> {
        let GroupActivations { layer, group, x, .. } = notes;
        self.scaled_outputs(notes)?;
        let goes_on = self.goes_below(TrainableSite::of(layer, group)) || self.scales_inputs(layer, group);
        if goes_on {
            self.buffers.inputs.resize(x.len(), 0.0);
            let (g, out) = (&mut self.buffers.outputs, &mut self.buffers.inputs);
            self.base.linear_transposed(self.device, layer, group, g, out).map_err(TrainError::Base)?;
        }
        self.low_rank(notes, goes_on)?;
        self.scaled_inputs(notes)?;
        Ok(goes_on)
    }

    fn low_rank(&mut self, notes: GroupActivations<'_>, goes_on: bool) -> Result<(), UpstreamFailed> {
        let GroupActivations { layer, group, x, .. } = notes;
        if self.dropouts.is_none() || !has_low_rank(self.adapter, &self.model.config, layer, group) {
            let mut inputs = std::mem::take(&mut self.buffers.inputs);
            let added = self.modules(notes, goes_on.then_some(&mut inputs[..]));
            self.buffers.inputs = inputs;
            return added;
        }
        let mut dropped = std::mem::take(&mut self.buffers.dropped);
        let mut g = std::mem::take(&mut self.buffers.of_dropped);
        dropped.clear();
        dropped.extend_from_slice(x);
        self.dropouts.apply(self.device, layer, group, &mut dropped);
        g.clear();
        g.resize(x.len(), 0.0);
        self.modules(GroupActivations { x: &dropped, ..notes }, goes_on.then_some(&mut g[..]))?;
        if goes_on {
            self.dropouts.apply(self.device, layer, group, &mut g);
            self.buffers.inputs.iter_mut().zip(&g).for_each(|(sum, g)| *sum += g);
        }
        (self.buffers.dropped, self.buffers.of_dropped) = (dropped, g);
        Ok(())
    }

    /// Adds up the gradients of the group's matrices, and adds to `inputs` the gradient at their inputs.
    fn modules(
        &mut self,
        notes: GroupActivations<'_>,
        mut inputs: Option<&mut [f32]>,
    ) -> Result<(), UpstreamFailed> {
        let GroupActivations { layer, group, x, sequences, .. } = notes;
        let stride = self.buffers.outputs.width();
        for (target, column) in group_targets(&self.model.config, group) {
            let modules = self.adapter.as_lora();
            let Ok(at) =
                modules.binary_search_by_key(&(layer, target), |module| (module.layer, module.target))
            else {
                continue;
            };
            let (module, sums) =
                (&modules[at], self.turn.at(TrainableSite::of(layer, group))?.module(target));
            lora_gradients(
                &mut self.device.pool,
                self.device.isa,
                Factors { rank: module.rank, scale: module.scale, a: &module.a, b: &module.b },
                DeltaGradient { x, g: self.buffers.outputs.values(), stride, column },
                sequences,
                &mut self.buffers.lora,
                &mut FactorGradients { a: &mut sums.a, b: &mut sums.b },
                inputs.as_deref_mut(),
            );
        }
        Ok(())
    }

    fn scales_inputs(&self, layer: usize, group: LinearGroup) -> bool {
        self.vectors(layer, group, ScaledSide::Input).next().is_some()
    }

    /// Returns the vectors that scale this side of a group, with the first column of each.
    fn vectors(
        &self,
        layer: usize,
        group: LinearGroup,
        side: ScaledSide,
    ) -> impl Iterator<Item = (&ScaleVector, usize)> {
        let targets = self.adapter.as_scales().map(|_| group_targets(&self.model.config, group));
        targets.into_iter().flatten().filter_map(move |(target, column)| {
            let vectors = self.adapter.as_scales()?.vectors();
            let at = vectors.binary_search_by_key(&(layer, target), |vector| (vector.layer, vector.target));
            let vector = vectors.get(at.ok()?).filter(|vector| vector.side == side)?;
            Some((vector, if side == ScaledSide::Input { 0 } else { column }))
        })
    }

    /// Reverses `y = l * out`: `l` gets `g * out`, and `out` gets `g * l`.
    fn scaled_outputs(&mut self, notes: GroupActivations<'_>) -> Result<(), UpstreamFailed> {
        let of = self.vectors(notes.layer, notes.group, ScaledSide::Output);
        let of: Vec<_> = of.map(|(vector, column)| (vector.clone(), column)).collect();
        let stride = self.buffers.outputs.width();
        for (vector, column) in of {
            let rows = ScaledRows { x: notes.out, g: self.buffers.outputs.values_mut(), stride, column };
            let sums = self.turn.at(TrainableSite::of(notes.layer, notes.group))?.vector(vector.target);
            rows.scaled(&vector.values, notes.sequences, sums);
        }
        Ok(())
    }

    /// Reverses `y = W (l * x)`: `l` gets `g * x`, and `x` gets `g * l`.
    fn scaled_inputs(&mut self, notes: GroupActivations<'_>) -> Result<(), UpstreamFailed> {
        let of = self.vectors(notes.layer, notes.group, ScaledSide::Input);
        let of: Vec<_> = of.map(|(vector, column)| (vector.clone(), column)).collect();
        for (vector, column) in of {
            let stride = linear_shape(&self.model.config, vector.target)[1];
            let rows = ScaledRows { x: notes.x, g: &mut self.buffers.inputs, stride, column };
            let sums = self.turn.at(TrainableSite::of(notes.layer, notes.group))?.vector(vector.target);
            rows.scaled(&vector.values, notes.sequences, sums);
        }
        Ok(())
    }
}

/// Columns from `column` on of rows before their scaling, and the gradient after it.
struct ScaledRows<'a> {
    x: &'a [f32],
    g: &'a mut [f32],
    stride: usize,
    column: usize,
}

impl ScaledRows<'_> {
    /// Adds `g * x` to `sums`, one sum per `SUM_ROWS` rows of a sequence, and scales `g`.
    fn scaled(self, factors: &[f32], sequences: &[SequenceRows], sums: &mut [f32]) {
        let Self { x, g, stride, column } = self;
        let columns = column..column + factors.len();
        for sequence in sequences {
            for first in (0..sequence.count).step_by(SUM_ROWS) {
                let mut sum = vec![0.0f32; factors.len()];
                let end = sequence.count.min(first + SUM_ROWS);
                for row in sequence.first + first..sequence.first + end {
                    let x = &x[row * stride..][columns.clone()];
                    let g = &mut g[row * stride..][columns.clone()];
                    for (((sum, x), g), factor) in sum.iter_mut().zip(x).zip(g).zip(factors) {
                        *sum = x.mul_add(*g, *sum);
                        *g *= factor;
                    }
                }
                sums.iter_mut().zip(&sum).for_each(|(all, sum)| *all += sum);
            }
        }
    }
}
