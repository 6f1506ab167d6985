//! Base layers on the host's cores, wherever their weights are, as a pass and those who lend it take them.

use std::{convert::Infallible, error::Error, fmt, sync::Arc};

use kernels::Activations;

use crate::{
    cpu::Compute,
    linear_sites::{EvaluateError, EvaluateSites, Site, SiteCall},
    precision::Precision,
    shape::config::ModelConfig,
    weight_stream_stats::{PendingWeights, WeightStreamStats},
    weights::ResidentLayers,
};

/// What is called, on the thread that computes, wherever weights are waited for.
pub type WaitCallback<'a> = &'a mut dyn FnMut(&dyn PendingWeights);

/// The linear layers of a model, and its token embedding.
pub trait HostLayers: fmt::Debug {
    /// Why a layer was not evaluated: `Infallible` for weights in memory.
    type Error: Error + Send + Sync + 'static + From<Infallible>;

    /// The model's shape.
    fn config(&self) -> &ModelConfig;

    /// The sites there are.
    fn sites(&self) -> &[Site];

    /// Computes with `precision` from now on.
    fn set_precision(&mut self, precision: Precision);

    /// Gives sites a ring path, as far as they can have one: [`SiteWeights::commit`](super::sites::SiteWeights::commit). Layers that
    /// come from a disk have none.
    fn commit(&mut self, compute: &mut Compute) {
        let _ = compute;
    }

    /// Bytes of memory.
    fn bytes(&self) -> usize;

    /// Evaluates `call` for all rows of `x` into rows of `out`, and calls `meanwhile` where it waits for weights.
    ///
    /// # Errors
    /// Its weights are not in memory and cannot be read.
    ///
    /// # Panics
    /// If the call's shape is not that of the site.
    fn evaluate(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
        meanwhile: WaitCallback<'_>,
    ) -> Result<(), Self::Error>;

    /// Writes the embeddings of `tokens` to `out`, `[tokens, hidden]`.
    ///
    /// # Errors
    /// They are not in memory and cannot be read.
    ///
    /// # Panics
    /// If the vocabulary has no such token.
    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) -> Result<(), Self::Error>;

    /// Of weights that come from a disk, the floor of each site: see [`EvaluateSites::floors`].
    fn floors(&self) -> Option<Vec<u32>> {
        None
    }

    /// Bytes that a pass reads from a disk, besides embeddings.
    fn sweep_bytes(&self) -> u64 {
        0
    }

    /// Of weights that come from a disk, what that costs.
    fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        None
    }
}

impl HostLayers for ResidentLayers {
    type Error = Infallible;

    fn config(&self) -> &ModelConfig {
        self.config()
    }

    fn sites(&self) -> &[Site] {
        self.sites().sites()
    }

    fn set_precision(&mut self, precision: Precision) {
        self.set_precision(precision);
    }

    fn commit(&mut self, compute: &mut Compute) {
        self.commit(compute);
    }

    fn bytes(&self) -> usize {
        self.bytes()
    }

    fn evaluate(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
        _: WaitCallback<'_>,
    ) -> Result<(), Infallible> {
        self.sites().evaluate(compute, call, x, out);
        Ok(())
    }

    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) -> Result<(), Infallible> {
        self.embedding().embed(tokens, out);
        Ok(())
    }
}

/// The sites of layers that somebody else owns, with the threads he computes with.
#[derive(Debug)]
pub(crate) struct BorrowedSites<'a, L> {
    pub(crate) layers: &'a mut L,
    pub(crate) compute: &'a mut Compute,
}

impl<L: HostLayers> EvaluateSites for BorrowedSites<'_, L> {
    fn sites(&self) -> &[Site] {
        self.layers.sites()
    }

    fn floors(&self) -> Option<Vec<u32>> {
        self.layers.floors()
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        self.layers.sites()[call.site.0 as usize].check_ring(call)?;
        self.layers
            .evaluate(self.compute, call, x, out, &mut |_| {})
            .map_err(|error| EvaluateError::Failed(Box::new(error)))
    }
}
