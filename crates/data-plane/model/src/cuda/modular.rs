//! The ring path of sites whose weights are on the device: what is promised of them.

use kernels::{PackError, PackedLayout, PackedMatrix};

use super::{model::CudaModelError, weights::CudaWeights};
use crate::{
    linear_sites::{ModularSite, SiteId},
    shape::{
        config::ModelConfig,
        layout::{LinearGroup, group_weights},
        source::{TensorId, WeightSource},
    },
    weights::{WeightsError, modular::ring_site, packing::pack_all, tensors::read_matrix},
};

impl CudaWeights {
    /// Gives the sites a ring path, as far as they can have one, and commits to their weights. The host keeps none of these: they
    /// are read from `source`, which they came from, and packed once more, a site at a time by each of `threads` threads. For those
    /// who serve clients that mask their rows.
    ///
    /// # Errors
    ///
    /// The files do not hold what their configuration says, or the host has no room for a site.
    pub fn commit(
        &mut self,
        source: &(dyn WeightSource + Sync),
        threads: usize,
    ) -> Result<(), CudaModelError> {
        let sites: Vec<SiteId> = (0..).map(SiteId).take(self.layers.sites.len()).collect();
        let elements = |site: &SiteId| {
            let shape = &self.layers.sites[site.0 as usize];
            shape.parts.iter().map(|part| (part.rows * shape.columns) as u64).sum()
        };
        let promised = pack_all(&sites, elements, threads, &|_| {}, |_, &site| {
            promise(source, &tensors(source.config(), site))
        })?;
        for ((site, layers), promised) in
            self.layers.sites.iter_mut().zip(&mut self.layers.layers).zip(promised)
        {
            site.ring = promised.ring;
            for (linear, unit) in layers.iter_mut().zip(promised.units) {
                linear.unit = unit;
            }
        }
        Ok(())
    }
}

/// What there is to know of a site in whole numbers.
struct ModularFacts {
    ring: Option<ModularSite>,
    /// What the scales of its matrices are relative to.
    units: Vec<f32>,
}

/// The matrices of a site.
fn tensors(config: &ModelConfig, site: SiteId) -> Vec<TensorId> {
    let (layer, group) = site.group(config).expect("the site is one of a known architecture");
    if group == LinearGroup::Head && config.tied_head {
        return vec![TensorId::TokenEmbedding];
    }
    group_weights(layer, group)
}

/// Packs the matrices of a site as the CPU does, looks at them and drops them.
fn promise(source: &dyn WeightSource, tensors: &[TensorId]) -> Result<ModularFacts, WeightsError> {
    let (mut matrices, mut units) = (Vec::new(), Vec::new());
    for &id in tensors {
        let tensor = read_matrix(source, id)?;
        let failed = |source: PackError| WeightsError::Pack { id, source };
        let form = PackedLayout::of(tensor.kind, &tensor.data, tensor.rows, tensor.cols).map_err(failed)?;
        units.push(form.unit());
        let matrix = PackedMatrix::pack(tensor.kind, &tensor.data, tensor.rows, tensor.cols);
        matrices.push(matrix.map_err(failed)?);
        drop(tensor);
        source.release(id);
    }
    Ok(ModularFacts { ring: ring_site(&matrices.iter().collect::<Vec<_>>()), units })
}
