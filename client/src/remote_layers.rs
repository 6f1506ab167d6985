//! The base layers of a pass and of its reverse, evaluated by an executor.

use kernels::Activations;
use model::{
    cpu::Compute,
    forward::{BaseLayers, LinearGroup, ReverseLayers},
    shape::{config::ModelConfig, layout::linear_shape},
    sites::SiteId,
    weights::{embedding::Embedding, group_targets},
};
use shmproto::layer::{Class, control::Site};

use crate::{
    error::CallError,
    masking::{Direction, Mask, Place},
    session::Session,
};

/// The sites of an executor as the layers of a known architecture. Embeddings are looked up here.
#[derive(Debug)]
pub struct RemoteLayers {
    session: Session,
    mask: Box<dyn Mask>,
    embedding: Embedding,
    layers: usize,
    class: Class,
}

impl RemoteLayers {
    /// Over `session`, whose base has the shape `config`.
    ///
    /// # Errors
    /// The executor's sites have another shape.
    pub fn new(
        session: Session,
        mask: Box<dyn Mask>,
        config: &ModelConfig,
        embedding: Embedding,
    ) -> Result<Self, CallError> {
        let sites = &session.catalog().sites;
        for layer in 0..config.layers {
            for group in [LinearGroup::Qkv, LinearGroup::O, LinearGroup::GateUp, LinearGroup::Down] {
                check(sites, config, layer, group)?;
            }
        }
        check(sites, config, 0, LinearGroup::Head)?;
        Ok(Self { session, mask, embedding, layers: config.layers, class: Class::Decode })
    }

    /// What the rows of the next calls are for.
    pub fn set_class(&mut self, class: Class) {
        self.class = class;
    }

    fn place(&self, layer: usize, group: LinearGroup, direction: Direction) -> Place {
        Place { site: SiteId::of(self.layers, layer, group), direction, class: self.class }
    }

    /// The masking mode.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        self.mask.mode()
    }

    /// The session below.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The session below, to ask it for figures.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }
}

/// Compares a site with what the pass will send it.
fn check(sites: &[Site], config: &ModelConfig, layer: usize, group: LinearGroup) -> Result<(), CallError> {
    let number = SiteId::of(config.layers, layer, group).0;
    let site = sites.get(number as usize).ok_or(CallError::UnknownSite { site: number })?;
    let parts = site.parts.iter().map(|part| [part.rows as usize, site.columns as usize]);
    let wanted = group_targets(config, group);
    if parts.eq(wanted.iter().map(|&(target, _)| linear_shape(config, target))) {
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
