//! The base on the host's cores.

use std::{
    fs,
    sync::{Arc, OnceLock},
};

use anyhow::Context as _;
use kv_cache::ledger::MemoryAccount;
use model::{
    deltas::device_copy::DeviceMemory,
    precision::{BaseNumerics, Precision},
    resident::{LoadedWeights, ResidentModel, ResidentOptions, SharedBase},
    shape::config::ModelConfig,
    weights::{
        LoadProgress,
        device_group::ShardWeights,
        packed_bytes,
        served::ServedLayers,
        streamed::{StreamError, StreamOptions},
    },
};
use shmproto::message::{DeviceFacts, DeviceKind};

use super::{
    AdapterLoader, OpenedModel,
    base::{LoadedBase, PendingBase},
    base_device::{self, BaseDevice},
    kv_dtype,
    precision_choice::PrecisionChoice,
};
use crate::{
    adapter_images::ImageRegistry,
    budget::{MemoryBudget, bound_bytes, free_bytes},
    config::ExecutorConfig,
    device::{ArrivalNotifier, FreeBytes},
    device_group::{
        self,
        leader::{GroupOptions, GroupStart, Members},
    },
    device_memory_split::DeviceBytes,
    progress::LoadingProgress,
    streaming,
    workers::{WorkerListener, Workers},
};

/// Opens the model of `config` and reports to `progress`.
///
/// # Errors
/// If the model cannot be served.
pub(crate) fn open(
    config: &ExecutorConfig,
    progress: &LoadingProgress,
    arrivals: ArrivalNotifier,
) -> anyhow::Result<OpenedModel<Pass, AdapterLoader>> {
    let streamed = streaming::options(config)?;
    let (group, precision) = (group_options(config), PrecisionChoice::of(config));
    let host = HostDevice { streamed, group, members: OnceLock::new(), precision };
    base_device::open(host, PendingBase::open(config)?, config, progress, arrivals)
}

/// Forward pass over weights in memory, or streamed from disk.
pub(crate) type Pass = ResidentModel<ServedLayers>;

struct HostDevice {
    /// Streaming options, if the base is streamed.
    streamed: Option<StreamOptions>,
    /// The devices that hold the base together, if there are several.
    group: Option<GroupOptions>,
    /// Processes of the other devices, once they serve.
    members: OnceLock<Members>,
    precision: PrecisionChoice,
}

/// Returns the options of a device group, if there is more than one device.
fn group_options(config: &ExecutorConfig) -> Option<GroupOptions> {
    let limit_bytes = MemoryBudget::of_this_machine(config.process_memory, 0).stats().limit_bytes;
    let rows = config.chunk_tokens + config.max_running;
    GroupOptions::of(&config.group, rows, limit_bytes, config.random_weights)
}

impl HostDevice {
    /// Loads the weights, and starts the other processes of a device group.
    fn load_weights(
        &self,
        base: &PendingBase,
        told: &(dyn Fn(LoadProgress) + Sync),
    ) -> anyhow::Result<(LoadedWeights<ServedLayers>, Option<GroupStart>)> {
        if let Some(options) = &self.group {
            let (weights, group) = device_group::leader::load(&base.path, &*base.source, options, told)?;
            return Ok((weights, Some(group)));
        }
        let streamed = self.streamed.as_ref().map(|options| (base.identity(), options));
        let streamed = streamed.as_ref().map(|(identity, options)| (identity, *options));
        let weights = LoadedWeights::open(&*base.source, streamed, base.cores.len(), told);
        let weights = weights.map_err(|error| match error {
            // Errors of the model's files are not caused by the streaming setting.
            StreamError::Weights(error) => error.into(),
            other => anyhow::Error::new(other).context(streaming::REMEDY),
        })?;
        Ok((weights, None))
    }
}

impl BaseDevice for HostDevice {
    type Weights = LoadedWeights<ServedLayers>;
    type Pass = Pass;

    const PLANS_WHOLE_PASSES: bool = false;
    const ADAPTS_EXPERTS: bool = true;

    /// Returns 0 for a streamed base, which keeps to its own limit, and the leader's part for a device group.
    fn needs(&self, base: &PendingBase) -> u64 {
        match &self.group {
            _ if self.streamed.is_some() => 0,
            None => packed_bytes(&*base.source),
            // A missing tensor is reported when the weights are read.
            Some(options) => ShardWeights::planned_bytes(&*base.source, options.plan(), 0).unwrap_or(0),
        }
    }

