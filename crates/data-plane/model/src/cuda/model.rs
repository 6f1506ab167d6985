//! A model on the device, as an engine runs it.

use std::sync::Arc;

use kernels::{
    Activations, ThreadPool,
    cuda::{
        Cuda, CudaError, CudaStream, Matrix,
        attention::KvPool,
        blas::Blas,
        linear::Workspace,
        sample::{ChoiceReport, ChosenToken, ChosenTokens, TokenChoice, choose},
    },
    lora::{ElementKind, LoraPrecision},
};
use types::BlockId;

use super::{
    CudaDevice, CudaWeights,
    assist::DeviceAssist,
    copies::CudaMemory,
    deltas::{CudaDeltas, DeltaState},
    device::Tables,
    graph_cache::{GraphCache, StepShape},
    kv::CudaKv,
    layers::{CoBatchedCuda, CudaLayers, CudaSites, LinearScratch, OptionalHooks},
};
use crate::{
    deltas::prepared::PreparedAdapter,
    forward::{
        BatchRows, Device as _, ForwardPass, LogitRows, ModelContext, Scratch, SequenceSlice, make_room, run,
    },
    linear_sites::{EvaluateError, EvaluateSites, PassHooks, Site, SiteCall},
    resident::KvPrecision,
    sampling::{Drawn, Probability, TokenDraw},
    shape::config::ModelConfig,
    weights::WeightsError,
};

/// Reasons why a model could not be loaded to the device.
#[derive(Debug, thiserror::Error)]
pub enum CudaModelError {
    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(WeightsError),
    /// The device fails or lacks memory.
    #[error(transparent)]
    Cuda(CudaError),
    /// The kernels for GPUs do not compute a part of the model.
    #[error("{0} cannot be computed on a GPU yet; use --device cpu")]
    Unsupported(&'static str),
}

/// Whether decode steps use CUDA graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Graphs {
    /// Decode steps are replayed, at the cost of one host call per step.
    #[default]
    Use,
    /// Every step is enqueued launch by launch, for comparison.
    Avoid,
}

/// Resources that a model on the device may use.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Bytes of the KV pool.
    pub kv_bytes: usize,
    /// Element type of the KV cache.
    pub kv_dtype: Option<KvPrecision>,
    /// Whether decode steps use CUDA graphs.
    pub graphs: Graphs,
}

/// A model on one device.
#[derive(Debug)]
pub struct CudaModel {
    cuda: Arc<Cuda>,
    frame: ModelContext,
    layers: CudaLayers,
    kv: CudaKv,
    device: CudaDevice,
    scratch: Scratch<CudaDevice>,
    linear: LinearScratch,
    deltas: DeltaState,
    logits: Matrix,
    chosen: ChosenTokens,
    drawn: Vec<Option<Drawn>>,
    records: Option<GraphCache>,
    is_lost: bool,
}

impl CudaModel {
    /// Allocates the KV pool for `weights`. If cuBLASLt cannot be used, the reason is logged.
    ///
    /// # Errors
    ///
    /// The device lacks memory.
    pub fn new(weights: CudaWeights, options: &CudaOptions) -> Result<Self, CudaModelError> {
        let shape = weights.kv_shape(options.kv_dtype);
        let CudaWeights { cuda, frame, layers, kind, .. } = weights;
        let blocks = options.kv_bytes / KvPool::block_bytes(shape);
        let kv = CudaKv::new(&cuda, shape, blocks, frame.config.limits())?;
        let device = CudaDevice::new(kv.memory(), &frame, kind)?;
        let blas = Blas::open(&cuda);
        if let Err(reason) = &blas {
            tracing::warn!(%reason, "cannot use cuBLASLt; prompts are computed more slowly without it");
        }
        let stream = device.stream();
        let workspace = Workspace::new(&cuda, blas.ok());
        Ok(Self {
            linear: LinearScratch::new(stream, workspace, kind)?,
            deltas: DeltaState::new(stream)?,
            scratch: device.scratch()?,
            logits: Matrix::new(&cuda, ElementKind::F32)?,
            chosen: ChosenTokens::new(&cuda, 0)?,
            drawn: Vec::new(),
            records: (options.graphs == Graphs::Use).then(GraphCache::default),
            is_lost: false,
            cuda,
            frame,
            layers,
            kv,
            device,
        })
    }

