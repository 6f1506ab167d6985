//! Frozen weights, packed for the CPU.
//!
//! # Layout
//!
//! - this file: the linear groups of a known architecture, in memory.
//! - [`sites`]: linear layers of any base, by site number.
//! - [`embedding`]: the token embedding.
//! - [`tensors`]: reads and checks single tensors.
//! - `packing`: packs many tensors with several threads.
//! - [`host`]: base layers that host cores compute, in memory or streamed.
//! - [`streamed`]: weights that are mostly on a disk.
//! - [`device_group`]: weights that several processes of a host hold together.
//! - [`served`]: weights in memory, streamed, or of a device group.
//! - [`first`]: the first layers of a base as a model of their own.
//! - `modular`: the modular path of sites and the commitments to its weights.
//! - `co_batched`: layers of a pass that also serve calls of split clients.

pub(crate) mod co_batched;
pub mod device_group;
pub mod embedding;
pub mod first;
pub mod host;
pub(crate) mod modular;
pub(crate) mod packing;
pub mod served;
pub mod sites;
pub mod streamed;
pub mod tensors;

use std::{convert::Infallible, sync::Arc};

use kernels::{Activations, Arena, PackedLayout};

use crate::{
    cpu::Compute,
    forward::{BaseLayers, ReverseLayers},
    linear_sites::{SiteCall, SiteId, SiteOp, SitePath},
    precision::Precision,
    shape::{
        config::ModelConfig,
        layout::{LinearGroup, block_groups, block_weights, group_weights, tensor_shape},
        source::{Target, TensorId, WeightSource},
    },
    sources::hf_names::{linear_name, module_name},
    weights::{
        embedding::Embedding,
        first::{PiecewiseMatrix, SharedLayers, block_sites},
        packing::{ProgressCallback, pack_all},
        sites::{Linear, SiteWeights},
        tensors::{pack_tensor, read_bias},
    },
};

pub use crate::{
    shape::layout::group_targets,
    weights::{
        packing::LoadProgress,
        tensors::{WeightsError, load_norms},
    },
};

/// Base layers of a known architecture with all weights in memory: the sites of each block, then the head.
#[derive(Debug)]
pub struct ResidentLayers {
    sites: SiteWeights,
    embedding: Embedding,
    config: ModelConfig,
}

impl ResidentLayers {
    /// Reads and packs all linear layers and the embedding with `threads` threads, which report to `told`.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another shape than the configuration implies, or memory runs out.
    pub fn load(
        source: &(dyn WeightSource + Sync),
        threads: usize,
        told: ProgressCallback<'_>,
    ) -> Result<Self, WeightsError> {
        let config = source.config();
        let elements = |id: &TensorId| elements(config, *id);
        let packed =
            pack_all(&matrices(config), elements, threads, told, |arena, &id| pack(source, arena, id))?;
        let mut packed = packed.into_iter();
        let mut next = || packed.next().expect("one result a job");
        let head = (!config.tied_head).then(&mut next);
        let embedding = Embedding::new(next().matrix);
        let blocks = (0..config.layers).flat_map(|layer| block_groups(config, layer));
        let mut sites: Vec<Vec<Linear>> =
            blocks.map(|group| group_weights(0, group).iter().map(|_| next()).collect()).collect();
        sites.push(vec![head.unwrap_or_else(|| tied_head(&embedding))]);
        Ok(Self { sites: SiteWeights::new(sites, Some(config)), embedding, config: config.clone() })
    }

    /// Returns the linear layers by site.
    #[must_use]
    pub fn sites(&self) -> &SiteWeights {
        &self.sites
    }

    /// Returns only the linear layers, for a base whose clients run the rest of the pass.
    #[must_use]
    pub fn into_sites(self) -> SiteWeights {
        self.sites
    }

    /// Sets the precision of later evaluations.
    pub fn set_precision(&mut self, precision: Precision) {
        self.sites.set_precision(precision);
    }

    /// Commits to the weights, as [`SiteWeights::commit`] does.
    pub fn commit(&mut self, compute: &mut Compute) {
        self.sites.commit(compute);
    }

    /// Returns the token embedding.
    #[must_use]
    pub fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    /// Returns the model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the bytes of memory that all weights take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // The sites include a tied head.
        self.sites.bytes() + if self.config.tied_head { 0 } else { self.embedding.bytes() }
    }

    pub(crate) fn shared(&self) -> SharedLayers {
        let config = &self.config;
        let site = |site| self.sites.of(site).to_vec();
        let head = self.sites.of(SiteId::of(config, 0, LinearGroup::Head));
        SharedLayers {
            blocks: (0..config.layers).map(|block| block_sites(config, block).map(site).collect()).collect(),
            embedding: PiecewiseMatrix::new(vec![Arc::clone(self.embedding.matrix())]),
            head: PiecewiseMatrix::new(head.iter().map(|linear| Arc::clone(&linear.matrix)).collect()),
            group: None,
        }
    }

    pub(crate) fn call(&self, layer: usize, group: LinearGroup) -> SiteCall {
        let site = SiteId::of(&self.config, layer, group);
        SiteCall { site, part: None, op: SiteOp::Forward, path: SitePath::Fast }
    }
}

impl BaseLayers<Compute> for ResidentLayers {
    type Error = Infallible;

    fn linear(
        &mut self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        self.sites.evaluate(device, self.call(layer, group), x, out);
        Ok(())
    }

    fn embed(
        &self,
        _device: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        self.embedding.embed(tokens, out);
        Ok(())
    }
}

impl ReverseLayers<Compute> for ResidentLayers {
    fn linear_transposed(
        &mut self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        g: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        let call = SiteCall { op: SiteOp::Backward, ..self.call(layer, group) };
        self.sites.evaluate(device, call, g, out);
        Ok(())
    }
}

pub(crate) fn elements(config: &ModelConfig, id: TensorId) -> u64 {
    let [rows, cols] = tensor_shape(config, id);
    (rows as u64).saturating_mul(cols as u64)
}

/// Returns the matrices to pack: head, embedding, then each block. The largest come first, so that no thread
/// packs one of them alone at the end.
pub(crate) fn matrices(config: &ModelConfig) -> Vec<TensorId> {
    let head = (!config.tied_head).then_some(TensorId::Weight(0, Target::LmHead));
    let blocks = (0..config.layers).flat_map(|layer| block_weights(config, layer));
    head.into_iter().chain([TensorId::TokenEmbedding]).chain(blocks).collect()
}

/// Returns the bytes of `source`'s packed matrices without reading any; a missing matrix counts as zero.
#[must_use]
pub fn packed_bytes(source: &dyn WeightSource) -> u64 {
    let config = source.config();
    let bytes = |id| {
        let [rows, cols] = tensor_shape(config, id);
        let form = PackedLayout::known(source.kind(id)?, rows, cols, 1.0)?;
        Some(form.bytes() as u64)
    };
    matrices(config).into_iter().filter_map(bytes).fold(0, u64::saturating_add)
}

fn pack(source: &dyn WeightSource, arena: &Arena, id: TensorId) -> Result<Linear, WeightsError> {
    let matrix = Arc::new(pack_tensor(source, arena, id)?);
    let bias = read_bias(source, id, matrix.rows())?;
    Ok(Linear { name: linear_name(source.config(), id), matrix, bias })
}

fn tied_head(embedding: &Embedding) -> Linear {
    let name = module_name(0, Target::LmHead);
    Linear { name, matrix: Arc::clone(embedding.matrix()), bias: None }
}
