//! Options of all commands, with the values of the presets.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use kv_cache::{CacheSettings, manager::AdapterUnit, replacement::Variant};
use scheduling::batch::BatchLimits;
use serde_json::{Value, json};

use super::CommandError;
use crate::{
    cost::CostModel,
    engine::{Design, Engine, Observation, Setup},
    report::SimulationReport,
    workload::{
        ShareAccounting, Workload,
        arrivals::ArrivalHistory,
        popularity::Popularity,
        replay,
        scenario::{Scenario, WorkloadSpec},
    },
};

/// Preset of a machine and a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// SmolLM2-135M on two cores; lengths are divided by 8.
    Cpu,
    /// A model of 7 billion weights on a GPU.
    Gpu,
}

/// Values of a preset, used where no option is given.
#[derive(Debug, Clone, Copy)]
struct Defaults {
    cost: CostModel,
    device_blocks: u32,
    rank: u32,
    length_divisor: f64,
    max_running: usize,
    chunk_tokens: usize,
}

impl Preset {
    fn defaults(self) -> Defaults {
        match self {
            Self::Cpu => Defaults {
                cost: CostModel::CPU,
                device_blocks: 600,
                rank: 8,
                length_divisor: 8.0,
                max_running: 32,
                chunk_tokens: 64,
            },
            Self::Gpu => Defaults {
                cost: CostModel::GPU,
                device_blocks: 1200,
                rank: 32,
                length_divisor: 1.0,
                max_running: 32,
                chunk_tokens: 512,
            },
        }
    }
}

/// Options of every simulation command.
#[derive(Debug, Clone, Args)]
pub struct SimulationOptions {
    /// Scenario of the workload.
    #[arg(long, value_enum, default_value = "chat")]
    pub scenario: Scenario,
    /// Azure trace (CSV) to replay instead of a scenario.
    #[arg(long, value_name = "PATH")]
    pub trace: Option<PathBuf>,
    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Mean number of requests per second.
    #[arg(long, default_value_t = 2.0, value_name = "PER_S")]
    pub rate: f64,
    /// Seconds in which requests arrive.
    #[arg(long, default_value_t = 420.0, value_name = "S")]
    pub duration: f64,
    /// Warm-up seconds whose requests are not measured.
    #[arg(long, default_value_t = 120.0, value_name = "S")]
    pub warmup: f64,
    /// Number of adapters; half have the base rank and half twice that.
    #[arg(long, default_value_t = 50)]
    pub adapters: usize,
    /// Distribution of requests over adapters: uniform, zipf:S or maf.
    #[arg(long, default_value = "zipf:0.9")]
    pub popularity: Popularity,
    /// Share of the popularity that moves every minute.
    #[arg(long, default_value_t = 0.1)]
    pub drift: f64,
    /// History before the start, where adapters are requested in bursts.
    #[arg(long, value_enum, default_value = "nothing")]
    pub before: ArrivalHistory,
    /// Number of tenants that share the adapters.
    #[arg(long, default_value_t = 1)]
    pub tenants: u16,
    /// Disables tenant shares of the device: the least valuable blocks are evicted, regardless of the tenant.
    #[arg(long)]
    pub no_shares: bool,
    /// Requests per second of an additional tenant whose tokens no other tenant has.
    #[arg(long, default_value_t = 0.0, value_name = "PER_S")]
    pub hostile: f64,
    /// When adapters and history are copied ahead of need: every 100 ms, as in the paper, or as the
    /// executor does it.
    #[arg(long, value_enum, default_value = "paper")]
    pub design: Design,
    /// Preset of a machine and a model.
    #[arg(long, value_enum, default_value = "gpu")]
    pub preset: Preset,
    /// Cost file that replaces the preset's costs.
    #[arg(long, value_name = "PATH")]
    pub cost_model: Option<PathBuf>,
    /// Blocks of the device.
    #[arg(long)]
    pub device_blocks: Option<u32>,
    /// Blocks of the host tier; by default as many as the device has.
    #[arg(long)]
    pub host_blocks: Option<u32>,
    /// Blocks of the disk tier.
    #[arg(long, default_value_t = 0)]
    pub disk_blocks: u32,
    /// Smaller of the two ranks.
    #[arg(long)]
    pub rank: Option<u32>,
    /// Divisor of all lengths.
    #[arg(long)]
    pub length_divisor: Option<f64>,
    /// Maximum number of sequences per step.
    #[arg(long)]
    pub max_running: Option<usize>,
    /// Maximum number of prompt tokens per step.
    #[arg(long)]
    pub chunk_tokens: Option<usize>,
    /// Eviction policy of the cache.
    #[arg(long, default_value = "elora")]
    pub variant: Variant,
    /// Share of the device reserved for adapters; by default as the variant defines.
    #[arg(long)]
    pub adapter_share: Option<f64>,
    /// Maximum number of blocks of all adapters; by default all that the longest request leaves.
    #[arg(long)]
    pub max_adapter_blocks: Option<u32>,
    /// Time unit of the policy's recency.
    #[arg(long, default_value_t = 10.0, value_name = "S")]
    pub tau: f64,
    /// Policy's cost of recomputing a block, in block copies; the cost model is separate.
    #[arg(long, default_value_t = CacheSettings::RECOMPUTE_COST, value_name = "COPIES")]
    pub recompute_cost: f32,
    /// Factor by which CPU-assist slows prompts with a missing adapter; used where that is faster than
    /// waiting.
    #[arg(long, value_name = "FACTOR")]
    pub cpu_assist: Option<f64>,
    /// Evicts adapters block by block; a missing block costs a request this number of block copies.
    #[arg(long, value_name = "COPIES", requires = "cpu_assist")]
    pub partial: Option<f32>,
}

