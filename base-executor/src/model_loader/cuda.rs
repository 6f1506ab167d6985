//! The base on an NVIDIA GPU.

mod plan;

use std::{path::Path, sync::Arc};

use anyhow::Context as _;
use kernels::{
    ThreadPool,
    cuda::{Cuda, CudaError, KernelCode, attention::KvPool},
};
use kv_cache::ledger::MemoryAccount;
use model::{
    cuda::{CudaModel, CudaOptions, CudaWeights, Graphs},
    deltas::device_copy::DeviceMemory,
    precision::{BaseNumerics, Precision},
    resident::{SharedBase, kv_shape},
    shape::{
        config::ModelConfig,
        identity::{HasIdentity as _, HashedWeights},
        source::WeightSource as _,
    },
    weights::LoadProgress,
};
use model_files::{model_files::ModelFiles, text_hash::TextHash};
use settings::DeviceChoice;
use shmproto::message::{DeviceFacts, DeviceKind};

use self::plan::MemoryPlan;
use super::{
    AdapterLoader, LinearLayersInfo, OpenedModel,
    base::{LoadedBase, PendingBase},
    base_device::{self, BaseDevice},
    kv_dtype, kv_precision,
};
use crate::{
    adapter_images::ImageRegistry,
    config::ExecutorConfig,
    device::{ArrivalNotifier, FreeBytes},
    progress::LoadingProgress,
    workers::{BridgeSetup, JobRows, WorkerListener, Workers},
};

/// Prompt rows whose logits are computed together with those of running requests.
const PROMPT_HEAD_ROWS: usize = 64;

/// Opens the model of `config` on GPU `ordinal` and reports to `progress`.
///
/// # Errors
/// If there is no such GPU, its memory is insufficient, or the model cannot be served.
pub(crate) fn open(
    config: &ExecutorConfig,
    ordinal: u32,
    progress: &LoadingProgress,
    arrivals: ArrivalNotifier,
) -> anyhow::Result<OpenedModel<CudaModel, AdapterLoader>> {
    let base = PendingBase::open(config)?;
    progress.stage("opening the GPU");
    let cuda = open_gpu(ordinal)?;
    let plan = plan(config, &cuda, &base)?;
    let offers_exact = config.offers_exact();
    base_device::open(Gpu { cuda, plan, offers_exact }, base, config, progress, arrivals)
}

/// Opens GPU `ordinal`, and logs a warning if the machine code beside the program cannot be used.
fn open_gpu(ordinal: u32) -> Result<Arc<Cuda>, CudaError> {
    let cuda = Cuda::open(ordinal)?;
    if let KernelCode::PtxInstead(reason) = cuda.kernel_code() {
        tracing::warn!(%reason, "the driver compiles the kernels, which takes up to half a minute the first time");
    }
    Ok(cuda)
}

struct Gpu {
    cuda: Arc<Cuda>,
    plan: MemoryPlan,
    /// Whether the weights are hashed for the modular path, for split clients with masking.
    offers_exact: bool,
}

impl BaseDevice for Gpu {
    type Weights = CudaWeights;
    type Pass = CudaModel;

    const PLANS_WHOLE_PASSES: bool = true;
    const ADAPTS_EXPERTS: bool = false;

    fn needs(&self, _: &PendingBase) -> u64 {
        0
    }

    fn load(&self, base: &PendingBase, progress: &LoadingProgress) -> anyhow::Result<CudaWeights> {
        let on_progress = |at: LoadProgress| progress.done(at.done, at.total);
        let mut weights = CudaWeights::load(&*base.source, &self.cuda, base.cores.len(), &on_progress)?;
        if self.offers_exact {
            weights.commit(&*base.source, base.cores.len())?;
        }
        Ok(weights)
    }

    fn shape(weights: &CudaWeights) -> (ModelConfig, BaseNumerics) {
        (weights.config().clone(), weights.numerics())
    }

    fn precision(_: &CudaWeights) -> Option<Precision> {
        None
    }

    /// Drafts compute on the host, so weights on a GPU are not shared.
    fn shared(_: &CudaWeights) -> Option<SharedBase> {
        None
    }

    fn log_loaded(&self, base: &LoadedBase, weights: &CudaWeights) {
        let info = self.cuda.info();
        let (major, minor) = info.capability;
        tracing::info!(
            model = %base.path.display(),
            architecture = weights.config().architecture,
            weight_bytes = weights.bytes(),
            device = info.name,
            capability = format!("{major}.{minor}"),
            driver = format!("{}.{}", info.driver.0, info.driver.1),
            machine_code = matches!(self.cuda.kernel_code(), KernelCode::Cubins(_)),
            "weights loaded"
        );
    }

    /// GPU memory is not host memory; `plan` has counted it.
    fn host_bytes(&self, _: &CudaWeights, _: &ExecutorConfig) -> [u64; 2] {
        [0, 0]
    }

