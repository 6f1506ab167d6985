//! Base layers of a pass on the CPU that also evaluate co-batched calls of split clients.

use kernels::Activations;

use crate::{
    cpu::Compute,
    forward::BaseLayers,
    linear_sites::{PassHooks, SiteCall, SiteId, SiteOp, SitePath},
    shape::layout::LinearGroup,
    weights::host::{BorrowedSites, HostLayers},
};

/// The base layers of a pass that calls may join.
pub(crate) struct CoBatchedLayers<'a, L> {
    pub(crate) layers: &'a mut L,
    pub(crate) path: SitePath,
    pub(crate) hooks: &'a mut dyn PassHooks,
    /// Outputs of the pass's own and joined rows, kept between passes.
    pub(crate) together: &'a mut Vec<f32>,
}

impl<L: HostLayers> CoBatchedLayers<'_, L> {
    /// Evaluates the pass's `own` rows and the joined rows together, then separates them again.
    fn evaluate_together(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        own: usize,
        out: &mut [f32],
    ) -> Result<(), L::Error> {
        let parts = &self.layers.sites()[call.site.0 as usize].parts;
        let (outputs, rows) = (parts.iter().map(|part| part.rows).sum::<usize>(), x.rows());
        if self.together.len() < rows * outputs {
            self.together.resize(rows * outputs, 0.0);
        }
        let together = &mut self.together[..rows * outputs];
        self.layers.evaluate(compute, call, x, together, &mut |wait| self.hooks.while_waiting(wait))?;
        x.truncate(own);
        let (ours, theirs) = together.split_at(own * outputs);
        out[..ours.len()].copy_from_slice(ours);
        self.hooks.part(theirs);
        Ok(())
    }
}

impl<L: HostLayers> BaseLayers<Compute> for CoBatchedLayers<'_, L> {
    type Error = L::Error;

    fn linear(
        &mut self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), L::Error> {
        let site = SiteId::of(self.layers.config(), layer, group);
        let call = SiteCall { site, part: None, op: SiteOp::Forward, path: self.path };
        self.hooks.before_site(site, &mut BorrowedSites { layers: &mut *self.layers, compute: &mut *device });
        let own = x.rows();
        let joined = self.hooks.join(call, x);
        assert_eq!(x.rows(), own + joined, "hooks append as many rows as they say");
        if joined == 0 {
            self.layers.evaluate(device, call, x, out, &mut |wait| self.hooks.while_waiting(wait))
        } else {
            self.evaluate_together(device, call, x, own, out)
        }
    }

    fn embed(
        &self,
        _device: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut Vec<f32>,
    ) -> Result<(), L::Error> {
        self.layers.embed(tokens, out)
    }
}
