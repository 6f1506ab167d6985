//! The real model behind the engine: opens the weights and says what the engine needs to know of them.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use cache::copy::BytesPerSecond;
use kernels::lora::LoraPrecision;
use model::{
    adapter::{Adapter, limits},
    config::ModelConfig,
    forward::ForwardPass,
    location::{HubSettings, resolve},
    prepared_adapter::{EncodedAdapter, PreparedAdapter},
    resident::{KvDtype, LoadedWeights, ResidentModel, ResidentOptions},
    sites::EvaluateSites as _,
    skeleton::SkeletonPlan,
};

use shmproto::message::ColdStart;

use crate::{
    config::{self, AdapterDtype, Config},
    costs::Costs,
    device::{Arrivals, Device, DeviceSettings},
    engine::company::Tenancy,
    images::{Library, shelve},
    layers::{
        settings::LayerSettings,
        start::{BaseFacts, Places, Rounding, name_of, start},
    },
    loader::Loader,
    placement::Placement,
    process,
    progress::Progress,
    workers::Workers,
};

/// What the process serves.
pub struct Resident<P: ForwardPass, L> {
    /// The forward pass, which owns weights and KV memory.
    pub pass: P,
    /// Brings adapters into the form the pass takes.
    pub loader: L,
    /// Which adapters the device holds.
    pub placement: Box<dyn Placement<P::Adapter>>,
    /// Split clients that the base is lent to.
    pub tenancy: Option<Tenancy<P>>,
    /// What gateways are told.
    pub facts: Facts,
}

impl<P: ForwardPass, L> std::fmt::Debug for Resident<P, L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resident").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// What the engine and the gateways need to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Path of the model file or directory.
    pub model_path: String,
    /// Content identity of the base: hash of its configuration and tensor table.
    pub base_hash: [u8; 32],
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// KV blocks the pass has memory for.
    pub kv_blocks: u32,
}

/// Opens the model of `config`, and tells `progress` how far it is.
///
/// # Errors
/// If it cannot be served.
pub fn open(
    config: &Config,
    progress: &Progress,
    arrivals: Arrivals,
) -> anyhow::Result<Resident<ResidentModel, AdapterLoader>> {
    let path = resolve(&config.model, &HubSettings::from_env())?;
    // Before the weights, so that a model put in its place meanwhile is noticed.
    let plan = config.layer_socket().map(|_| SkeletonPlan::of(&path)).transpose();
    let source = model::open::open(&path).map_err(|error| match error.is_of_configuration() {
        true => anyhow::Error::new(error).context("split clients could run it with --engine none"),
        false => error.into(),
    })?;
    let cores = match &config.cores {
        Some(cores) => cores.0.clone(),
        None => process::allowed_cores()?,
    };
    progress.stage("reading weights");
    failpoint::pass("executor.before_weights");
    let weights = LoadedWeights::load_telling(&*source, cores.len(), &|at| progress.done(at.done, at.total))?;
    failpoint::pass("executor.after_weights");
    let base_hash = model::identity::of_base(&*source);
    // From here on nothing reads the file any more: it may be replaced, cut or deleted.
    let plan = plan?;
    anyhow::ensure!(
        source.unchanged() && plan.as_ref().is_none_or(SkeletonPlan::is_current),
        "{} was written to while it was loaded, so its weights cannot be trusted; start again once it is whole, and \
         replace model files by renaming",
        path.display()
    );
    drop(source);
    let lent = config.layer_socket().zip(plan);
    let lent = lent.map(|(socket, plan)| loan(config, socket, plan, &weights, base_hash));
    tracing::info!(
        model = %path.display(),
        architecture = weights.config().architecture,
        weight_bytes = weights.bytes(),
        threads = cores.len(),
        isa = ?kernels::Isa::best(),
        "weights loaded"
    );
    let options = options(config, cores)?;
    let library = Library::new().context("no descriptor is left for the images of adapters")?;
    let shape = weights.config().clone();
    let precision = precision(config, &weights);
    let loader = AdapterLoader { config: shape.clone(), precision, library: library.clone() };
    progress.stage("taking memory for keys and values");
    let mut pass = ResidentModel::new(weights, &options)?;
    let kv_blocks = u32::try_from(pass.kv_blocks()).unwrap_or(u32::MAX);
    anyhow::ensure!(kv_blocks > 0, "--kv-bytes does not hold a single KV block; raise it");
    let facts = Facts {
        model_path: path.display().to_string(),
        base_hash,
        context_length: pass.config().context_length,
        kv_blocks,
    };
    let settings = DeviceSettings {
        bytes: config.device_adapter_bytes.0,
        cold_start: config.cold_start.into(),
        link: config.link_bytes_per_s().map(BytesPerSecond),
    };
    if let Some(link) = settings.link {
        tracing::warn!(
            bytes_per_s = link.get(),
            "the link to the device is emulated: an experiment, not a service"
        );
    }
    let costs = match settings.cold_start {
        ColdStart::CpuAssist => {
            progress.stage("measuring what cold starts cost");
            Some(Costs::measure(&mut pass, &shape, &options.cores, kv_blocks, settings.link)?)
        }
        ColdStart::OnDemand | ColdStart::Cached => None,
    };
    let (pass, workers) = with_workers(pass, config, library)?;
    let device = Device::new(settings, arrivals, workers, costs);
    let placement = Box::new(device.context("cannot start the thread that copies adapters")?);
    let tenancy = lent.map(|loan| loan.begin(&pass)).transpose()?;
    Ok(Resident { pass, loader, placement, tenancy, facts })
}

