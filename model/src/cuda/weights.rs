//! From a model's files to the device.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::{
    TensorType,
    attention::KvShape,
    cuda::{
        Cuda, CudaError, DeviceVec, Stream,
        weight::{Weight, WeightUploader},
    },
    lora::{LoraPrecision, NumberKind},
};

use super::{
    layers::{CudaLayers, CudaLinear},
    model::CudaModelError,
};
use crate::{
    forward::Frame,
    resident::{KvDtype, kv_precision, kv_shape},
    shape::{
        config::ModelConfig,
        layout::{block_groups, block_weights, group_weights},
        source::{Target, TensorId, WeightSource},
    },
    sites::{Site, SitePart},
    sources::hf_names::{linear_name, module_name},
    weights::{
        WeightsError, elements, matrices,
        packing::{Told, pack_all},
        tensors::{load_frame, read_bias, read_matrix},
    },
};

/// Weights on the device, ready to be given KV blocks.
#[derive(Debug)]
pub struct CudaWeights {
    pub(super) cuda: Arc<Cuda>,
    pub(super) frame: Frame,
    pub(super) layers: CudaLayers,
    /// How activations are kept between linear layers.
    pub(super) kind: NumberKind,
    bytes: usize,
}

impl CudaWeights {
    /// Reads a model's weights with `threads` threads and brings them to the device.
    ///
    /// # Errors
    ///
    /// The files do not hold what their configuration says, or the device has no room.
    pub fn load(
        source: &(dyn WeightSource + Sync),
        cuda: &Arc<Cuda>,
        threads: usize,
        told: Told<'_>,
    ) -> Result<Self, CudaModelError> {
        let config = source.config();
        let ids = matrices(config);
        let elements = |id: &TensorId| elements(config, *id);
        // Reading, or making, a tensor is the work of many threads; the link to the device is one.
        let (uploader, stream) = (Mutex::new(WeightUploader::new(cuda)?), Stream::new(cuda)?);
        let upload = |id| upload(source, &uploader, &stream, id);
        let loaded = pack_all(&ids, elements, threads, told, |_, &id| upload(id))?;
        uploader.into_inner().unwrap_or_else(PoisonError::into_inner).finish()?;
        stream.synchronize()?;
        let kind = activation_kind(source);
        let bytes = loaded.iter().map(|linear| linear.weight.device_bytes()).sum();
        let layers = in_sites(config, kind, loaded);
        Ok(Self { cuda: Arc::clone(cuda), frame: load_frame(source)?, layers, kind, bytes })
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }

    /// Bytes on the device.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How adapters are kept beside these weights: exactly beside weights of 32 bits, else in 16.
    #[must_use]
    pub fn adapter_precision(&self) -> LoraPrecision {
        if self.kind == NumberKind::F32 { LoraPrecision::Exact } else { LoraPrecision::Compact }
    }

    /// The shape of KV blocks of `dtype`.
    #[must_use]
    pub fn kv_shape(&self, dtype: KvDtype) -> KvShape {
        kv_shape(self.config(), kv_precision(self.kind == NumberKind::F32, dtype))
    }
}

/// How activations are kept: in 32 bits beside weights of 32 bits, as halves beside halves, else as bf16, which holds
/// whatever the layers give.
fn activation_kind(source: &dyn WeightSource) -> NumberKind {
    let config = source.config();
    let ids = (0..config.layers).flat_map(|layer| block_weights(config, layer));
    let kinds: Vec<TensorType> = ids.filter_map(|id| source.kind(id)).collect();
    let all = |kind| kinds.iter().all(|&found| found == kind);
    match () {
        () if all(TensorType::F32) => NumberKind::F32,
        () if all(TensorType::F16) => NumberKind::F16,
        () => NumberKind::Bf16,
    }
}

fn upload(
    source: &dyn WeightSource,
    uploader: &Mutex<WeightUploader>,
    stream: &Stream,
    id: TensorId,
) -> Result<Loaded, CudaModelError> {
    let tensor = read_matrix(source, id)?;
    let bias = read_bias(source, id, tensor.rows)?;
    let bias = bias.map(|bias| DeviceVec::from_slice(stream, &bias)).transpose()?;
    // Each weight is whole when the lock is given back, or the load has failed.
    let mut uploader = uploader.lock().unwrap_or_else(PoisonError::into_inner);
    let weight = uploader.upload(tensor.kind, &tensor.data, tensor.rows, tensor.cols)?;
    drop((uploader, tensor));
    source.release(id);
    let name = linear_name(source.config(), id);
    Ok(Loaded { name, weight: Arc::new(weight), bias })
}

/// A linear layer on the device, and what it is called.
#[derive(Debug)]
struct Loaded {
    name: String,
    weight: Arc<Weight>,
    bias: Option<DeviceVec<f32>>,
}

/// Sorts what [`matrices`] asked for into sites: those of block after block, then the head.
fn in_sites(config: &ModelConfig, kind: NumberKind, loaded: Vec<Loaded>) -> CudaLayers {
    let mut loaded = loaded.into_iter();
    let mut next = || loaded.next().expect("one result a job");
    let head = (!config.tied_head).then(&mut next);
    let embedding = next().weight;
    let blocks = (0..config.layers).flat_map(|layer| block_groups(config, layer));
    let mut sites: Vec<Vec<Loaded>> =
        blocks.map(|group| group_weights(0, group).iter().map(|_| next()).collect()).collect();
    let tied = || Loaded { name: module_name(0, Target::LmHead), weight: Arc::clone(&embedding), bias: None };
    sites.push(vec![head.unwrap_or_else(tied)]);
    let shape = |parts: &Vec<Loaded>| site(parts, kind);
    let linear = |Loaded { weight, bias, .. }| CudaLinear { weight, bias, unit: 1.0 };
    CudaLayers {
        sites: sites.iter().map(shape).collect(),
        layers: sites.into_iter().map(|parts| parts.into_iter().map(linear).collect()).collect(),
        embedding,
        config: config.clone(),
    }
}

fn site(parts: &[Loaded], kind: NumberKind) -> Site {
    let part = |linear: &Loaded| SitePart {
        name: linear.name.clone(),
        rows: linear.weight.rows(),
        has_bias: linear.bias.is_some(),
    };
    Site {
        columns: parts.first().map_or(0, |linear| linear.weight.columns()),
        parts: parts.iter().map(part).collect(),
        // Activations of 16 bits are rounded.
        fast_is_linear: kind == NumberKind::F32,
        rounding: None,
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
