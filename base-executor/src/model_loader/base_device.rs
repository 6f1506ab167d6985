//! The steps of opening a base, with the parts that depend on the device.

use std::sync::Arc;

use anyhow::Context as _;
use kv_cache::{copy::BytesPerSecond, ledger::MemoryAccount};
use model::{
    deltas::{device_copy::DeviceMemory, prepared::PreparedAdapter},
    forward::ForwardPass,
    linear_sites::EvaluateSites,
    precision::{BaseNumerics, Precision},
    resident::SharedBase,
    shape::config::ModelConfig,
};
use shmproto::message::{ColdStart, DeviceFacts};

use super::{
    AdapterLoader, OpenedModel,
    base::{LoadedBase, PendingBase},
    drafting::{self, Drafting},
    numbers,
};
use crate::{
    adapter_images::ImageRegistry,
    budget::{self, MemoryBudget},
    cold_start_model::ColdStartModel,
    config::ExecutorConfig,
    device::{AdapterDeviceTier, ArrivalNotifier, DeviceSettings, FreeBytes},
    progress::LoadingProgress,
    workers::Workers,
};

/// Advice to the operator for a base that exceeds memory.
const SMALLER_BASE: &str = "use a smaller base or one with fewer bits per weight, or stream weights from \
                            the disk (--resident-weight-bytes)";

/// The device-dependent steps of opening a base.
pub(super) trait BaseDevice {
    type Weights;
    type Pass: ForwardPass<Adapter = PreparedAdapter> + EvaluateSites + Send + 'static;

    /// Whether a whole pass is planned at once, so ranks that arrive meanwhile serve only the next one.
    const PLANS_WHOLE_PASSES: bool;

    /// Whether a pass computes the deltas of experts.
    const ADAPTS_EXPERTS: bool;

    /// Returns the estimated host memory of the weights of `base`, in bytes.
    fn needs(&self, base: &PendingBase) -> u64;

    fn load(&self, base: &PendingBase, progress: &LoadingProgress) -> anyhow::Result<Self::Weights>;

    /// Returns the weights' shape and rounding.
    fn shape(weights: &Self::Weights) -> (ModelConfig, BaseNumerics);

    /// Returns the precision of the layers on a CPU.
    fn precision(weights: &Self::Weights) -> Option<Precision>;

    /// Returns the base weights in host memory, for drafting; `None` if there are none.
    fn shared(weights: &Self::Weights) -> Option<SharedBase>;

    fn log_loaded(&self, base: &LoadedBase, weights: &Self::Weights);

    /// Returns the host memory of the weights and of the block pool, in bytes.
    fn host_bytes(&self, weights: &Self::Weights, config: &ExecutorConfig) -> [u64; 2];

    /// Creates the pass, with memory for the KV cache.
    fn pass(
        &self,
        weights: Self::Weights,
        config: &ExecutorConfig,
        cores: &[usize],
    ) -> anyhow::Result<Self::Pass>;

    fn kv_blocks(pass: &Self::Pass) -> usize;

    fn facts(&self) -> DeviceFacts;

    /// Sets up the workers that compute leading ranks, and charges their memory to `memory`.
    fn with_workers(
        pass: Self::Pass,
        config: &ExecutorConfig,
        cores: &[usize],
        library: ImageRegistry,
        memory: &MemoryAccount,
    ) -> anyhow::Result<(Self::Pass, Workers)>;

    /// Returns the memory for adapter copies, and a function for its free bytes.
    fn memory(self, pass: &Self::Pass) -> (Arc<dyn DeviceMemory>, FreeBytes);
}