/// The base on loan: what split clients are served, and where.
struct Loan {
    settings: LayerSettings,
    places: Places,
    base: BaseFacts,
}

fn loan(
    config: &Config,
    socket: PathBuf,
    plan: SkeletonPlan,
    weights: &LoadedWeights,
    base_hash: [u8; 32],
) -> Loan {
    let base = BaseFacts {
        model: name_of(&config.model),
        architecture: weights.config().architecture.clone(),
        base_hash,
        context_length: weights.config().context_length,
        rounding: match weights.adapter_precision() {
            LoraPrecision::Exact => Rounding::Exact,
            LoraPrecision::Compact | LoraPrecision::Bf16 => Rounding::Rounded,
        },
        plan,
    };
    Loan { settings: config.layers.settings(), places: Places::of(&config.layers, socket), base }
}

impl Loan {
    /// Opens the doors.
    fn begin(self, pass: &ResidentModel) -> anyhow::Result<Tenancy<ResidentModel>> {
        let (hub, doors) = start(self.settings, self.places, pass.sites(), self.base)?;
        Ok(Tenancy { hub, base: |pass| pass, doors: Some(doors) })
    }
}

fn options(config: &Config, cores: Vec<usize>) -> anyhow::Result<ResidentOptions> {
    Ok(ResidentOptions {
        cores,
        kv_bytes: usize::try_from(config.kv_bytes.0)
            .context("--kv-bytes is more than this machine can address")?,
        kv_dtype: match config.kv_dtype {
            config::KvDtype::Auto => KvDtype::Auto,
            config::KvDtype::F32 => KvDtype::F32,
            config::KvDtype::F16 => KvDtype::F16,
        },
    })
}

fn precision(config: &Config, weights: &LoadedWeights) -> LoraPrecision {
    match config.adapter_dtype {
        AdapterDtype::Auto => weights.adapter_precision(),
        AdapterDtype::Exact => LoraPrecision::Exact,
        AdapterDtype::F16 => LoraPrecision::Compact,
        AdapterDtype::Bf16 => LoraPrecision::Bf16,
    }
}

/// Opens the door for workers, if there may be any.
fn with_workers(
    pass: ResidentModel,
    config: &Config,
    library: Library,
) -> anyhow::Result<(ResidentModel, Workers)> {
    if config.max_workers == 0 {
        return Ok((pass, Workers::default()));
    }
    let rows = config.chunk_tokens + config.max_running;
    let (socket, most) = (config.worker_socket(), config.max_workers);
    let (workers, assist) = Workers::start(&socket, most, rows, pass.config(), library)?;
    Ok((pass.with_assist(assist), workers))
}

/// Reads adapters against the shape of the resident model.
#[derive(Debug, Clone)]
pub struct AdapterLoader {
    config: ModelConfig,
    precision: LoraPrecision,
    library: Library,
}

impl Loader for AdapterLoader {
    type Adapter = PreparedAdapter;

    fn foreseeable_bytes(&self, path: &Path) -> u64 {
        let weights = if path.is_dir() { path.join("adapter_model.safetensors") } else { path.to_owned() };
        let stored = std::fs::metadata(weights).map_or(0, |file| file.len());
        // Of 32 bits a number 16 may be kept.
        stored.saturating_sub(limits::MAX_HEADER_BYTES) / 2
    }

    fn read(&self, path: &Path) -> anyhow::Result<Adapter> {
        Ok(Adapter::read(path, &self.config)?)
    }

    fn prepare(&self, adapter: Adapter) -> anyhow::Result<(Arc<PreparedAdapter>, u64)> {
        let encoded = EncodedAdapter::new(&adapter, &self.config, self.precision);
        drop(adapter);
        let prepared = shelve(encoded, &self.config, &self.library)?;
        let bytes = prepared.bytes() as u64;
        Ok((prepared, bytes))
    }
}
