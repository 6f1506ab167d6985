//! Modular path of sites whose weights are on the device: commitments to these weights.

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
    /// Gives every eligible site a modular path with a commitment to its weights. The host keeps no weights,
    /// so they are read again from `source` and packed, one site at a time by each of `threads` threads.
    /// Executors whose clients mask their rows need this.
    ///
    /// # Errors
    ///
    /// The files do not match their configuration, or the host lacks memory for a site.
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

struct ModularParameters {
    ring: Option<ModularSite>,
    /// Units of the scales of its matrices.
    units: Vec<f32>,
}

fn tensors(config: &ModelConfig, site: SiteId) -> Vec<TensorId> {
    let (layer, group) = site.group(config).expect("the site is one of a known architecture");
    if group == LinearGroup::Head && config.tied_head {
        return vec![TensorId::TokenEmbedding];
    }
    group_weights(layer, group)
}

/// Packs the matrices of a site as the CPU does, computes the commitment and drops them.
fn promise(source: &dyn WeightSource, tensors: &[TensorId]) -> Result<ModularParameters, WeightsError> {
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
    Ok(ModularParameters { ring: ring_site(&matrices.iter().collect::<Vec<_>>()), units })
}
