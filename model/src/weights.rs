//! The frozen weights, packed for the CPU.

use std::{convert::Infallible, sync::Arc};

use kernels::{Activations, Arena, PackError, PackedMatrix, quant::dequantize_row};

use crate::{
    config::ModelConfig,
    embedding::Embedding,
    forward::{BaseLayers, Compute, LinearGroup, Norms},
    layout::{BLOCK_TARGETS, linear_shape, tensor_shape},
    packing::{Told, pack_all},
    safetensors_source::module_name,
    site_weights::{Linear, SiteWeights},
    sites::{SiteCall, SiteId, SiteOp, SitePath},
    source::{Target, Tensor, TensorId, WeightSource},
};

pub use crate::packing::LoadProgress;

/// Why weights could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The files lack a tensor the architecture has.
    #[error(
        "the model's files have no {0:?}; the file is incomplete or of another architecture than it says"
    )]
    Missing(TensorId),
    /// A tensor is not of the shape the configuration implies.
    #[error("{id:?} is {found:?} but the configuration implies {expected:?} (rows, columns)")]
    Shape {
        /// The tensor.
        id: TensorId,
        /// What the configuration implies.
        expected: (usize, usize),
        /// What the file holds.
        found: (usize, usize),
    },
    /// A tensor cannot be packed.
    #[error("cannot pack {id:?}")]
    Pack {
        /// The tensor.
        id: TensorId,
        /// Cause.
        source: PackError,
    },
}

/// The targets of a group and the column of the group's output at which each begins.
#[must_use]
pub fn group_targets(config: &ModelConfig, group: LinearGroup) -> Vec<(Target, usize)> {
    let targets: &[Target] = match group {
        LinearGroup::Qkv => &[Target::Q, Target::K, Target::V],
        LinearGroup::O => &[Target::O],
        LinearGroup::GateUp => &[Target::Gate, Target::Up],
        LinearGroup::Down => &[Target::Down],
        LinearGroup::Head => &[Target::LmHead],
    };
    let mut column = 0;
    let place = |&target| {
        let at = column;
        column += linear_shape(config, target)[0];
        (target, at)
    };
    targets.iter().map(place).collect()
}

/// Base layers of a known architecture with all weights in memory: four sites a block, then the head.
#[derive(Debug)]
pub struct ResidentLayers {
    sites: SiteWeights,
    embedding: Embedding,
    config: ModelConfig,
}

impl ResidentLayers {
    /// Reads and packs all linear layers and the token embedding with `threads` threads, and tells `told`, from any of
    /// them, how far it is.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another shape than the configuration implies, or memory runs out.
    pub fn load(
        source: &(dyn WeightSource + Sync),
        threads: usize,
        told: Told<'_>,
    ) -> Result<Self, WeightsError> {
        let config = source.config();
        let jobs = jobs(config);
        let elements = |job: &Job| job.elements(config);
        let packed = pack_all(&jobs, elements, threads, told, |arena, &job| pack(source, arena, job))?;
        let mut packed = packed.into_iter();
        let mut next = || packed.next().expect("one result a job");
        let head = (!config.tied_head).then(&mut next);
        let embedding = Embedding::new(next().matrix);
        let mut sites = Vec::with_capacity(4 * config.layers + 1);
        for _ in 0..config.layers {
            // As `BLOCK_TARGETS` has them.
            let [q, k, v, o, gate, up, down] = std::array::from_fn(|_| next());
            sites.extend([vec![q, k, v], vec![o], vec![gate, up], vec![down]]);
        }
        sites.push(vec![head.unwrap_or_else(|| tied_head(&embedding))]);
        Ok(Self { sites: SiteWeights::new(sites), embedding, config: config.clone() })
    }

    /// The linear layers.
    #[must_use]
    pub fn sites(&self) -> &SiteWeights {
        &self.sites
    }

    /// The linear layers alone, for those who leave the rest of the pass to others.
    #[must_use]
    pub fn into_sites(self) -> SiteWeights {
        self.sites
    }

    /// The token embedding.
    #[must_use]
    pub fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // A tied head is counted among the sites.
        self.sites.bytes() + if self.config.tied_head { 0 } else { self.embedding.bytes() }
    }

    /// The call that a pass makes for a group.
    pub(crate) fn call(&self, layer: usize, group: LinearGroup) -> SiteCall {
        let site = SiteId::of(self.config.layers, layer, group);
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

/// A matrix to pack.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Job {
    Embedding,
    Linear(usize, Target),
}

