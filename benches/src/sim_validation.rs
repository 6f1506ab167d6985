//! Validation of the simulator: a cost model fitted to a deployment, and the same requests through both.
//!
//! - [`probe`]: step times of a deployment. [`costs`]: copy times, and the fit.
//! - [`workloads`]: the requests. [`dialogue`]: the clients.
//! - [`deployment`]: the server.

pub(crate) mod costs;
pub(crate) mod deployment;
mod dialogue;
pub(crate) mod probe;
mod workloads;

use std::time::Duration;

use anyhow::{Context, Result};
use kv_cache::CacheSettings;
use scheduling::batch::BatchLimits;
use simulator::{
    cost::CostModel,
    engine::{Design, Engine, Setup},
    report::SimulationReport,
    workload::Workload,
};

use self::{
    deployment::{Blocks, Deployment},
    dialogue::DialogueTiming,
    workloads::WorkloadCase,
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

/// Token of every answer: a word, so that the client sees each token as soon as it is generated.
pub(crate) const SAID: u32 = 2000;

const SEED: u64 = 1;

/// Maximum relative error of times, and maximum error of hit rates.
const NEAR: f64 = 0.15;
const NEAR_HITS: f64 = 0.05;

pub(crate) const LIMITS: BatchLimits =
    BatchLimits { max_running: 64, chunk_tokens: probe::CHUNK_TOKENS, scored_tokens: 64 };
const TAU: Duration = Duration::from_secs(10);

/// Fits a cost model.
///
/// # Errors
/// If a deployment cannot be measured.
pub(crate) fn fit(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    costs::run(config, cores, &config.costs)
}

/// Runs every workload for real and in simulation.
///
/// # Errors
/// If there is no cost model yet, or a workload fails.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let cost = CostModel::read(&config.costs).context("`costs` makes one, with the same --costs")?;
    let mut comparisons = Vec::new();
    for case in workloads::cases() {
        comparisons.extend(compare(config, cores, (&case, cost))?);
    }
    Ok(comparisons)
}

/// Milliseconds to the first token and between tokens, and cached share of the prompts.
type ValidationSample = [f64; 3];

fn compare(
    config: &SuiteConfig,
    cores: &Cores,
    (case, cost): (&WorkloadCase, CostModel),
) -> Result<Vec<Comparison>> {
    let workload = case.recipe.make(SEED);
    let mut real = Vec::new();
    let mut blocks = None;
    for _ in 0..config.runs {
        let deployment = Deployment::start(config, cores, workload.adapters.len(), case.memory)?;
        real.push(samples(&dialogue::run_dialogues(&deployment.server, &workload, case.recipe.end)?)?);
        blocks = Some(deployment.blocks);
    }
    let blocks = blocks.context("nothing was run")?;
    let simulated = simulate(&workload, case.recipe.end, (cost, blocks))?;
    let lines = [
        ("mean time to first token", "ms", Better::Lower, BenchTarget::Near(NEAR)),
        ("mean time per token", "ms", Better::Lower, BenchTarget::Near(NEAR)),
        ("prompt tokens found", "share", Better::Higher, BenchTarget::NearPoints(NEAR_HITS)),
    ];
    lines
        .into_iter()
        .enumerate()
        .map(|(index, (what, unit, better, target))| {
            Ok(Comparison {
                bench: "reality",
                case: format!("{}: {what}", case.name),
                unit,
                better,
                ours: Samples::of(&real, |samples| samples[index])?,
                rival: PeerSamples {
                    name: "holobiont-simulator".to_owned(),
                    format: "Q4_1".to_owned(),
                    samples: Samples::new(vec![simulated[index]])?,
                },
                target: Some(target),
            })
        })
        .collect()
}

fn samples(heard: &[DialogueTiming]) -> Result<ValidationSample> {
    let mean = |values: Vec<f64>| Samples::new(values).map(|samples| samples.mean());
    let sum = |of: fn(&DialogueTiming) -> usize| heard.iter().map(of).sum::<usize>() as f64;
    Ok([
        mean(heard.iter().map(|heard| heard.ttft_s * 1e3).collect())?,
        mean(heard.iter().filter_map(|heard| Some(heard.tpot_s? * 1e3)).collect())?,
        sum(|heard| heard.cached) / sum(|heard| heard.prompt),
    ])
}

fn simulate(
    workload: &Workload,
    end: Duration,
    (cost, blocks): (CostModel, Blocks),
) -> Result<ValidationSample> {
    let setup = Setup {
        design: Design::Executor,
        cost,
        limits: LIMITS,
        device_blocks: blocks.device,
        host_blocks: blocks.host,
        disk_blocks: blocks.disk,
        adapter_unit: Default::default(),
        variant: Default::default(),
        adapter_share: None,
        max_adapter_blocks: Some(blocks.adapters),
        tau: TAU,
        recompute_cost: CacheSettings::RECOMPUTE_COST,
        // Workers compute the missing ranks at the executor's speed.
        cpu_assist: Some(1.0),
        end,
        keeps_series: false,
        audit_every: 0,
    };
    let report =
        SimulationReport::of(&Engine::new(setup, workload)?.run()?, Duration::ZERO, cost.block_tokens);
    Ok([report.ttft_ms.mean, report.tpot_ms.mean, report.device_hits + report.lower_hits])
}
