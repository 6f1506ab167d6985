//! Failpoints of a pass, between one linear group and the next.

use kernels::attention::QkvLayout;

use super::{device::Device, traits::Deltas};
use crate::shape::layout::LinearGroup;

/// Deltas with failpoints before and after each group.
pub(super) struct WithFailpoints<'a, T>(pub(super) &'a mut T);

impl<D: Device, T: Deltas<D>> Deltas<D> for WithFailpoints<'_, T> {
    fn change_embeddings(
        &mut self,
        device: &mut D,
        tokens: &mut dyn Iterator<Item = u32>,
        residual: &mut D::Residual,
    ) -> Result<(), D::Error> {
        self.0.change_embeddings(device, tokens, residual)
    }

    fn scale_inputs(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        x: &mut D::Inputs,
    ) -> Result<(), D::Error> {
        if group == LinearGroup::O {
            failpoint::pass("forward.after_attention");
        }
        self.0.scale_inputs(device, layer, group, x)
    }

    fn place_prefix(
        &mut self,
        device: &mut D,
        layer: usize,
        qkv: &mut D::Outputs,
        layout: QkvLayout,
    ) -> Result<(), D::Error> {
        self.0.place_prefix(device, layer, qkv, layout)
    }

    fn begin(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        x: &D::Inputs,
    ) -> Result<(), D::Error> {
        self.0.begin(device, layer, group, x)
    }

    fn add_to_expert(
        &mut self,
        device: &mut D,
        place: (usize, LinearGroup),
        rows: &[u32],
        x: &D::Inputs,
        out: &mut D::Outputs,
    ) -> Result<(), D::Error> {
        self.0.add_to_expert(device, place, rows, x, out)
    }

    fn see_experts(&mut self, device: &mut D, layer: usize, update: &D::Outputs) -> Result<(), D::Error> {
        self.0.see_experts(device, layer, update)?;
        failpoint::pass("forward.after_down");
        Ok(())
    }

    fn add(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        x: &D::Inputs,
        out: &mut D::Outputs,
    ) -> Result<(), D::Error> {
        self.0.add(device, layer, group, x, out)?;
        failpoint::pass(match group {
            LinearGroup::Qkv => "forward.after_qkv",
            LinearGroup::O => "forward.after_o",
            LinearGroup::GateUp | LinearGroup::ExpertGateUp(_) => "forward.after_gate_up",
            LinearGroup::Down | LinearGroup::ExpertDown(_) => "forward.after_down",
            LinearGroup::Head => "forward.head",
        });
        Ok(())
    }
}