impl SimulationOptions {
    /// Returns the setup of the simulated executor.
    ///
    /// # Errors
    /// If the cost file cannot be used, or a value is invalid.
    pub fn setup(&self) -> Result<Setup, CommandError> {
        self.validate()?;
        let defaults = self.preset.defaults();
        let device_blocks = self.device_blocks.unwrap_or(defaults.device_blocks);
        Ok(Setup {
            design: self.design,
            cost: self.cost_model.as_deref().map_or(Ok(defaults.cost), CostModel::read)?,
            limits: BatchLimits {
                max_running: self.max_running.unwrap_or(defaults.max_running),
                chunk_tokens: self.chunk_tokens.unwrap_or(defaults.chunk_tokens),
                scored_tokens: 1,
            },
            device_blocks,
            host_blocks: self.host_blocks.unwrap_or(device_blocks),
            disk_blocks: self.disk_blocks,
            adapter_unit: self.partial.map_or(AdapterUnit::Whole, |cost| AdapterUnit::Block { cost }),
            variant: self.variant,
            adapter_share: self.adapter_share,
            max_adapter_blocks: self.max_adapter_blocks,
            tau: Duration::from_secs_f64(self.tau),
            recompute_cost: self.recompute_cost,
            cpu_assist: self.cpu_assist,
            end: Duration::from_secs_f64(self.duration),
            keeps_series: false,
            audit_every: 0,
        })
    }

    fn validate(&self) -> Result<(), CommandError> {
        let positive = [
            ("--rate", Some(self.rate)),
            ("--duration", Some(self.duration)),
            ("--tau", Some(self.tau)),
            ("--recompute-cost", Some(f64::from(self.recompute_cost))),
            ("--length-divisor", self.length_divisor),
            ("--partial", self.partial.map(f64::from)),
            ("--adapters", Some(self.adapters as f64)),
            ("--rank", self.rank.map(f64::from)),
            ("--max-running", self.max_running.map(|count| count as f64)),
            ("--chunk-tokens", self.chunk_tokens.map(|count| count as f64)),
        ];
        let shares = [("--drift", Some(self.drift)), ("--adapter-share", self.adapter_share)];
        let at_least_0 = [
            ("--warmup", Some(self.warmup)),
            ("--hostile", Some(self.hostile)),
            // CPU-assist cannot be faster than the device, so the factor is at least 1.
            ("--cpu-assist", self.cpu_assist.map(|factor| factor - 1.0)),
        ];
        let is_bad = |(name, value): (&'static str, Option<f64>), is_good: fn(f64) -> bool| {
            value.filter(|&value| !value.is_finite() || !is_good(value)).map(|_| name)
        };
        let bad = positive.into_iter().find_map(|option| is_bad(option, |value| value > 0.0));
        let bad = bad.or_else(|| {
            shares.into_iter().find_map(|option| is_bad(option, |value| (0.0..=1.0).contains(&value)))
        });
        let bad =
            bad.or_else(|| at_least_0.into_iter().find_map(|option| is_bad(option, |value| value >= 0.0)));
        bad.map_or(Ok(()), |name| Err(CommandError::Option(name)))
    }

