//! Weights in memory, and the numbers that keys, values and adapters have beside them.

use std::sync::Arc;

use kernels::{
    PackedMatrix,
    attention::{KvPrecision, KvShape},
    lora::LoraPrecision,
};

use crate::{
    adapter::{DraftShape, dora::BaseLayer},
    forward::{ModelContext, Norms},
    precision::Precision,
    shape::{
        config::ModelConfig,
        source::{Target, WeightSource},
    },
    sources::hf_names::module_name,
    weights::{
        LoadProgress, ResidentLayers,
        embedding::Embedding,
        first::{FirstLayers, FirstLayersError, SharedLayers},
        host::HostLayers,
        served::ServedLayers,
        streamed::{StreamError, StreamOptions, StreamedLayers},
        tensors::{WeightsError, load_frame},
    },
};

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvDtype {
    /// 32 bits for weights of 32 bits, else 16.
    #[default]
    Auto,
    /// 32 bits.
    F32,
    /// 16 bits.
    F16,
    /// Bytes, and a scale for each key and value of a head; on a CPU alone.
    Int8,
}

/// Weights in memory, ready to be given KV blocks and threads.
#[derive(Debug)]
pub struct LoadedWeights<L = ResidentLayers> {
    pub(super) frame: ModelContext,
    pub(super) layers: L,
}

impl LoadedWeights {
    /// Reads and packs a model's weights with `threads` threads.
    ///
    /// # Errors
    ///
    /// The files do not hold what their configuration says, or memory runs out.
    pub fn load(source: &(dyn WeightSource + Sync), threads: usize) -> Result<Self, WeightsError> {
        Self::load_telling(source, threads, &|_| {})
    }

    /// Like [`load`](Self::load), and tells `told`, from any of the threads, how far it is.
    ///
    /// # Errors
    ///
    /// The files do not hold what their configuration says, or memory runs out.
    pub fn load_telling(
        source: &(dyn WeightSource + Sync),
        threads: usize,
        told: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, WeightsError> {
        let layers = ResidentLayers::load(source, threads, told)?;
        Ok(Self { frame: load_frame(source)?, layers })
    }

    /// The token embedding.
    #[must_use]
    pub fn embedding(&self) -> &Embedding {
        self.layers.embedding()
    }
}

impl LoadedWeights<ServedLayers> {
    /// A model's weights as they are to be served: streamed under a bound if there are options for that, beside the identity of
    /// the base, else all of them in memory. `told` hears, from any of `threads` threads, how far it is.
    ///
    /// # Errors
    ///
    /// The files do not hold what their configuration says, or there is no room in memory or on the disk.
    pub fn open(
        source: &(dyn WeightSource + Sync),
        streamed: Option<(&[u8; 32], &StreamOptions)>,
        threads: usize,
        told: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, StreamError> {
        let layers = match streamed {
            None => ServedLayers::Resident(Box::new(ResidentLayers::load(source, threads, told)?)),
            Some((base, options)) => {
                ServedLayers::Streamed(Box::new(StreamedLayers::open(source, base, options, threads, told)?))
            }
        };
        Ok(Self { frame: load_frame(source)?, layers })
    }

    /// What of them is in memory, for those who compute with the first layers alone.
    #[must_use]
    pub fn shared(&self) -> SharedBase {
        let layers = match &self.layers {
            ServedLayers::Resident(layers) => layers.shared(),
            ServedLayers::Streamed(layers) => layers.shared(),
        };
        let ModelContext { config, norms, routers, rope: _ } = &self.frame;
        SharedBase { config: config.clone(), norms: norms.clone(), routers: routers.clone(), layers }
    }
}

/// What of a base is in memory, to be computed with by others than its own pass.
#[derive(Debug, Clone)]
pub struct SharedBase {
    config: ModelConfig,
    norms: Norms,
    routers: Vec<Option<Arc<PackedMatrix>>>,
    layers: SharedLayers,
}

impl SharedBase {
    /// The base's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// A linear layer of it, if that is in memory.
    #[must_use]
    pub fn linear_layer(&self, layer: usize, target: Target) -> Option<BaseLayer<'_>> {
        if target == Target::LmHead {
            let head = self.layers.head.as_ref()?;
            let read_row = Box::new(|row, out: &mut [f32]| {
                let (piece, at) = head.of(row);
                piece.read_row(at, out);
            });
            return Some(BaseLayer { read_row, bias: None });
        }
        let name = module_name(layer, target);
        let linear = self.layers.blocks.get(layer)?.iter().flatten().find(|linear| linear.name == name)?;
        let read_row = Box::new(|row, out: &mut [f32]| linear.matrix.read_row(row, out));
        Some(BaseLayer { read_row, bias: linear.bias.as_deref() })
    }

    /// The first layers of it that `shape` names, as a model of its own.
    ///
    /// # Errors
    ///
    /// Not all of them are in memory, or there is none for the rows of a shortlist.
    pub fn first_layers(&self, shape: &DraftShape) -> Result<LoadedWeights<FirstLayers>, FirstLayersError> {
        let layers = FirstLayers::new(&self.config, &self.layers, shape)?;
        let config = layers.config().clone();
        Ok(LoadedWeights {
            frame: ModelContext::new(config, self.norms.clone(), self.routers.clone()),
            layers,
        })
    }
}

impl<L: HostLayers> LoadedWeights<L> {
    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }

    /// Computes with `precision` instead of the default.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.layers.set_precision(precision);
        self
    }

    /// Bytes of the packed weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layers.bytes()
    }

    /// Bytes that a pass reads from a disk, besides embeddings.
    #[must_use]
    pub fn sweep_bytes(&self) -> u64 {
        self.layers.sweep_bytes()
    }

    /// How adapters are kept beside these weights: exactly, unless the weights themselves are rounded.
    #[must_use]
    pub fn adapter_precision(&self) -> LoraPrecision {
        if self.is_exact() { LoraPrecision::Exact } else { LoraPrecision::Compact }
    }

    /// The shape of KV blocks of `dtype`.
    #[must_use]
    pub fn kv_shape(&self, dtype: KvDtype) -> KvShape {
        kv_shape(self.config(), kv_precision(self.is_exact(), dtype))
    }

    /// Whether every layer takes its activations unrounded.
    fn is_exact(&self) -> bool {
        self.layers.sites().iter().all(|site| site.fast_is_linear)
    }
}

/// What keys and values of `dtype` are beside weights that are `exact`, or not.
#[must_use]
pub fn kv_precision(exact: bool, dtype: KvDtype) -> KvPrecision {
    match dtype {
        KvDtype::F32 => KvPrecision::F32,
        KvDtype::Int8 => KvPrecision::Int8,
        KvDtype::Auto if exact => KvPrecision::F32,
        KvDtype::F16 | KvDtype::Auto => KvPrecision::F16,
    }
}

/// The shape of KV blocks of a model.
#[must_use]
pub fn kv_shape(config: &ModelConfig, precision: KvPrecision) -> KvShape {
    KvShape { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim, precision }
}
