//! What is simulated, and whether it can be.

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
    /// A swapper has its turn every 100 ms (E-07).
    #[default]
    Paper,
    /// As the executor is: blocks are copied out beside each step, and all else comes while there is nothing to do.
    Executor,
}

/// An executor to be simulated.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// How it is made.
    pub design: Design,
    /// What everything takes.
    pub cost: CostModel,
    /// What a step is held to.
    pub limits: BatchLimits,
    /// Blocks of the device.
    pub device_blocks: u32,
    /// Blocks of the host tier.
    pub host_blocks: u32,
    /// Blocks of the disk.
    pub disk_blocks: u32,
    /// How adapters give up their places.
    pub adapter_unit: AdapterUnit,
    /// Who leaves first.
    pub variant: Variant,
    /// The share of the device that adapters have to themselves; else it is as the variant says.
    pub adapter_share: Option<f64>,
    /// Blocks of all adapters, at most; else all that one request leaves.
    pub max_adapter_blocks: Option<u32>,
    /// The cost model's unit of time.
    pub tau: Duration,
    /// What computing a block is taken to be, in copies of a block.
    pub recompute_cost: f32,
    /// Prompts of a request whose adapter is not there are computed at once where that is faster than waiting for it, and take
    /// so many times as long, or less where part of it is there; else it waits.
    pub cpu_assist: Option<f64>,
    /// Requests that arrive later are not made.
    pub end: Duration,
    /// Keeps what the cache looked like every 100 ms.
    pub keeps_series: bool,
    /// Looks at the whole cache after every so many turns; 0 is never.
    pub audit_every: u64,
}

/// A simulation that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A request would never fit.
    #[error(
        "a request of {blocks} blocks beside an adapter of {adapter} never fits into {device} blocks; give the device more"
    )]
    TooLarge {
        /// Blocks of the longest request.
        blocks: u32,
        /// Of the largest adapter.
        adapter: u32,
        /// What there is for them.
        device: u32,
    },
    /// Nobody goes on any more.
    #[error("after {0:?} nobody goes on; this is a fault of the simulator or of the cache")]
    Stuck(Duration),
    /// The cache is broken.
    #[error(transparent)]
    Broken(#[from] kv_cache::manager::InvariantViolation),
}

/// What the cache is held to, if everything asked of it can fit.
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
    // However many adapters are pinned, one request can run beside them.
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
