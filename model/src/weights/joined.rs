//! The base layers of a pass on the CPU whose sites serve others' calls too.

use std::convert::Infallible;

use kernels::Activations;

use crate::{
    cpu::Compute,
    forward::BaseLayers,
    shape::layout::LinearGroup,
    sites::{Company, SiteCall},
    weights::{ResidentLayers, sites::LentSites},
};

/// The base layers of a pass that others may join.
pub(crate) struct JoinedLayers<'a> {
    pub(crate) layers: &'a mut ResidentLayers,
    pub(crate) company: &'a mut dyn Company,
    /// Outputs of the pass's rows and of those that joined; kept between passes.
    pub(crate) together: &'a mut Vec<f32>,
}

impl JoinedLayers<'_> {
    /// Evaluates the pass's `own` rows and those that joined, and parts them again: what comes after has only its own.
    fn evaluate_together(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        own: usize,
        out: &mut [f32],
    ) {
        let weights = self.layers.sites();
        let (outputs, rows) = (weights.outputs(call.site), x.rows());
        if self.together.len() < rows * outputs {
            self.together.resize(rows * outputs, 0.0);
        }
        let together = &mut self.together[..rows * outputs];
        weights.evaluate(compute, call, x, together);
        x.truncate(own);
        let (ours, theirs) = together.split_at(own * outputs);
        out[..ours.len()].copy_from_slice(ours);
        self.company.part(theirs);
    }
}

impl BaseLayers<Compute> for JoinedLayers<'_> {
    type Error = Infallible;

    fn linear(
        &mut self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        let call = self.layers.call(layer, group);
        self.company
            .before_site(call.site, &mut LentSites { weights: self.layers.sites(), compute: &mut *device });
        let own = x.rows();
        let joined = self.company.join(call, x);
        assert_eq!(x.rows(), own + joined, "company appends as many rows as it says");
        if joined == 0 {
            self.layers.sites().evaluate(device, call, x, out);
        } else {
            self.evaluate_together(device, call, x, own, out);
        }
        Ok(())
    }

    fn embed(
        &self,
        device: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        self.layers.embed(device, tokens, out)
    }
}