    /// Makes `assist` compute partial sums of ranks that the device lacks.
    #[must_use]
    pub fn with_assist(mut self, assist: Box<dyn DeviceAssist>) -> Self {
        self.deltas.assist = Some(assist);
        self
    }

    /// Makes `pool` compute the heads of adapters with their own head, instead of the calling thread.
    #[must_use]
    pub fn with_host(mut self, pool: ThreadPool) -> Self {
        self.deltas.host.pool = pool;
        self
    }

    /// Returns the element precision of adapters for these weights.
    #[must_use]
    pub fn adapter_precision(&self) -> LoraPrecision {
        if self.device.kind() == ElementKind::F32 { LoraPrecision::Exact } else { LoraPrecision::Compact }
    }

    /// Returns the number of KV blocks.
    #[must_use]
    pub fn kv_blocks(&self) -> usize {
        self.kv.blocks()
    }

    /// Returns the model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.frame.config
    }

    /// Returns the memory for adapter copies, with the queue that uploads them.
    #[must_use]
    pub fn adapter_memory(&self) -> CudaMemory {
        CudaMemory { pool: Arc::clone(self.kv.memory()), lane: Arc::clone(&self.deltas.lane) }
    }

    /// Returns the CUDA device handle.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Enqueues the pass, waits for it, and reads its logits.
    fn compute(
        &mut self,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
        logits: &mut Vec<f32>,
        hooks: &mut dyn PassHooks,
    ) -> Result<(), CudaError> {
        let Self { frame, layers, kv, device, scratch, linear, records, .. } = self;
        // A panic may have ended the last step during its capture.
        device.tables = Tables::Write;
        let mut deltas = CudaDeltas::new(device.stream(), &frame.config, &mut self.deltas, batch)?;
        let is_sparse = frame.config.experts.is_some();
        let is_replayable = !is_sparse && is_decode_step(batch) && deltas.is_plain() && !hooks.is_waiting();
        let results = &mut self.logits;
        match records.as_mut().filter(|_| is_replayable) {
            None => {
                let mut base = CoBatchedCuda { layers, scratch: linear, hooks: OptionalHooks::Some(hooks) };
                run(frame, (&mut base, &mut deltas, kv), device, scratch, batch, results)?;
            }
            Some(records) => {
                device.lay_out(frame, &BatchRows::of(batch).sequences(), &[], &mut scratch.batch)?;
                device.write_tokens(&mut batch.iter().flat_map(|slice| slice.tokens.iter().copied()))?;
                let shape =
                    StepShape { rows: batch.len(), table: scratch.batch.shape(), plan: deltas.shape() };
                // A captured step must not allocate memory.
                make_room(frame, device, scratch, batch.len())?;
                results.reshape(batch.len(), frame.config.vocab_size)?;
                let stream = device.stream().clone();
                device.tables = Tables::Written;
                let stepped = records.step(&stream, shape, || {
                    let mut base = CoBatchedCuda { layers, scratch: linear, hooks: OptionalHooks::None };
                    run(frame, (&mut base, &mut deltas, kv), device, scratch, batch, results)
                });
                device.tables = Tables::Write;
                stepped?;
            }
        }
        let wanted = LogitRequests::of(batch);
        let drawing = wanted.draws.iter().any(Option::is_some);
        if drawing {
            self.chosen.ask(device.stream(), &wanted.choices())?;
            choose(device.stream(), results, &mut self.chosen)?;
        }
        device.stream().synchronize()?;
        deltas.finish()?;
        self.drawn.clear();
        if drawing {
            let chosen = self.chosen.read(device.stream())?;
            self.drawn.extend(chosen.into_iter().zip(&wanted.draws).filter_map(drawn));
        }
        wanted.read(device.stream(), results, logits)
    }

    fn note<T>(&mut self, result: Result<T, CudaError>) -> Result<T, CudaError> {
        self.is_lost |= result.as_ref().is_err_and(CudaError::is_device_lost);
        result
    }

    fn lent(&mut self) -> CudaSites<'_> {
        CudaSites { layers: &self.layers, scratch: &mut self.linear, device: &self.device }
    }
}