    fn load(
        &self,
        base: &PendingBase,
        progress: &LoadingProgress,
    ) -> anyhow::Result<LoadedWeights<ServedLayers>> {
        let told = |at: LoadProgress| progress.done(at.done, at.total);
        let (weights, group) = self.load_weights(base, &told)?;
        let precision = self.precision.resolve(|| base.identity(), || weights.suitable_precision())?;
        if let Some(group) = group {
            let _ = self.members.set(group.serve(precision)?);
        }
        Ok(weights.with_precision(precision))
    }

    fn shape(weights: &LoadedWeights<ServedLayers>) -> (ModelConfig, BaseNumerics) {
        (weights.config().clone(), weights.numerics())
    }

    fn precision(weights: &LoadedWeights<ServedLayers>) -> Option<Precision> {
        Some(weights.precision())
    }

    fn shared(weights: &LoadedWeights<ServedLayers>) -> Option<SharedBase> {
        Some(weights.shared())
    }

    fn log_loaded(&self, base: &LoadedBase, weights: &LoadedWeights<ServedLayers>) {
        tracing::info!(
            model = %base.path.display(),
            architecture = weights.config().architecture,
            weight_bytes = weights.bytes(),
            sweep_bytes = weights.sweep_bytes(),
            devices = self.group.as_ref().map_or(1, |group| group.devices.devices().len()),
            group_weight_bytes = ?self.members.get().map(|members| &members.weight_bytes),
            threads = base.cores.len(),
            isa = ?kernels::Isa::best(),
            precision = ?weights.precision(),
            "weights loaded"
        );
    }

    fn host_bytes(&self, weights: &LoadedWeights<ServedLayers>, config: &ExecutorConfig) -> [u64; 2] {
        let group = self.members.get().map_or(0, |members| {
            // A set limit is one for each process; the machine's memory holds them all.
            let others = members.weight_bytes.iter().skip(1).sum();
            let others = if config.process_memory.is_none() { others } else { 0 };
            members.shared_bytes + others
        });
        [weights.bytes() as u64 + group, DeviceBytes::of(config).on_a_cpu()]
    }

    fn pass(
        &self,
        weights: LoadedWeights<ServedLayers>,
        config: &ExecutorConfig,
        cores: &[usize],
    ) -> anyhow::Result<Pass> {
        let options = ResidentOptions {
            cores: cores.to_vec(),
            kv_bytes: usize::try_from(DeviceBytes::of(config).on_a_cpu())
                .context("--device-bytes is more than this machine can address")?,
            kv_dtype: kv_dtype(config.kv_dtype),
        };
        let others = config.group.other_cores();
        let mut model = ResidentModel::new(weights, &options)?.with_borrowed_cores(cores, &others)?;
        if config.offers_exact() {
            model.commit();
        }
        Ok(model)
    }

    fn kv_blocks(pass: &Pass) -> usize {
        pass.kv_blocks()
    }

    fn facts(&self) -> DeviceFacts {
        let group_weight_bytes = self.members.get().map(|members| members.weight_bytes.clone());
        DeviceFacts { group_weight_bytes: group_weight_bytes.unwrap_or_default(), ..facts() }
    }

    /// Opens the worker socket, if workers are allowed.
    fn with_workers(
        pass: Pass,
        config: &ExecutorConfig,
        _: &[usize],
        library: ImageRegistry,
        memory: &MemoryAccount,
    ) -> anyhow::Result<(Pass, Workers)> {
        if config.max_workers == 0 {
            return Ok((pass, Workers::default()));
        }
        let rows = config.chunk_tokens + config.max_running;
        let socket = config.worker_socket();
        let door = WorkerListener { socket: &socket, most: config.max_workers, memory };
        let (workers, assist) = Workers::start(door, rows, pass.config(), library)?;
        Ok((pass.with_assist(assist), workers))
    }

    fn memory(self, pass: &Pass) -> (Arc<dyn DeviceMemory>, FreeBytes) {
        (Arc::new(pass.adapter_memory()), FreeBytes::new(free_bytes))
    }
}

/// Returns the system's processor name and memory.
pub(crate) fn facts() -> DeviceFacts {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    DeviceFacts {
        kind: DeviceKind::Cpu,
        name: name.map_or("", |(_, name)| name.trim()).to_owned(),
        memory_bytes: bound_bytes(),
        group_weight_bytes: Vec::new(),
    }
}
