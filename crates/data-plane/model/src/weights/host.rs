//! Base layers that the host's cores compute, in memory or streamed, for passes and split clients.

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

/// Callback on the compute thread for each wait for weights.
pub type WaitCallback<'a> = &'a mut dyn FnMut(&dyn PendingWeights);

/// The linear layers of a model, and its token embedding.
pub trait HostLayers: fmt::Debug {
    /// Error of an evaluation: `Infallible` for weights in memory.
    type Error: Error + Send + Sync + 'static + From<Infallible>;

    /// Returns the model's shape.
    fn config(&self) -> &ModelConfig;

    /// Returns all sites, in order.
    fn sites(&self) -> &[Site];

    /// Sets the precision of later evaluations.
    fn set_precision(&mut self, precision: Precision);

    /// Gives sites a modular path where possible; see
    /// [`SiteWeights::commit`](super::sites::SiteWeights::commit). Streamed layers have none.
    fn commit(&mut self, compute: &mut Compute) {
        let _ = compute;
    }

    /// Returns the bytes of memory that the weights take.
    fn bytes(&self) -> usize;

    /// Evaluates `call` for all rows of `x` into `out`; calls `meanwhile` during waits for weights.
    ///
    /// # Errors
    /// The weights are not in memory and cannot be read.
    ///
    /// # Panics
    /// If the shapes of `x` and `out` do not match the site.
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
    /// The embeddings are not in memory and cannot be read.
    ///
    /// # Panics
    /// If the vocabulary has no such token.
    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) -> Result<(), Self::Error>;

    /// Returns the layer chunk of each site if weights are streamed; see [`EvaluateSites::floors`].
    fn floors(&self) -> Option<Vec<u32>> {
        None
    }

    /// Returns the bytes that a pass reads from disk, without embeddings.
    fn sweep_bytes(&self) -> u64 {
        0
    }

    /// Returns the stats of streamed weights, or `None` if all weights are in memory.
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

/// Borrowed layers and compute threads, which evaluate separate calls.
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
