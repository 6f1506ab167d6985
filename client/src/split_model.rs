//! A model whose linear layers an executor computes; the rest of the forward pass is local.
//!
//! Adapters, KV cache, norms, embeddings and sampling stay with the client, and the executor does not see
//! them. Values have the precision of the executor's engine (`Catalog::kv_dtype`, `Catalog::adapter_dtype`),
//! so that an answer has the same bits.

use std::{io, path::Path, sync::Arc};

use kernels::{
    Isa, ThreadPool,
    attention::KvPrecision,
    lora::{LayoutError, LoraPrecision},
};
use kv_cache::{Cache, CacheSettings};
use model::{
    adapter::{Adapter, AdapterError, AnyAdapter},
    client_weights::client_base::ClientBase,
    cpu::{Compute, kv::PagedKv},
    deltas::{
        adapter_rows::AdapterRows,
        batch::{BatchDeltas, DeltaScratch},
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    forward::{BLOCK_TOKENS, ModelContext, Scratch, SequenceSlice, run},
    resident::kv_shape,
    shape::config::ModelConfig,
};
use shmproto::layer::{
    CallClass,
    control::{AdapterDtype, Catalog, KvDtype},
};
use types::{AdapterId, BlockId, TenantId};

use crate::{
    error::CallError,
    masking::Mask,
    remote_layers::RemoteLayers,
    session::Session,
    speculative::{DraftPolicy, PassCost},
};

/// Resources that a split model may use.
#[derive(Debug, Clone)]
pub struct SplitOptions {
    /// Cores to compute on; empty means one unpinned thread.
    pub cores: Vec<usize>,
    /// Size of the block pool, in bytes.
    pub kv_bytes: usize,
    /// Dtype of the KV cache; `None` takes the one of the executor's engine.
    pub kv_dtype: Option<KvPrecision>,
    /// Maximum number of prompt tokens per pass.
    pub chunk_tokens: usize,
    /// Policy for the number of draft tokens per verification.
    pub effort: DraftPolicy,
}

impl Default for SplitOptions {
    fn default() -> Self {
        Self {
            cores: Vec::new(),
            kv_bytes: 256 << 20,
            kv_dtype: None,
            chunk_tokens: 256,
            effort: DraftPolicy::default(),
        }
    }
}

/// Reason why a split model cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SplitError {
    /// The executor's sites do not match the base.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The threads cannot be started.
    #[error("cannot start threads for cores {cores:?}: raise the limit of threads, or name fewer cores")]
    Threads {
        /// Requested cores, by number.
        cores: Vec<usize>,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The block pool does not fit into memory.
    #[error("no memory for {blocks} KV blocks of {block_bytes} bytes: lower --kv-bytes")]
    KvPool {
        /// Number of requested blocks.
        blocks: usize,
        /// Size of each block, in bytes.
        block_bytes: usize,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The block pool would be empty.
    #[error("--kv-bytes is smaller than one KV block of {block_bytes} bytes: raise it")]
    NoBlocks {
        /// Size of a block, in bytes.
        block_bytes: usize,
    },
}

/// Reason why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The adapter's files are not valid.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The kernels do not support the shapes of its matrices.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Returns the KV precision: as `chosen`, else as in the executor's engine.
#[must_use]
pub fn kv_precision(catalog: &Catalog, chosen: Option<KvPrecision>) -> KvPrecision {
    chosen.unwrap_or(match catalog.kv_dtype {
        KvDtype::F32 => KvPrecision::F32,
        KvDtype::F16 => KvPrecision::F16,
        KvDtype::Int8 => KvPrecision::Int8,
        KvDtype::Bf16 => KvPrecision::Bf16,
    })
}

/// Returns the precision of adapters in the executor's engine.
#[must_use]
pub fn adapter_precision(catalog: &Catalog) -> LoraPrecision {
    match catalog.adapter_dtype {
        AdapterDtype::Exact => LoraPrecision::Exact,
        AdapterDtype::F16 => LoraPrecision::Compact,
        AdapterDtype::Bf16 => LoraPrecision::Bf16,
    }
}

/// An adapter of this client.
#[derive(Debug, Clone)]
pub struct ClientAdapter {
    /// Namespace part under which its KV blocks are cached.
    pub(crate) id: AdapterId,
    pub(crate) prepared: Arc<PreparedAdapter>,
}

impl ClientAdapter {
    /// Returns the adapter in the form that the pass uses.
    #[must_use]
    pub fn prepared(&self) -> &Arc<PreparedAdapter> {
        &self.prepared
    }
}

/// A model whose linear layers an executor computes.
#[derive(Debug)]
pub struct SplitModel {
    frame: ModelContext,
    layers: RemoteLayers,
    precision: LoraPrecision,
    kv: PagedKv,
    compute: Compute,
    scratch: Scratch<Compute>,
    deltas: DeltaScratch,
    pub(crate) cache: Cache,
    pub(crate) chunk_tokens: usize,
    pub(crate) logits: Vec<f32>,
    /// Measured duration of passes over this session.
    pub(crate) sweeps: PassCost,
    pub(crate) effort: DraftPolicy,
}

impl SplitModel {
    /// Takes memory and threads for `base`, whose linear layers `session` computes.
    ///
    /// # Errors
    /// Fails if the base has another shape, a thread cannot start, or memory for the pool is missing.
    pub fn new(
        base: ClientBase,
        session: Session,
        mask: Box<dyn Mask>,
        options: &SplitOptions,
    ) -> Result<Self, SplitError> {
        let precision = adapter_precision(session.catalog());
        let shape = kv_shape(base.config(), kv_precision(session.catalog(), options.kv_dtype));
        let ClientBase { frame, embedding, .. } = base;
        let layers = RemoteLayers::new(session, mask, &frame.config, embedding)?;
        let block_bytes = shape.block_bytes();
        let blocks = options.kv_bytes / block_bytes;
        let count = match u32::try_from(blocks) {
            Ok(0) => return Err(SplitError::NoBlocks { block_bytes }),
            count => count.unwrap_or(u32::MAX),
        };
        let kv = PagedKv::new(shape, blocks, &frame);
        let kv = kv.map_err(|source| SplitError::KvPool { blocks, block_bytes, source })?;
        let pool = ThreadPool::new(&options.cores)
            .map_err(|source| SplitError::Threads { cores: options.cores.clone(), source })?;
        Ok(Self {
            frame,
            layers,
            precision,
            kv,
            compute: Compute { pool, isa: Isa::best() },
            scratch: Scratch::empty(),
            deltas: DeltaScratch::default(),
            cache: Cache::new(CacheSettings::device_alone(count, BLOCK_TOKENS)),
            chunk_tokens: options.chunk_tokens.max(1),
            logits: Vec::new(),
            sweeps: PassCost::default(),
            effort: options.effort,
        })
    }

    /// Reads an adapter and converts it for the pass, with the precision of the executor's engine.
    ///
    /// # Errors
    /// Fails if the files are no adapter, or do not fit the base.
    pub fn load_adapter(&self, path: &Path) -> Result<ClientAdapter, LoadError> {
        let encode = |adapter: &Adapter| EncodedAdapter::new(adapter, self.config(), self.precision);
        let encoded = match AnyAdapter::read(path, self.config())? {
            AnyAdapter::Vocabulary(it) => encode(&it.adapter).with_vocabulary(it.changes),
            AnyAdapter::Biased(it) => encode(&it.adapter).with_scales(it.biases),
            other => encode(&other.answering(path)?),
        };
        let prepared = Arc::new(PreparedAdapter::of(encoded, self.config())?);
        Ok(ClientAdapter { id: AdapterId::new(TenantId::EVERYBODY, prepared.generation()), prepared })
    }

    /// Runs `batch` and writes the requested rows of logits to `logits`. Keys and values go to the blocks
    /// that the slices name, which the caller manages; [`generate`](Self::generate) manages its own.
    ///
    /// # Errors
    /// Fails if the executor is gone, or refuses. A batch that failed may be run again.
    pub fn forward(
        &mut self,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
        logits: &mut Vec<f32>,
    ) -> Result<(), CallError> {
        let is_decode = batch.iter().all(|slice| slice.tokens.len() == 1);
        self.forward_as(if is_decode { CallClass::Decode } else { CallClass::Prefill }, batch, logits)
    }

    pub(crate) fn forward_as(
        &mut self,
        class: CallClass,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
        logits: &mut Vec<f32>,
    ) -> Result<(), CallError> {
        self.layers.set_class(class);
        let found = AdapterRows::of(batch);
        let mut deltas = BatchDeltas::new(&self.frame.config, None, &mut self.deltas, &found);
        let parts = (&mut self.layers, &mut deltas, &mut self.kv);
        run(&self.frame, parts, &mut self.compute, &mut self.scratch, batch, logits)
    }

    pub(crate) fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let mut bytes = vec![0; self.kv.block_bytes()];
        self.kv.read_block(from, &mut bytes);
        self.kv.write_block(to, &bytes);
    }

    /// Returns the configuration of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }

    /// Returns the masking mode.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        self.layers.mode()
    }

    /// Returns the session with the executor.
    #[must_use]
    pub fn session(&self) -> &Session {
        self.layers.session()
    }

    /// Returns the session with the executor, to ask for its stats.
    pub fn session_mut(&mut self) -> &mut Session {
        self.layers.session_mut()
    }
}
