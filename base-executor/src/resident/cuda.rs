//! The base on an NVIDIA GPU.

mod plan;

use std::{path::Path, sync::Arc};

use anyhow::Context as _;
use kernels::{
    cuda::{Cuda, attention::KvPool},
    lora::LoraPrecision,
};
use model::{
    cuda::{CudaModel, CudaOptions, CudaWeights, Graphs},
    device_copy::DeviceMemory,
    resident::{KvDtype, kv_precision, kv_shape},
    weights::LoadProgress,
};
use shmproto::message::{DeviceFacts, DeviceKind};

use self::plan::MemoryPlan;
use super::{AdapterLoader, Platform, Resident, base::Base, costs, device_settings, kv_dtype, some_blocks};
use crate::{
    config::{Config, DeviceChoice},
    device::{Arrivals, FreeBytes},
    images::Library,
    progress::Progress,
    workers::{Bridging, Door, JobRows, Workers},
};

/// Rows of prompts whose logits are computed beside those of running requests.
const PROMPT_HEAD_ROWS: usize = 64;

/// Opens the model of `config` on GPU `ordinal`, and tells `progress` how far it is.
///
/// # Errors
/// If there is no such GPU, it has no room, or the model cannot be served.
pub fn open(
    config: &Config,
    ordinal: u32,
    progress: &Progress,
    arrivals: Arrivals,
) -> anyhow::Result<Resident<CudaModel, AdapterLoader>> {
    let base = Base::open(config)?;
    progress.stage("opening the GPU");
    let cuda = Cuda::open(ordinal)?;
    let plan = plan(config, &cuda, &base)?;
    progress.stage(base.stage());
    failpoint::pass("executor.before_weights");
    let weights = load(&cuda, &base, progress)?;
    failpoint::pass("executor.after_weights");
    let mut base = base.close()?;
    let (shape, suits) = (weights.config().clone(), weights.adapter_precision());
    let loan = base.lend(config, &shape, suits);
    tell(&cuda, &base.path, &weights);
    let library = Library::new().context("no descriptor is left for the images of adapters")?;
    let loader = AdapterLoader::new(config, &shape, suits, &library);
    progress.stage("taking memory for keys and values");
    let mut pass = CudaModel::new(weights, &options(config, plan.kv_bytes(cuda.free_bytes()? as u64))?)?;
    let kv_blocks = some_blocks(pass.kv_blocks())?;
    let facts = base.facts(facts(&cuda), &shape, kv_blocks);
    let settings = device_settings(config);
    let costs = costs(&settings, &mut pass, &shape, &base.cores, kv_blocks, progress)?;
    let (pass, workers) = with_workers(pass, config, &base.cores, library)?;
    let memory = DeviceMemory::Cuda(Arc::clone(pass.copy_lane()));
    // A GPU that is lost says nothing; the engine notices by itself.
    let free = FreeBytes::new(move || cuda.free_bytes().map_or(0, |bytes| bytes as u64));
    let placement = Platform { settings, memory, free, arrivals, workers, costs }.placement()?;
    let tenancy = loan.map(|loan| loan.begin(&pass)).transpose()?;
    Ok(Resident { pass, loader, placement, tenancy, facts })
}

/// The linear layers of a base, and what there is to say of them.
pub(crate) struct Alone {
    pub(crate) model: CudaModel,
    pub(crate) architecture: String,
    pub(crate) identity: [u8; 32],
    /// How adapters are best kept beside them.
    pub(crate) suits: LoraPrecision,
    pub(crate) bytes: usize,
}

/// Opens the model at `path` on GPU `ordinal` for its linear layers alone, and tells `progress` how far it is.
///
/// # Errors
/// If there is no such GPU, it has no room, or the model is not of an architecture that is known.
pub(crate) fn open_alone(
    path: &Path,
    ordinal: u32,
    threads: usize,
    progress: &Progress,
) -> anyhow::Result<Alone> {
    let source = model::open::open(path).map_err(|error| match error.is_of_configuration() {
        true => anyhow::Error::new(error)
            .context("a GPU serves known architectures alone, any other --device cpu"),
        false => error.into(),
    })?;
    let cuda = Cuda::open(ordinal)?;
    let told = |at: LoadProgress| progress.done(at.done, at.total);
    let weights = CudaWeights::load(&*source, &cuda, threads, &told)?;
    let (bytes, suits) = (weights.bytes(), weights.adapter_precision());
    let architecture = source.config().architecture.clone();
    let identity = model::identity::of_base(&*source);
    // Nobody's keys and values are kept here.
    let options = CudaOptions { kv_bytes: 0, kv_dtype: KvDtype::Auto, graphs: Graphs::Avoid };
    let model = CudaModel::new(weights, &options)?;
    Ok(Alone { model, architecture, identity, suits, bytes })
}

/// Adds up what `base` takes, and refuses what does not fit before anything is taken.
fn plan(config: &Config, cuda: &Arc<Cuda>, base: &Base) -> anyhow::Result<MemoryPlan> {
    let precision = kv_precision(base.is_exact(), kv_dtype(config));
    let block_bytes = KvPool::block_bytes(kv_shape(base.source.config(), precision));
    let plan = MemoryPlan::of(config, &*base.source, block_bytes as u64);
    let device = DeviceChoice::Cuda { ordinal: cuda.info().ordinal };
    plan.check(device, cuda.free_bytes()? as u64, cuda.info().memory_bytes as u64)?;
    Ok(plan)
}

fn load(cuda: &Arc<Cuda>, base: &Base, progress: &Progress) -> anyhow::Result<CudaWeights> {
    let told = |at: LoadProgress| progress.done(at.done, at.total);
    Ok(CudaWeights::load(&*base.source, cuda, base.cores.len(), &told)?)
}

fn tell(cuda: &Cuda, model: &Path, weights: &CudaWeights) {
    let info = cuda.info();
    let (major, minor) = info.capability;
    tracing::info!(
        model = %model.display(),
        architecture = weights.config().architecture,
        weight_bytes = weights.bytes(),
        device = info.name,
        capability = format!("{major}.{minor}"),
        driver = format!("{}.{}", info.driver.0, info.driver.1),
        "weights loaded"
    );
}

fn options(config: &Config, kv_bytes: u64) -> anyhow::Result<CudaOptions> {
    let kv_bytes = usize::try_from(kv_bytes).context("--kv-bytes is more than can be addressed")?;
    Ok(CudaOptions { kv_bytes, kv_dtype: kv_dtype(config), graphs: Graphs::Use })
}

/// Sets up who sums what has not arrived on the GPU: workers, if there may be any, and the executor's own cores.
fn with_workers(
    pass: CudaModel,
    config: &Config,
    cores: &[usize],
    library: Library,
) -> anyhow::Result<(CudaModel, Workers)> {
    let socket = config.worker_socket();
    let door = Door { socket: &socket, most: config.max_workers };
    let door = (config.max_workers > 0).then_some(door);
    let rows = JobRows {
        pass: config.chunk_tokens + config.max_running,
        head: config.max_running + PROMPT_HEAD_ROWS,
    };
    let invocation = config.worker_invocation.into();
    let bridging = Bridging { cuda: pass.cuda(), cores: cores.to_vec(), invocation };
    let (workers, assist) = Workers::start_on_device(door, rows, pass.config(), library, bridging)?;
    Ok((pass.with_assist(assist), workers))
}

fn facts(cuda: &Cuda) -> DeviceFacts {
    let info = cuda.info();
    DeviceFacts { kind: DeviceKind::Cuda, name: info.name.clone(), memory_bytes: info.memory_bytes as u64 }
}
