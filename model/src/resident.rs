//! A whole model in this process: the client of base layers that happens to live beside them.

use std::{io, sync::Arc};

use ids::BlockId;
use kernels::{
    Activations, Isa, Pool,
    attention::{KvPrecision, KvShape},
    lora::LoraPrecision,
};

use crate::{
    adapter::DraftShape,
    cpu::{Compute, kv::PagedKv},
    deltas::{
        adapter_rows::AdapterRows,
        assist::Assist,
        batch::{BatchDeltas, DeltaScratch},
        cpu_copy::CpuMemory,
        prepared::PreparedAdapter,
    },
    forward::{ForwardPass, Frame, Norms, Scratch, SequenceSlice, run},
    precision::Precision,
    shape::{config::ModelConfig, rope::RopeTable, source::WeightSource},
    sites::{Company, EvaluateError, EvaluateSites, Site, SiteCall, SitePath},
    sweep::SweepFigures,
    weights::{
        LoadProgress, ResidentLayers,
        embedding::Embedding,
        first::{FirstLayers, FirstLayersError, SharedLayers},
        host::{HostLayers, LentSites},
        joined::JoinedLayers,
        served::ServedLayers,
        streamed::{StreamError, StreamOptions, StreamedLayers},
        tensors::{WeightsError, load_norms},
    },
};

/// Why a model could not be made resident.
#[derive(Debug, thiserror::Error)]
pub enum ResidentError {
    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The threads cannot be started.
    #[error("cannot start threads for cores {cores:?}; raise the limit of threads or name fewer cores")]
    Threads {
        /// The cores asked for.
        cores: Vec<usize>,
        /// Cause.
        source: io::Error,
    },
    /// The KV pool does not fit into memory.
    #[error("no memory for {blocks} KV blocks of {block_bytes} bytes; lower the KV budget")]
    KvPool {
        /// Blocks asked for.
        blocks: usize,
        /// Bytes of each.
        block_bytes: usize,
        /// Cause.
        source: io::Error,
    },
}

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
}

/// What a resident model may use.
#[derive(Debug, Clone)]
pub struct ResidentOptions {
    /// Cores to compute on; the thread that runs the first pass is pinned to the first. Empty: one thread, not pinned.
    pub cores: Vec<usize>,
    /// Bytes of the KV pool.
    pub kv_bytes: usize,
    /// Bits of keys and values.
    pub kv_dtype: KvDtype,
}

/// Weights in memory, ready to be given KV blocks and threads.
#[derive(Debug)]
pub struct LoadedWeights<L = ResidentLayers> {
    frame: Frame,
    layers: L,
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
        Ok(Self { frame: frame(source)?, layers })
    }

    /// Computes with `precision` instead of the default.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.layers.set_precision(precision);
        self
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
            None => ServedLayers::Resident(ResidentLayers::load(source, threads, told)?),
            Some((base, options)) => {
                ServedLayers::Streamed(Box::new(StreamedLayers::open(source, base, options, threads, told)?))
            }
        };
        Ok(Self { frame: frame(source)?, layers })
    }

    /// Computes with `precision` instead of the default.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        match &mut self.layers {
            ServedLayers::Resident(layers) => layers.set_precision(precision),
            ServedLayers::Streamed(layers) => layers.set_precision(precision),
        }
        self
    }

    /// What of them is in memory, for those who compute with the first layers alone.
    #[must_use]
    pub fn shared(&self) -> SharedBase {
        let layers = match &self.layers {
            ServedLayers::Resident(layers) => layers.shared(),
            ServedLayers::Streamed(layers) => layers.shared(),
        };
        SharedBase { config: self.frame.config.clone(), norms: self.frame.norms.clone(), layers }
    }
}

/// What of a base is in memory, to be computed with by others than its own pass.
#[derive(Debug, Clone)]
pub struct SharedBase {
    config: ModelConfig,
    norms: Norms,
    layers: SharedLayers,
}

impl SharedBase {
    /// The base's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The first layers of it that `shape` names, as a model of its own.
    ///
    /// # Errors
    ///
    /// Not all of them are in memory, or there is none for the rows of a shortlist.
    pub fn first_layers(&self, shape: &DraftShape) -> Result<LoadedWeights<FirstLayers>, FirstLayersError> {
        let layers = FirstLayers::new(&self.config, &self.layers, shape)?;
        let config = layers.config().clone();
        let (norms, rope) = (self.norms.clone(), RopeTable::new(&config));
        Ok(LoadedWeights { frame: Frame { config, norms, rope }, layers })
    }
}

fn frame(source: &dyn WeightSource) -> Result<Frame, WeightsError> {
    let config = source.config().clone();
    let (norms, rope) = (load_norms(source)?, RopeTable::new(&config));
    Ok(Frame { config, norms, rope })
}