impl Job {
    pub(crate) fn weight(self) -> TensorId {
        match self {
            Self::Embedding => TensorId::TokenEmbedding,
            Self::Linear(layer, target) => TensorId::Weight(layer, target),
        }
    }

    /// Elements of its matrix, as the configuration implies.
    pub(crate) fn elements(self, config: &ModelConfig) -> u64 {
        let [rows, cols] = tensor_shape(config, self.weight());
        (rows as u64).saturating_mul(cols as u64)
    }
}

/// Head, embedding, then block after block: the largest first, so that no thread ends up alone with them.
pub(crate) fn jobs(config: &ModelConfig) -> Vec<Job> {
    let head = (!config.tied_head).then_some(Job::Linear(0, Target::LmHead));
    let block = |layer| BLOCK_TARGETS.map(|target| Job::Linear(layer, target));
    head.into_iter().chain([Job::Embedding]).chain((0..config.layers).flat_map(block)).collect()
}

fn pack(source: &dyn WeightSource, arena: &Arena, job: Job) -> Result<Linear, WeightsError> {
    let matrix = Arc::new(pack_tensor(source, arena, job.weight())?);
    let (name, bias) = match job {
        Job::Embedding => (String::new(), None),
        Job::Linear(layer, target) => {
            let bias = read_vector(source, TensorId::Bias(layer, target), matrix.rows())?;
            (module_name(layer, target), bias)
        }
    };
    Ok(Linear { name, matrix, bias })
}

fn tied_head(embedding: &Embedding) -> Linear {
    let name = module_name(0, Target::LmHead);
    Linear { name, matrix: Arc::clone(embedding.matrix()), bias: None }
}

/// Reads and packs one matrix.
pub(crate) fn pack_tensor(
    source: &dyn WeightSource,
    arena: &Arena,
    id: TensorId,
) -> Result<PackedMatrix, WeightsError> {
    let tensor = read_matrix(source, id)?;
    let matrix = PackedMatrix::pack_in(arena, tensor.kind, &tensor.data, tensor.rows, tensor.cols)
        .map_err(|source| WeightsError::Pack { id, source })?;
    drop(tensor);
    source.release(id);
    Ok(matrix)
}

/// Reads one matrix as it is stored.
pub(crate) fn read_matrix(source: &dyn WeightSource, id: TensorId) -> Result<Tensor<'_>, WeightsError> {
    let tensor = source.tensor(id).ok_or(WeightsError::Missing(id))?;
    expect_shape(id, tensor_shape(source.config(), id).into(), (tensor.rows, tensor.cols))?;
    Ok(tensor)
}

fn expect_shape(id: TensorId, expected: (usize, usize), found: (usize, usize)) -> Result<(), WeightsError> {
    if expected == found { Ok(()) } else { Err(WeightsError::Shape { id, expected, found }) }
}

/// A vector as floats, or `None` if the files have none.
pub(crate) fn read_vector(
    source: &dyn WeightSource,
    id: TensorId,
    length: usize,
) -> Result<Option<Vec<f32>>, WeightsError> {
    let Some(tensor) = source.tensor(id) else {
        return Ok(None);
    };
    expect_shape(id, (1, length), (tensor.rows, tensor.cols))?;
    let mut values = vec![0.0; length];
    dequantize_row(tensor.kind, &tensor.data, &mut values);
    Ok(Some(values))
}

/// Reads the norms of a model.
///
/// # Errors
///
/// One is missing or has another length than the configuration implies.
pub fn load_norms(source: &dyn WeightSource) -> Result<Norms, WeightsError> {
    let config = source.config();
    let vector = |id, length| read_vector(source, id, length)?.ok_or(WeightsError::Missing(id));
    let of_layers = |id: fn(usize) -> TensorId, length| {
        (0..config.layers).map(|layer| vector(id(layer), length)).collect()
    };
    let of_heads = |id| {
        if config.qk_norm { of_layers(id, config.head_dim) } else { Ok(Vec::new()) }
    };
    Ok(Norms {
        attention: of_layers(TensorId::AttentionNorm, config.hidden_size)?,
        feed_forward: of_layers(TensorId::FeedForwardNorm, config.hidden_size)?,
        query: of_heads(TensorId::QueryNorm)?,
        key: of_heads(TensorId::KeyNorm)?,
        output: vector(TensorId::OutputNorm, config.hidden_size)?,
    })
}