/// The draw of each row of logits; `None` requests the logits themselves.
#[derive(Debug)]
struct LogitRequests {
    draws: Vec<Option<TokenDraw>>,
}

impl LogitRequests {
    fn of(batch: &[SequenceSlice<'_, PreparedAdapter>]) -> Self {
        let mut draws = Vec::with_capacity(batch.len());
        for slice in batch {
            match slice.logits {
                LogitRows::None | LogitRows::States { .. } => {}
                LogitRows::Last => draws.push(None),
                LogitRows::All => draws.extend(slice.tokens.iter().map(|_| None)),
                LogitRows::Draw(draw) => draws.push(Some(draw)),
            }
        }
        Self { draws }
    }

    /// The kernel also chooses a token for rows that only want logits, because skipping them would cost more.
    fn choices(&self) -> Vec<TokenChoice> {
        let any = TokenDraw {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            uniform: 0.0,
            probability: Probability::Unwanted,
        };
        let choice = |draw: &Option<TokenDraw>| {
            let TokenDraw { temperature, top_k, top_p, min_p, uniform: draw, probability } =
                draw.unwrap_or(any);
            let report = match probability {
                Probability::Wanted => ChoiceReport::LogProbability,
                Probability::Unwanted => ChoiceReport::Token,
            };
            TokenChoice { temperature, top_k, top_p, min_p, draw, report }
        };
        self.draws.iter().map(choice).collect()
    }

    /// Reads the rows of wanted logits, adjacent rows at once.
    fn read(&self, stream: &CudaStream, from: &Matrix, logits: &mut Vec<f32>) -> Result<(), CudaError> {
        let width = from.width();
        logits.resize(self.draws.iter().filter(|draw| draw.is_none()).count() * width, 0.0);
        let (mut row, mut rest) = (0, &mut logits[..]);
        for run in self.draws.chunk_by(|a, b| a.is_none() == b.is_none()) {
            if run[0].is_none() {
                let (own, others) = rest.split_at_mut(run.len() * width);
                from.download(stream, row, own)?;
                rest = others;
            }
            row += run.len();
        }
        Ok(())
    }
}

fn drawn((chosen, draw): (Option<ChosenToken>, &Option<TokenDraw>)) -> Option<Option<Drawn>> {
    draw.as_ref()?;
    Some(chosen.map(|chosen| Drawn { token: chosen.token, logprob: chosen.log_probability }))
}

/// Whether every sequence computes exactly one token.
fn is_decode_step(batch: &[SequenceSlice<'_, PreparedAdapter>]) -> bool {
    batch.iter().all(|slice| slice.tokens.len() == 1 && slice.logit_rows() == 1)
}

impl ForwardPass for CudaModel {
    type Adapter = PreparedAdapter;
    type Error = CudaError;

    fn vocab_size(&self) -> usize {
        self.frame.config.vocab_size
    }

    fn hidden_size(&self) -> usize {
        self.frame.config.hidden_size
    }

    fn states(&self) -> &[f32] {
        &self.scratch.states
    }

    fn draws(&self) -> bool {
        true
    }

    fn drawn(&self) -> &[Option<Drawn>] {
        &self.drawn
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn lacked_memory(error: &CudaError) -> bool {
        error.is_out_of_memory()
    }

    fn forward_with_hooks(
        &mut self,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
        logits: &mut Vec<f32>,
        hooks: &mut dyn PassHooks,
    ) -> Result<(), CudaError> {
        let computed = self.compute(batch, logits, hooks);
        self.note(computed)
    }

    fn block_bytes(&self) -> usize {
        self.kv.block_bytes()
    }

    fn read_block(&mut self, block: BlockId, bytes: &mut [u8]) -> Result<(), CudaError> {
        let read = self.kv.read_block(self.device.stream(), block, bytes);
        self.note(read)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), CudaError> {
        let written = self.kv.write_block(self.device.stream(), block, bytes);
        self.note(written)
    }
}

impl EvaluateSites for CudaModel {
    fn sites(&self) -> &[Site] {
        &self.layers.sites
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        self.layers.sites[call.site.0 as usize].check_ring(call)?;
        let evaluated = self.lent().evaluate_here(call, x, out);
        Ok(self.note(evaluated)?)
    }
}