    fn pass(
        &self,
        weights: CudaWeights,
        config: &ExecutorConfig,
        cores: &[usize],
    ) -> anyhow::Result<CudaModel> {
        let kv_bytes = self.plan.pool_bytes(self.cuda.free_bytes()? as u64);
        let kv_bytes = usize::try_from(kv_bytes).context("--device-bytes is more than can be addressed")?;
        let options = CudaOptions { kv_bytes, kv_dtype: kv_dtype(config.kv_dtype), graphs: Graphs::Use };
        let host = ThreadPool::new(cores).context("cannot start the threads that compute on the host")?;
        Ok(CudaModel::new(weights, &options)?.with_host(host))
    }

    fn kv_blocks(pass: &CudaModel) -> usize {
        pass.kv_blocks()
    }

    fn facts(&self) -> DeviceFacts {
        let info = self.cuda.info();
        let memory_bytes = info.memory_bytes as u64;
        DeviceFacts {
            kind: DeviceKind::Cuda,
            name: info.name.clone(),
            memory_bytes,
            group_weight_bytes: Vec::new(),
        }
    }

    /// Sets up workers, if allowed, and the executor's own cores.
    fn with_workers(
        pass: CudaModel,
        config: &ExecutorConfig,
        cores: &[usize],
        library: ImageRegistry,
        memory: &MemoryAccount,
    ) -> anyhow::Result<(CudaModel, Workers)> {
        let socket = config.worker_socket();
        let listener = WorkerListener { socket: &socket, most: config.max_workers, memory };
        let listener = (config.max_workers > 0).then_some(listener);
        let rows = JobRows {
            pass: config.chunk_tokens + config.max_running,
            head: config.max_running + PROMPT_HEAD_ROWS,
        };
        let invocation = config.worker_invocation.into();
        let bridging = BridgeSetup { cuda: pass.cuda(), cores: cores.to_vec(), invocation };
        let (workers, assist) = Workers::start_on_device(listener, rows, pass.config(), library, bridging)?;
        Ok((pass.with_assist(assist), workers))
    }

    fn memory(self, pass: &CudaModel) -> (Arc<dyn DeviceMemory>, FreeBytes) {
        let memory = Arc::new(pass.adapter_memory());
        // A lost GPU reports an error, which the engine notices by itself.
        let free = FreeBytes::new(move || self.cuda.free_bytes().map_or(0, |bytes| bytes as u64));
        (memory, free)
    }
}

/// Opens the model at `path` on GPU `ordinal` for its linear layers alone and reports to `progress`.
///
/// # Errors
/// If there is no such GPU, its memory is insufficient, or the architecture is unknown.
pub(crate) fn open_alone(
    path: &Path,
    ordinal: u32,
    threads: usize,
    offers_exact: bool,
    progress: &LoadingProgress,
) -> anyhow::Result<(CudaModel, LinearLayersInfo)> {
    let files = ModelFiles::at(path)?;
    let text = TextHash::of(&files)?;
    let source =
        model::sources::open::weights(&files).map_err(|error| match error.is_of_configuration() {
            true => {
                anyhow::Error::new(error).context("a GPU supports known architectures only; use --device cpu")
            }
            false => error.into(),
        })?;
    let source = HashedWeights::new(source);
    let cuda = open_gpu(ordinal)?;
    let on_progress = |at: LoadProgress| progress.done(at.done, at.total);
    let mut weights = CudaWeights::load(&source, &cuda, threads, &on_progress)?;
    if offers_exact {
        weights.commit(&source, threads)?;
    }
    let (bytes, numerics) = (weights.bytes(), weights.numerics());
    let architecture = source.config().architecture.clone();
    let identity = source.identity(text);
    // The layer service keeps no KV cache.
    let options = CudaOptions { kv_bytes: 0, kv_dtype: None, graphs: Graphs::Avoid };
    let model = CudaModel::new(weights, &options)?;
    Ok((model, LinearLayersInfo { architecture, identity, numerics, bytes }))
}

/// Plans the memory of `base`, and fails before any allocation if the GPU has too little.
fn plan(config: &ExecutorConfig, cuda: &Arc<Cuda>, base: &PendingBase) -> anyhow::Result<MemoryPlan> {
    let (plan, _) = memory_plan(config, base);
    let device = DeviceChoice::Cuda { ordinal: cuda.info().ordinal };
    plan.check(device, cuda.free_bytes()? as u64, cuda.info().memory_bytes as u64)?;
    Ok(plan)
}

/// Plans the memory of `base` on any GPU; the second value is the bytes of a KV block.
pub(super) fn memory_plan(config: &ExecutorConfig, base: &PendingBase) -> (MemoryPlan, usize) {
    let precision = kv_precision(config, base.numerics_on_gpu());
    let block_bytes = KvPool::block_bytes(kv_shape(base.source.config(), precision));
    (MemoryPlan::of(config, &*base.source, block_bytes as u64), block_bytes)
}