impl<L: HostLayers> LoadedWeights<L> {
    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
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
        KvDtype::Auto if exact => KvPrecision::F32,
        KvDtype::F16 | KvDtype::Auto => KvPrecision::F16,
    }
}

/// The shape of KV blocks of a model.
#[must_use]
pub fn kv_shape(config: &ModelConfig, precision: KvPrecision) -> KvShape {
    KvShape { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim, precision }
}

/// A model that runs in the calling thread and its helpers; its weights may come from a disk.
#[derive(Debug)]
pub struct ResidentModel<L = ResidentLayers> {
    frame: Frame,
    layers: L,
    kv: PagedKv,
    compute: Compute,
    scratch: Scratch<Compute>,
    /// Outputs of a pass's rows and of those that joined them.
    together: Vec<f32>,
    deltas: DeltaScratch,
    assist: Option<Box<dyn Assist>>,
    path: SitePath,
}

impl<L: HostLayers> ResidentModel<L> {
    /// Takes memory and starts threads for `weights`. The thread that runs the first pass is pinned to the first of the
    /// options' cores.
    ///
    /// # Errors
    ///
    /// A thread cannot be started, or there is no memory for the KV pool.
    pub fn new(weights: LoadedWeights<L>, options: &ResidentOptions) -> Result<Self, ResidentError> {
        let shape = weights.kv_shape(options.kv_dtype);
        let (block_bytes, blocks) = (shape.block_bytes(), options.kv_bytes / shape.block_bytes());
        let window = weights.frame.config.sliding_window;
        let kv = PagedKv::new(shape, blocks, window).map_err(|source| ResidentError::KvPool {
            blocks,
            block_bytes,
            source,
        })?;
        let threads = Pool::new(&options.cores)
            .map_err(|source| ResidentError::Threads { cores: options.cores.clone(), source })?;
        let LoadedWeights { frame, layers } = weights;
        Ok(Self {
            frame,
            layers,
            kv,
            compute: Compute { pool: threads, isa: Isa::best() },
            scratch: Scratch::empty(),
            together: Vec::new(),
            deltas: DeltaScratch::default(),
            assist: None,
            path: SitePath::Fast,
        })
    }

    /// Has `assist` sum what the device does not hold.
    #[must_use]
    pub fn with_assist(self, assist: Box<dyn Assist>) -> Self {
        Self { assist: Some(assist), ..self }
    }

    /// Computes with other instructions, for tests.
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.compute.isa = isa;
        self
    }

    /// The threads that compute, to replace them or ask what they rehearsed.
    pub fn pool_mut(&mut self) -> &mut Pool {
        &mut self.compute.pool
    }

    /// KV blocks of the pool.
    #[must_use]
    pub fn kv_blocks(&self) -> usize {
        self.kv.blocks()
    }

    /// Where copies of adapters are made: in the pool's blocks.
    #[must_use]
    pub fn adapter_memory(&self) -> CpuMemory {
        CpuMemory(Arc::clone(self.kv.memory()))
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }
}

impl<L: HostLayers> ForwardPass for ResidentModel<L> {
    type Adapter = PreparedAdapter;
    type Error = L::Error;

    fn vocab_size(&self) -> usize {
        self.frame.config.vocab_size
    }

    fn branches(&self) -> bool {
        true
    }

    fn takes_linear(&self) -> bool {
        true
    }

    fn take(&mut self, path: SitePath) {
        self.path = path;
    }

    fn lacked_weights(_: &L::Error) -> bool {
        true
    }

    fn sweep_figures(&self) -> Option<Arc<SweepFigures>> {
        self.layers.sweep_figures()
    }

    fn forward_in_company(
        &mut self,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
        logits: &mut Vec<f32>,
        company: &mut dyn Company,
    ) -> Result<(), L::Error> {
        let config = &self.frame.config;
        let found = AdapterRows::of(batch);
        let mut deltas = BatchDeltas::new(config, self.assist.as_deref_mut(), &mut self.deltas, &found);
        let (path, together) = (self.path, &mut self.together);
        let mut layers = JoinedLayers { layers: &mut self.layers, path, company, together };
        let parts = (&mut layers, &mut deltas, &mut self.kv);
        run(&self.frame, parts, &mut self.compute, &mut self.scratch, batch, logits)
    }

    fn block_bytes(&self) -> usize {
        self.kv.block_bytes()
    }

    fn read_block(&mut self, block: BlockId, bytes: &mut [u8]) -> Result<(), L::Error> {
        self.kv.read_block(block, bytes);
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), L::Error> {
        self.kv.write_block(block, bytes);
        Ok(())
    }
}

impl<L: HostLayers> EvaluateSites for ResidentModel<L> {
    fn sites(&self) -> &[Site] {
        self.layers.sites()
    }

    fn floors(&self) -> Option<Vec<u32>> {
        self.layers.floors()
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        LentSites { layers: &mut self.layers, compute: &mut self.compute }.evaluate(call, x, out)
    }
}
