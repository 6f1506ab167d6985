//! Parameters of a simulation, and their validation.

use std::time::Duration;

use clap::ValueEnum;
use kv_cache::{CacheSettings, manager::AdapterUnit, replacement::Variant};
use scheduling::batch::BatchLimits;
use serde::Serialize;

use crate::{cost::CostModel, workload::Workload};

/// When adapters and history are copied ahead of need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Design {
    /// A swapper runs every 100 ms (E-07).
    #[default]
    Paper,
    /// Blocks are copied out beside each step, and back while the executor is idle, as in the real executor.
    Executor,
}

/// Parameters of a simulated executor.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Design of the copies ahead of need.
    pub design: Design,
    /// Costs of steps and copies.
    pub cost: CostModel,
    /// Bounds of each step.
    pub limits: BatchLimits,
    /// Number of blocks of the device.
    pub device_blocks: u32,
    /// Number of blocks of the host tier.
    pub host_blocks: u32,
    /// Number of blocks of the disk tier.
    pub disk_blocks: u32,
    /// Unit in which adapters are evicted.
    pub adapter_unit: AdapterUnit,
    /// Variant of the eviction policy.
    pub variant: Variant,
    /// Share of the device reserved for adapters; `None` as the variant defines.
    pub adapter_share: Option<f64>,
    /// Maximum number of blocks of all adapters; `None` for all that the longest request leaves.
    pub max_adapter_blocks: Option<u32>,
    /// Time unit of the policy's recency.
    pub tau: Duration,
    /// Policy's cost of recomputing a block, in block copies.
    pub recompute_cost: f32,
    /// Factor by which a prompt with a missing adapter computes slower at once, less if part of the adapter
    /// is present. The request waits instead if that is faster; `None` always waits.
    pub cpu_assist: Option<f64>,
    /// Time after which no request arrives.
    pub end: Duration,
    /// Whether to keep the cache's state every 100 ms.
    pub keeps_series: bool,
    /// Number of turns between checks of the whole cache; 0 for none.
    pub audit_every: u64,
}

/// Why a simulation cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A request or adapter can never fit on the device.
    #[error(
        "a request of {blocks} blocks and an adapter of {adapter} blocks do not fit into {device} \
         blocks; raise the device's blocks"
    )]
    TooLarge {
        /// Number of blocks of the longest request.
        blocks: u32,
        /// Number of blocks of the largest adapter.
        adapter: u32,
        /// Number of available blocks of the device.
        device: u32,
    },
    /// No sequence makes progress any more.
    #[error("after {0:?} no request makes progress, which is a fault of the simulator or of the cache")]
    Stuck(Duration),
    /// The cache breaks an invariant.
    #[error(transparent)]
    Broken(#[from] kv_cache::manager::InvariantViolation),
}

/// Returns the cache's settings, if all requests and adapters can fit.
pub(super) fn settings(setup: &Setup, workload: &Workload) -> Result<CacheSettings, SimulationError> {
    let tokens = setup.cost.block_tokens;
    let longest = u32::try_from(workload.longest().div_ceil(tokens) + 1).unwrap_or(u32::MAX);
    let adapter = setup.cost.adapter_blocks(workload.largest_rank());
    let device = setup.device_blocks;
    let alone = CacheSettings {
        host: setup.host_blocks,
        disk: setup.disk_blocks,
        adapter_unit: setup.adapter_unit,
        variant: setup.variant,
        tau: setup.tau,
        recompute_cost: setup.recompute_cost,
        ..CacheSettings::device_alone(device, tokens)
    };
    // One request can always run beside the pinned adapters.
    let beside = device.saturating_sub(longest).min(setup.max_adapter_blocks.unwrap_or(device));
    let share = setup.adapter_share.map(|share| (f64::from(device) * share) as u32);
    let settings = CacheSettings {
        max_adapter_blocks: share.unwrap_or(beside),
        max_kv_blocks: share.map_or(device, |share| device - share),
        ..alone
    };
    let settings = settings.divided();
    if settings.max_kv_blocks < longest || settings.max_adapter_blocks < adapter {
        return Err(SimulationError::TooLarge { blocks: longest, adapter, device });
    }
    Ok(settings)
}