    /// Returns the workload of these options.
    ///
    /// # Errors
    /// If the trace cannot be read.
    pub fn workload(&self) -> Result<Workload, CommandError> {
        let defaults = self.preset.defaults();
        let recipe = WorkloadSpec {
            scenario: self.scenario,
            adapters: self.adapters,
            popularity: self.popularity,
            drift: self.drift,
            rank: self.rank.unwrap_or(defaults.rank),
            tenants: self.tenants,
            shares: if self.no_shares { ShareAccounting::None } else { ShareAccounting::ByTenant },
            hostile_per_s: self.hostile,
            per_s: self.rate,
            length_divisor: self.length_divisor.unwrap_or(defaults.length_divisor),
            before: self.before,
            end: Duration::from_secs_f64(self.duration),
        };
        match &self.trace {
            Some(path) => Ok(replay::replay(path, &recipe, self.seed)?),
            None => Ok(recipe.make(self.seed)),
        }
    }

    /// Runs the simulation.
    ///
    /// # Errors
    /// If the setup is invalid, or the simulation makes no progress.
    pub fn observe(&self, keeps_series: bool) -> Result<Observation, CommandError> {
        let (setup, workload) = (self.setup()?, self.workload()?);
        Ok(Engine::new(Setup { keeps_series, ..setup }, &workload)?.run()?)
    }

    /// Runs the simulation and returns its report.
    ///
    /// # Errors
    /// The errors of [`observe`](Self::observe).
    pub fn report(&self) -> Result<SimulationReport, CommandError> {
        Ok(self.report_of(&self.observe(false)?, self.setup()?.cost.block_tokens))
    }

    /// Returns the report of a run, without its warm-up.
    #[must_use]
    pub fn report_of(&self, observation: &Observation, block_tokens: usize) -> SimulationReport {
        SimulationReport::of(observation, Duration::from_secs_f64(self.warmup), block_tokens)
    }

    pub(super) fn title(&self) -> String {
        let what = match &self.trace {
            Some(path) => {
                path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
            }
            None => format!("{:?}", self.scenario).to_lowercase(),
        };
        format!("{what}, {} adapters ({})", self.adapters, self.popularity)
    }

    /// Returns all parameters of a run with the preset's values, and the ratios that carry over to other
    /// machines.
    ///
    /// # Errors
    /// The errors of [`setup`](Self::setup).
    pub fn header(&self) -> Result<Value, CommandError> {
        let (setup, defaults) = (self.setup()?, self.preset.defaults());
        let cost = setup.cost;
        let (block_s, block_prefill_s) =
            (cost.over_link(cost.block_bytes).as_secs_f64(), cost.prefill_token_s * cost.block_tokens as f64);
        let rank = self.rank.unwrap_or(defaults.rank);
        Ok(json!({
            "scenario": self.scenario,
            "trace": self.trace.as_ref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy()),
            "seed": self.seed,
            "design": self.design,
            "variant": self.variant.name(),
            "rate_per_s": self.rate,
            "duration_s": self.duration,
            "warmup_s": self.warmup,
            "adapters": self.adapters,
            "ranks": [rank, 2 * rank],
            "adapter_blocks": [cost.adapter_blocks(rank), cost.adapter_blocks(2 * rank)],
            "popularity": self.popularity.to_string(),
            "drift": self.drift,
            "before": self.before,
            "tenants": self.tenants,
            "tenants_have_shares": !self.no_shares,
            "hostile_per_s": self.hostile,
            "length_divisor": self.length_divisor.unwrap_or(defaults.length_divisor),
            "shape": self.scenario.shape(),
            "cost": cost,
            "block_copy_over_block_prefill": block_s / block_prefill_s,
            "block_copy_over_decode_step": block_s / cost.step_s,
            "device_blocks": setup.device_blocks,
            "host_blocks": setup.host_blocks,
            "disk_blocks": setup.disk_blocks,
            "max_running": setup.limits.max_running,
            "chunk_tokens": setup.limits.chunk_tokens,
            "adapter_share": self.adapter_share,
            "max_adapter_blocks": self.max_adapter_blocks,
            "tau_s": self.tau,
            "recompute_cost": self.recompute_cost,
            "cpu_assist": self.cpu_assist,
            "partial": self.partial,
        }))
    }
}
