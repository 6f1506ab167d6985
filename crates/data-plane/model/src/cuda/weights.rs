//! Loads a model's weights to the device.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::{
    TensorType,
    attention::KvShape,
    cuda::{
        Cuda, CudaError, CudaStream, DeviceVec,
        weight::{Weight, WeightUploader},
    },
    elementwise::Gate,
    lora::ElementKind,
};

use super::{
    layers::{CudaLayers, CudaLinear},
    model::CudaModelError,
};
use crate::{
    forward::ModelContext,
    linear_sites::{Arithmetic, Site, SitePart},
    precision::BaseNumerics,
    resident::{KvPrecision, kv_shape},
    shape::{
        config::ModelConfig,
        layout::{block_groups, block_weights, group_weights},
        source::{Target, TensorId, WeightSource},
    },
    sources::hf_names::{linear_name, module_name},
    weights::{
        WeightsError, elements, matrices,
        packing::{ProgressCallback, pack_all},
        tensors::{load_frame, read_bias, read_matrix},
    },
};

/// Weights on the device, before the allocation of KV blocks.
#[derive(Debug)]
pub struct CudaWeights {
    pub(super) cuda: Arc<Cuda>,
    pub(super) frame: ModelContext,
    pub(super) layers: CudaLayers,
    pub(super) kind: ElementKind,
    bytes: usize,
}

impl CudaWeights {
    /// Reads a model's weights with `threads` threads and uploads them to the device.
    ///
    /// # Errors
    ///
    /// The files do not match their configuration, or the device lacks memory.
    pub fn load(
        source: &(dyn WeightSource + Sync),
        cuda: &Arc<Cuda>,
        threads: usize,
        on_progress: ProgressCallback<'_>,
    ) -> Result<Self, CudaModelError> {
        let config = source.config();
        let ids = matrices(config);
        refuse_unsupported(source, &ids)?;
        let elements = |id: &TensorId| elements(config, *id);
        // Many threads read or generate tensors, but there is only one link to the device.
        let (uploader, stream) = (Mutex::new(WeightUploader::new(cuda)?), CudaStream::new(cuda)?);
        let upload = |id| upload(source, &uploader, &stream, id);
        let loaded = pack_all(&ids, elements, threads, on_progress, |_, &id| upload(id))?;
        uploader.into_inner().unwrap_or_else(PoisonError::into_inner).finish()?;
        stream.synchronize()?;
        let kind = activation_kind(source);
        let bytes = loaded.iter().map(|linear| linear.weight.device_bytes()).sum();
        let layers = in_sites(config, kind, loaded);
        Ok(Self { cuda: Arc::clone(cuda), frame: load_frame(source)?, layers, kind, bytes })
    }

    /// Returns the model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }

    /// Returns the bytes on the device.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the rounding of the layers, which decides the data types of adapters and KV cache.
    #[must_use]
    pub fn numerics(&self) -> BaseNumerics {
        if self.kind == ElementKind::F32 { BaseNumerics::Exact } else { BaseNumerics::Rounded }
    }

    /// Returns the shape of KV blocks of `dtype`.
    #[must_use]
    pub fn kv_shape(&self, dtype: Option<KvPrecision>) -> KvShape {
        kv_shape(self.config(), self.numerics().kv(dtype))
    }
}

/// Refuses models that only a CPU computes, before anything is uploaded.
fn refuse_unsupported(source: &dyn WeightSource, ids: &[TensorId]) -> Result<(), CudaModelError> {
    let traits = &source.config().traits;
    let is_mxfp4 = |&id: &TensorId| source.kind(id) == Some(TensorType::Mxfp4);
    let found = match () {
        () if traits.sinks => "a model with attention sinks (gpt-oss)",
        () if traits.expert_biases => "a mixture whose experts have biases",
        () if matches!(traits.gate, Gate::SwigluOai { .. }) => "the gate of gpt-oss",
        () if ids.iter().any(is_mxfp4) => "a model with MXFP4 weights",
        () => return Ok(()),
    };
    Err(CudaModelError::Unsupported(found))
}

/// Returns the activations' type: f32 or f16 if all weights are, else bf16, whose range holds all outputs.
fn activation_kind(source: &dyn WeightSource) -> ElementKind {
    let config = source.config();
    let ids = (0..config.layers).flat_map(|layer| block_weights(config, layer));
    let kinds: Vec<TensorType> = ids.filter_map(|id| source.kind(id)).collect();
    let all = |kind| kinds.iter().all(|&found| found == kind);
    match () {
        () if all(TensorType::F32) => ElementKind::F32,
        () if all(TensorType::F16) => ElementKind::F16,
        () => ElementKind::Bf16,
    }
}

fn upload(
    source: &dyn WeightSource,
    uploader: &Mutex<WeightUploader>,
    stream: &CudaStream,
    id: TensorId,
) -> Result<LoadedLinear, CudaModelError> {
    let tensor = read_matrix(source, id)?;
    let bias = read_bias(source, id, tensor.rows)?;
    let bias = bias.map(|bias| DeviceVec::from_slice(stream, &bias)).transpose()?;
    // Each upload completes under the lock or fails the load, so poison can be ignored.
    let mut uploader = uploader.lock().unwrap_or_else(PoisonError::into_inner);
    let weight = uploader.upload(tensor.kind, &tensor.data, tensor.rows, tensor.cols)?;
    drop((uploader, tensor));
    source.release(id);
    let name = linear_name(source.config(), id);
    Ok(LoadedLinear { name, weight: Arc::new(weight), bias })
}

#[derive(Debug)]
struct LoadedLinear {
    name: String,
    weight: Arc<Weight>,
    bias: Option<DeviceVec<f32>>,
}

/// Groups the weights that [`matrices`] lists into sites: those of each block, then the head.
fn in_sites(config: &ModelConfig, kind: ElementKind, loaded: Vec<LoadedLinear>) -> CudaLayers {
    let mut loaded = loaded.into_iter();
    let mut next = || loaded.next().expect("one result a job");
    let head = (!config.tied_head).then(&mut next);
    let embedding = next().weight;
    let blocks = (0..config.layers).flat_map(|layer| block_groups(config, layer));
    let mut sites: Vec<Vec<LoadedLinear>> =
        blocks.map(|group| group_weights(0, group).iter().map(|_| next()).collect()).collect();
    let tied =
        || LoadedLinear { name: module_name(0, Target::LmHead), weight: Arc::clone(&embedding), bias: None };
    sites.push(vec![head.unwrap_or_else(tied)]);
    let shape = |parts: &Vec<LoadedLinear>| site(parts, kind);
    let linear = |LoadedLinear { weight, bias, .. }| CudaLinear { weight, bias, unit: 1.0 };
    CudaLayers {
        sites: sites.iter().map(shape).collect(),
        layers: sites.into_iter().map(|parts| parts.into_iter().map(linear).collect()).collect(),
        embedding,
        config: config.clone(),
    }
}

fn site(parts: &[LoadedLinear], kind: ElementKind) -> Site {
    let part = |linear: &LoadedLinear| SitePart {
        name: linear.name.clone(),
        rows: linear.weight.rows(),
        has_bias: linear.bias.is_some(),
    };
    Site {
        columns: parts.first().map_or(0, |linear| linear.weight.columns()),
        parts: parts.iter().map(part).collect(),
        // Activations of 16 bits are rounded.
        fast_is_linear: kind == ElementKind::F32,
        arithmetic: Arithmetic::Unrounded,
        ring: None,
    }
}

impl From<WeightsError> for CudaModelError {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

impl From<CudaError> for CudaModelError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}