/// Opens `base` on a device and reports to `progress`.
///
/// # Errors
/// If the base cannot be served.
pub(super) fn open<O: BaseDevice>(
    device: O,
    base: PendingBase,
    config: &ExecutorConfig,
    progress: &LoadingProgress,
    arrivals: ArrivalNotifier,
) -> anyhow::Result<OpenedModel<O::Pass, AdapterLoader>> {
    let budget = MemoryBudget::of_this_machine(config.process_memory, config.adapter_bytes.0);
    // A base beyond the budget would get this process killed while it loads.
    budget::expect(&budget.weights, device.needs(&base), SMALLER_BASE)?;
    progress.stage(base.stage);
    failpoint::pass("executor.before_weights");
    let weights = device.load(&base, progress)?;
    failpoint::pass("executor.after_weights");
    let mut base = base.close()?;
    let (shape, numerics) = O::shape(&weights);
    let numbers = numbers(config, O::precision(&weights), numerics);
    let layer_plan = base.layer_plan(config, &shape, numerics);
    device.log_loaded(&base, &weights);
    let [weight_bytes, pool_bytes] = device.host_bytes(&weights, config);
    let weights_account = budget.bounded_weights(config.weights.bytes);
    budget::reserve(&weights_account, weight_bytes, SMALLER_BASE)?;
    budget::reserve(
        &budget.blocks,
        pool_bytes,
        "lower --device-bytes (or --kv-bytes and --device-adapter-bytes)",
    )?;
    let library = ImageRegistry::new().context("no file descriptor is left for adapter images")?;
    let shared = O::shared(&weights);
    let drafting = shared.clone();
    let drafting = drafting.and_then(|shared| Drafting::new(config, shared, &base.cores, &budget.drafts));
    let loader = AdapterLoader::new(config, &shape, numerics, &library, (drafting, shared));
    let loader = AdapterLoader { adapts_experts: O::ADAPTS_EXPERTS, ..loader };
    let draft_model =
        drafting::model_of(config, (&base.path, shape.vocab_size), &base.cores, &budget.drafts)?;
    progress.stage("allocating the KV cache");
    let mut pass = device.pass(weights, config, &base.cores)?;
    let kv_blocks = some_blocks(O::kv_blocks(&pass))?;
    let info = base.model_info(device.facts(), numbers, &shape, kv_blocks);
    let settings = device_settings(config, pass.block_bytes());
    let whole_pass = O::PLANS_WHOLE_PASSES.then_some(config.chunk_tokens);
    let costs = costs(&settings, &mut pass, &shape, (&base.cores, kv_blocks, whole_pass), progress)?;
    let (pass, workers) = O::with_workers(pass, config, &base.cores, library, &budget.workers)?;
    let (memory, free) = device.memory(&pass);
    let tier = AdapterDeviceTier::new(settings, memory, arrivals, workers, costs);
    let tier = tier.context("cannot start the thread that copies adapters")?;
    let placement = Box::new(tier.with_free_bytes(free));
    let layers = layer_plan.map(|plan| plan.open(&pass, budget.clients.clone())).transpose()?;
    Ok(OpenedModel { pass, loader, placement, layers, budget, draft_model, info })
}

fn device_settings(config: &ExecutorConfig, block_bytes: usize) -> DeviceSettings {
    let link = config.link_bytes_per_s().map(BytesPerSecond);
    if let Some(link) = link {
        tracing::warn!(
            bytes_per_s = link.get(),
            "the bandwidth of the link to the device is emulated; use this for experiments only"
        );
    }
    DeviceSettings { block_bytes: block_bytes as u64, cold_start: config.cold_start(), link }
}

/// Times the pass, if the cold start mode depends on costs.
fn costs<P: ForwardPass>(
    settings: &DeviceSettings,
    pass: &mut P,
    shape: &ModelConfig,
    (cores, kv_blocks, whole_pass): (&[usize], u32, Option<usize>),
    progress: &LoadingProgress,
) -> anyhow::Result<Option<ColdStartModel>> {
    match settings.cold_start {
        ColdStart::CpuAssist => {
            progress.stage("measuring the costs of cold starts");
            Ok(Some(ColdStartModel::measure(pass, shape, cores, kv_blocks, settings.link, whole_pass)?))
        }
        ColdStart::OnDemand | ColdStart::Cached => Ok(None),
    }
}

/// Checks that the pool has at least one block.
fn some_blocks(kv_blocks: usize) -> anyhow::Result<u32> {
    anyhow::ensure!(
        kv_blocks > 0,
        "--device-bytes (or --kv-bytes, if set) is smaller than one KV block; raise it"
    );
    Ok(u32::try_from(kv_blocks).unwrap_or(u32::MAX))
}
