//! Weights in memory, and the element types of KV cache and adapters that go with them.

use kernels::{
    Isa,
    attention::{KvPrecision, KvShape},
    lora::LoraPrecision,
};

use shmproto::group::GroupLeader;

use crate::{
    adapter::{DraftShape, dora::BaseLayer},
    forward::{AttentionConstants, ModelContext, Norms, Router},
    precision::{BaseNumerics, Precision},
    shape::{
        config::ModelConfig,
        source::{Target, WeightSource},
    },
    sources::hf_names::module_name,
    weights::{
        LoadProgress, ResidentLayers,
        device_group::{ShardWeights, leader::GroupLayers},
        embedding::Embedding,
        first::{FirstLayers, FirstLayersError, SharedLayers},
        host::HostLayers,
        served::ServedLayers,
        streamed::{StreamError, StreamOptions, StreamedLayers},
        tensors::{WeightsError, load_frame},
    },
};

/// Weights in memory, before the allocation of KV blocks and threads.
#[derive(Debug)]
pub struct LoadedWeights<L = ResidentLayers> {
    pub(super) frame: ModelContext,
    pub(super) layers: L,
    precision: Precision,
}

impl LoadedWeights {
    /// Reads and packs a model's weights with `threads` threads.
    ///
    /// # Errors
    ///
    /// The files do not match their configuration, or memory runs out.
    pub fn load(source: &(dyn WeightSource + Sync), threads: usize) -> Result<Self, WeightsError> {
        Self::load_telling(source, threads, &|_| {})
    }

    /// Loads weights as [`load`](Self::load) does and reports progress to `told`, from any of the threads.
    ///
    /// # Errors
    ///
    /// The files do not match their configuration, or memory runs out.
    pub fn load_telling(
        source: &(dyn WeightSource + Sync),
        threads: usize,
        told: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, WeightsError> {
        let layers = ResidentLayers::load(source, threads, told)?;
        Ok(Self { frame: load_frame(source)?, layers, precision: Precision::default() })
    }

    /// Returns the token embedding.
    #[must_use]
    pub fn embedding(&self) -> &Embedding {
        self.layers.embedding()
    }
}

impl LoadedWeights<ServedLayers> {
    /// Opens a model's weights for serving. Given options and the base's identity, most weights are streamed
    /// within the memory bound; otherwise all are in memory. The `threads` threads report progress to `told`.
    ///
    /// # Errors
    ///
    /// The files do not match their configuration, or memory or disk space is missing.
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
        Ok(Self { frame: load_frame(source)?, layers, precision: Precision::default() })
    }

    /// Takes the leader's weights of a device group, and the group's region, whose members need not have
    /// joined yet.
    ///
    /// # Errors
    ///
    /// The files do not match their configuration.
    pub fn of_group(
        source: &(dyn WeightSource + Sync),
        own: ShardWeights,
        group: GroupLeader,
    ) -> Result<Self, WeightsError> {
        let layers = ServedLayers::Grouped(Box::new(GroupLayers::new(own, group)));
        Ok(Self { frame: load_frame(source)?, layers, precision: Precision::default() })
    }

    /// Returns shared handles of the weights in memory, from which a drafter can take the first layers.
    #[must_use]
    pub fn shared(&self) -> SharedBase {
        let layers = match &self.layers {
            ServedLayers::Resident(layers) => layers.shared(),
            ServedLayers::Streamed(layers) => layers.shared(),
            ServedLayers::Grouped(layers) => {
                let group = Some(layers.weights());
                SharedLayers { blocks: Vec::new(), embedding: None, head: None, group }
            }
        };
        let ModelContext { config, norms, routers, attention, rope: _ } = &self.frame;
        SharedBase {
            config: config.clone(),
            norms: norms.clone(),
            routers: routers.clone(),
            attention: attention.clone(),
            layers,
        }
    }
}

/// Weights of a base in memory that other users than its own pass may compute with.
#[derive(Debug, Clone)]
pub struct SharedBase {
    config: ModelConfig,
    norms: Norms,
    routers: Vec<Option<Router>>,
    attention: AttentionConstants,
    layers: SharedLayers,
}

impl SharedBase {
    /// Returns the base's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns a linear layer of the base, if its weights are in memory.
    #[must_use]
    pub fn linear_layer(&self, layer: usize, target: Target) -> Option<BaseLayer<'_>> {
        if let Some(group) = &self.layers.group {
            return group.linear_layer(layer, target);
        }
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

    /// Returns the first layers of the base, as `shape` names them, as a model of their own.
    ///
    /// # Errors
    ///
    /// A layer is not in memory, or memory for the rows of a shortlist is missing.
    pub fn first_layers(&self, shape: &DraftShape) -> Result<LoadedWeights<FirstLayers>, FirstLayersError> {
        let layers = FirstLayers::new(&self.config, &self.layers, shape)?;
        let config = layers.config().clone();
        let attention = self.attention.first_layers(config.layers);
        Ok(LoadedWeights {
            frame: ModelContext::new(config, self.norms.clone(), self.routers.clone(), attention),
            layers,
            precision: Precision::default(),
        })
    }
}

impl<L: HostLayers> LoadedWeights<L> {
    /// Returns the model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }

    /// Replaces the default precision by `precision`.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.layers.set_precision(precision);
        self.precision = precision;
        self
    }

    /// Returns the precision of the layers.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the precision that suits these weights on this processor, for weights in the default one.
    #[must_use]
    pub fn suitable_precision(&self) -> Precision {
        Precision::suitable(Isa::best(), self.layers.sites())
    }

    /// Returns the rounding of the layers, which decides the data types of adapters and KV cache.
    #[must_use]
    pub fn numerics(&self) -> BaseNumerics {
        BaseNumerics::of(self.layers.sites())
    }

    /// Returns the bytes of the packed weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layers.bytes()
    }

    /// Returns the bytes that a pass reads from disk, without embeddings.
    #[must_use]
    pub fn sweep_bytes(&self) -> u64 {
        self.layers.sweep_bytes()
    }

    /// Returns the element precision of adapters: exact, unless the quantized path rounds activations.
    #[must_use]
    pub fn adapter_precision(&self) -> LoraPrecision {
        self.numerics().adapters()
    }

    /// Returns the shape of KV blocks of `dtype`.
    #[must_use]
    pub fn kv_shape(&self, dtype: Option<KvPrecision>) -> KvShape {
        kv_shape(self.config(), self.numerics().kv(dtype))
    }
}

/// Returns the shape of a model's KV blocks.
#[must_use]
pub fn kv_shape(config: &ModelConfig, precision: KvPrecision) -> KvShape {
    KvShape { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim, precision }
}
