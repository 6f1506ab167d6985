//! The linear layers of forward and backward passes, computed by an executor.

use kernels::Activations;
use model::{
    cpu::Compute,
    forward::{BaseLayers, LinearGroup, ReverseLayers},
    linear_sites::SiteId,
    shape::{
        config::ModelConfig,
        layout::{group_weights, model_groups, tensor_shape},
    },
    weights::embedding::Embedding,
};
use shmproto::layer::{CallClass, control::Site};

use crate::{
    error::CallError,
    masking::{CallSite, Direction, Mask},
    session::Session,
};

/// The sites of an executor, as the layers of a known architecture. Embeddings are looked up locally.
#[derive(Debug)]
pub struct RemoteLayers {
    session: Session,
    mask: Box<dyn Mask>,
    embedding: Embedding,
    config: ModelConfig,
    class: CallClass,
}

impl RemoteLayers {
    /// Uses `session`, whose base must have the shape `config`.
    ///
    /// # Errors
    /// Fails if the executor's sites have another shape.
    pub fn new(
        session: Session,
        mask: Box<dyn Mask>,
        config: &ModelConfig,
        embedding: Embedding,
    ) -> Result<Self, CallError> {
        let sites = &session.catalog().sites;
        for (layer, group) in model_groups(config) {
            check(sites, config, layer, group)?;
        }
        Ok(Self { session, mask, embedding, config: config.clone(), class: CallClass::Decode })
    }

    /// Sets the purpose of the rows of the next calls.
    pub fn set_class(&mut self, class: CallClass) {
        self.class = class;
    }

    fn place(&self, layer: usize, group: LinearGroup, direction: Direction) -> CallSite {
        CallSite { site: SiteId::of(&self.config, layer, group), direction, class: self.class }
    }

    /// Returns the masking mode.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        self.mask.mode()
    }

    /// Returns the session with the executor.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the session with the executor, to ask for its stats.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }
}

/// Compares a site with the shapes that the pass uses.
fn check(sites: &[Site], config: &ModelConfig, layer: usize, group: LinearGroup) -> Result<(), CallError> {
    let number = SiteId::of(config, layer, group).0;
    let site = sites.get(number as usize).ok_or(CallError::UnknownSite { site: number })?;
    let parts = site.parts.iter().map(|part| [part.rows as usize, site.columns as usize]);
    if parts.eq(group_weights(layer, group).into_iter().map(|id| tensor_shape(config, id))) {
        Ok(())
    } else {
        Err(CallError::Shape { site: number, rows: 0, reason: "its widths are not the model's" })
    }
}

impl BaseLayers<Compute> for RemoteLayers {
    type Error = CallError;

    fn linear(
        &mut self,
        _compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), CallError> {
        let place = self.place(layer, group, Direction::Forward);
        self.mask.call(&mut self.session, place, x.values(), out)
    }

    fn embed(
        &self,
        _compute: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut Vec<f32>,
    ) -> Result<(), CallError> {
        self.embedding.embed(tokens, out);
        Ok(())
    }
}

impl ReverseLayers<Compute> for RemoteLayers {
    fn linear_transposed(
        &mut self,
        _compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        g: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), CallError> {
        let place = self.place(layer, group, Direction::Backward);
        self.mask.call(&mut self.session, place, g.values(), out)
    }
}
