//! Feed-forward of blocks with experts: each expert computes only the rows that the router sends to it.

use super::{
    Deltas, KvStore, Pass, Scratch, ScratchBuffer, device::Device, expert_routing::ExpertRows,
    traits::BaseLayers,
};
use crate::shape::{experts::Experts, layout::LinearGroup};

impl<D: Device, B: BaseLayers<D>, T: Deltas<D>, K: KvStore<D>> Pass<'_, D, B, T, K> {
    /// Computes the weighted sum of a layer's experts, from the normed residual to the update.
    pub(super) fn mixture(&mut self, layer: usize, experts: &Experts) -> Result<(), B::Error> {
        let Scratch { normed, experts: s, update, .. } = &mut *self.s;
        let hidden = self.model.config.hidden_size;
        self.device.route(self.model, layer, normed, &mut s.routing)?;
        self.device.reshape(ScratchBuffer::Residual(&mut s.sums), s.routing.rows(), hidden)?;
        self.device.clear(&mut s.sums)?;
        for nth in 0..s.routing.experts() {
            let ExpertRows { expert, rows, .. } = s.routing.taken(nth);
            let count = rows.len();
            self.device.reshape(ScratchBuffer::Inputs(&mut s.inputs), count, hidden)?;
            self.device.take_some(normed, rows, &mut s.inputs)?;
            self.device.reshape(ScratchBuffer::Outputs(&mut s.gate_up), count, 2 * experts.width)?;
            let group = LinearGroup::ExpertGateUp(expert);
            self.base.linear(self.device, layer, group, &mut s.inputs, &mut s.gate_up)?;
            self.deltas.add_to_expert(self.device, (layer, group), rows, &s.inputs, &mut s.gate_up)?;
            self.device.reshape(ScratchBuffer::Inputs(&mut s.gated), count, experts.width)?;
            self.device.gate(self.model, &s.gate_up, &mut s.gated)?;
            self.device.reshape(ScratchBuffer::Outputs(&mut s.outputs), count, hidden)?;
            let group = LinearGroup::ExpertDown(expert);
            self.base.linear(self.device, layer, group, &mut s.gated, &mut s.outputs)?;
            self.deltas.add_to_expert(self.device, (layer, group), rows, &s.gated, &mut s.outputs)?;
            self.device.add_weighted(&s.outputs, s.routing.taken(nth), &mut s.sums)?;
        }
        self.device.give_sums(&mut s.sums, update)?;
        Ok(self.deltas.see_experts(self.device, layer, update)?)
    }
}
