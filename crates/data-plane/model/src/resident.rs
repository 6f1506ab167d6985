//! A whole model in this process: the client of base layers that happens to live beside them.
//!
//! # Layout
//!
//! - this file: the model, and what it may use. `loaded`: its weights, before they are given memory and threads.

mod loaded;

use std::{io, sync::Arc};

use kernels::{Activations, Isa, ThreadPool};
use types::BlockId;

pub use self::loaded::{KvDtype, LoadedWeights, SharedBase, kv_precision, kv_shape};
use crate::{
    cpu::{Compute, kv::PagedKv},
    deltas::{
        adapter_rows::AdapterRows,
        assist::Assist,
        batch::{BatchDeltas, DeltaScratch},
        cpu_copy::CpuMemory,
        prepared::PreparedAdapter,
    },
    forward::{ForwardPass, ModelContext, Scratch, SequenceSlice, run},
    linear_sites::{EvaluateError, EvaluateSites, PassHooks, Site, SiteCall, SitePath},
    shape::config::ModelConfig,
    weight_stream_stats::WeightStreamStats,
    weights::{
        ResidentLayers,
        co_batched::CoBatchedLayers,
        host::{BorrowedSites, HostLayers},
        tensors::WeightsError,
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

/// A model that runs in the calling thread and its helpers; its weights may come from a disk.
#[derive(Debug)]
pub struct ResidentModel<L = ResidentLayers> {
    frame: ModelContext,
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
        let limits = weights.frame.config.limits();
        let kv = PagedKv::new(shape, blocks, limits).map_err(|source| ResidentError::KvPool {
            blocks,
            block_bytes,
            source,
        })?;
        let threads = ThreadPool::new(&options.cores)
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
    pub fn pool_mut(&mut self) -> &mut ThreadPool {
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

    /// Gives the sites a ring path, as far as they can have one, and commits to their weights: once all of these are read and
    /// hashed. For those who serve clients that mask their rows.
    pub fn commit(&mut self) {
        self.layers.commit(&mut self.compute);
    }
}

impl<L: HostLayers> ForwardPass for ResidentModel<L> {
    type Adapter = PreparedAdapter;
    type Error = L::Error;

    fn vocab_size(&self) -> usize {
        self.frame.config.vocab_size
    }

    fn hidden_size(&self) -> usize {
        self.frame.config.hidden_size
    }

    fn states(&self) -> &[f32] {
        &self.scratch.states
    }

    fn branches(&self) -> bool {
        true
    }

    fn takes_linear(&self) -> bool {
        true
    }

    fn set_path(&mut self, path: SitePath) {
        self.path = path;
    }

    fn lacked_weights(_: &L::Error) -> bool {
        true
    }

    fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        self.layers.sweep_figures()
    }

    fn forward_in_company(
        &mut self,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
        logits: &mut Vec<f32>,
        company: &mut dyn PassHooks,
    ) -> Result<(), L::Error> {
        let config = &self.frame.config;
        let found = AdapterRows::of(batch);
        let mut deltas = BatchDeltas::new(config, self.assist.as_deref_mut(), &mut self.deltas, &found);
        let (path, together) = (self.path, &mut self.together);
        let mut layers = CoBatchedLayers { layers: &mut self.layers, path, company, together };
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
        BorrowedSites { layers: &mut self.layers, compute: &mut self.compute }.evaluate(call, x, out)
    }
}
