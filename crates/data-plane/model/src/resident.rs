//! A whole model in this process, with base layers, KV cache and threads.
//!
//! # Layout
//!
//! - this file: the model and its options.
//! - `loaded`: weights before they get memory and threads.

mod loaded;

use std::{io, sync::Arc};

pub use kernels::attention::KvPrecision;
use kernels::{Activations, BorrowedCores, Isa, ThreadPool};
use shmproto::group::LONG_CALL_ROWS;
use types::BlockId;

pub use self::loaded::{LoadedWeights, SharedBase, kv_shape};
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

/// Reasons why a model cannot become resident.
#[derive(Debug, thiserror::Error)]
pub enum ResidentError {
    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The threads cannot be started.
    #[error("cannot start threads for cores {cores:?}; raise the limit of threads or name fewer cores")]
    Threads {
        /// The requested cores, by number.
        cores: Vec<usize>,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The KV pool does not fit into memory.
    #[error("no memory for {blocks} KV blocks of {block_bytes} bytes; lower the KV budget")]
    KvPool {
        /// Requested number of blocks.
        blocks: usize,
        /// Bytes of each block.
        block_bytes: usize,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Resources that a resident model may use.
#[derive(Debug, Clone)]
pub struct ResidentOptions {
    /// Cores to compute on, the first for the thread of the first pass; if empty, one thread without pinning.
    pub cores: Vec<usize>,
    /// Bytes of the KV pool.
    pub kv_bytes: usize,
    /// Element type of the KV cache.
    pub kv_dtype: Option<KvPrecision>,
}

/// A model that runs in the calling thread and its helper threads; weights may be streamed from a disk.
#[derive(Debug)]
pub struct ResidentModel<L = ResidentLayers> {
    frame: ModelContext,
    layers: L,
    kv: PagedKv,
    compute: Compute,
    scratch: Scratch<Compute>,
    /// Outputs of a pass's own and joined rows.
    together: Vec<f32>,
    deltas: DeltaScratch,
    assist: Option<Box<dyn Assist>>,
    path: SitePath,
}

impl<L: HostLayers> ResidentModel<L> {
    /// Allocates memory and starts threads for `weights`; the first pass pins its thread to the first core.
    ///
    /// # Errors
    ///
    /// A thread cannot be started, or there is no memory for the KV pool.
    pub fn new(weights: LoadedWeights<L>, options: &ResidentOptions) -> Result<Self, ResidentError> {
        let shape = weights.kv_shape(options.kv_dtype);
        let (block_bytes, blocks) = (shape.block_bytes(), options.kv_bytes / shape.block_bytes());
        let kv = PagedKv::new(shape, blocks, &weights.frame);
        let kv = kv.map_err(|source| ResidentError::KvPool { blocks, block_bytes, source })?;
        let threads = ThreadPool::new(&options.cores)
            .map_err(|source| ResidentError::Threads { cores: options.cores.clone(), source })?;
        let LoadedWeights { frame, layers, .. } = weights;
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

    /// Makes `assist` compute partial sums of ranks that the device lacks.
    #[must_use]
    pub fn with_assist(self, assist: Box<dyn Assist>) -> Self {
        Self { assist: Some(assist), ..self }
    }

    /// Replaces the instruction set, for tests.
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.compute.isa = isa;
        self
    }

    /// Returns the thread pool, to replace it or to read the regions that a simulated pool recorded.
    pub fn pool_mut(&mut self) -> &mut ThreadPool {
        &mut self.compute.pool
    }

    /// Lets long passes compute on `borrowed` cores too. These belong to the members of a device group, which
    /// sleep between the calls of a long pass.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub fn with_borrowed_cores(mut self, cores: &[usize], borrowed: &[usize]) -> Result<Self, ResidentError> {
        let pool = ThreadPool::with_borrowed(cores, borrowed);
        let refused = |source| ResidentError::Threads { cores: [cores, borrowed].concat(), source };
        self.compute.pool = pool.map_err(refused)?;
        Ok(self)
    }

    /// Returns the number of KV blocks.
    #[must_use]
    pub fn kv_blocks(&self) -> usize {
        self.kv.blocks()
    }

    /// Returns the memory for adapter copies, which lie in blocks of the KV pool.
    #[must_use]
    pub fn adapter_memory(&self) -> CpuMemory {
        CpuMemory(Arc::clone(self.kv.memory()))
    }

    /// Returns the model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }

    /// Reads and hashes all weights, and gives every eligible site a modular path with a commitment to its
    /// weights. Executors whose clients mask their rows need this.
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

    fn forward_with_hooks(
        &mut self,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
        logits: &mut Vec<f32>,
        hooks: &mut dyn PassHooks,
    ) -> Result<(), L::Error> {
        let rows: usize = batch.iter().map(|slice| slice.tokens.len()).sum();
        let is_long = rows >= LONG_CALL_ROWS as usize;
        self.compute.pool.use_borrowed(if is_long { BorrowedCores::Used } else { BorrowedCores::Returned });
        let config = &self.frame.config;
        let found = AdapterRows::of(batch);
        let mut deltas = BatchDeltas::new(config, self.assist.as_deref_mut(), &mut self.deltas, &found);
        let (path, together) = (self.path, &mut self.together);
        let mut layers = CoBatchedLayers { layers: &mut self.layers, path, hooks, together };
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
