//! C-22: once every adapter is on the device, a decode step takes equally long in all modes.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime::Builder;

use super::{
    ColdExecutor, ExecutorPlacement, Mode, adapters, arrivals::RequestArrival, executor::ServedTiming,
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const RANK: usize = 64;
const STREAMS: usize = 8;
const PROMPT: usize = 16;
const ANSWER: usize = 96;
/// Minimum number of rounds: the differences under test are a few hundredths.
const ROUNDS: usize = 12;
/// Adapters arrive on this link during the first of two answers.
const LINK_GBPS: f64 = 4.0;
const MOST: f64 = 1.05;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let runtime = Builder::new_current_thread().enable_all().build().context("no runtime")?;
    runtime.block_on(measure(config, cores))
}

async fn measure(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for adapters")?;
    let folders = adapters::write(&config.model, RANK, STREAMS, folder.path())?;
    let place = ExecutorPlacement { link_gbps: LINK_GBPS, ..ExecutorPlacement::on(config, cores)? };
    let mut executors = Vec::new();
    for mode in Mode::EACH {
        let mut executor = ColdExecutor::start(place, mode).await?;
        executor.load(&folders).await?;
        executor.serve(&streams(u64::MAX >> 32)).await?;
        executor.wait_for_copies().await?;
        executors.push(executor);
    }
    let mut steps: [Vec<f64>; 3] = Default::default();
    for round in 0..config.runs.max(ROUNDS) {
        for turn in 0..executors.len() {
            let who = (turn + round) % executors.len();
            let served = executors[who].serve(&streams(round as u64)).await?;
            steps[who].push(step_ms(&served)?);
        }
    }
    let [cached, on_demand, assist] = steps.map(Samples::new);
    let (cached, on_demand, assist) = (cached?, on_demand?, assist?);
    Ok(vec![beside(Mode::CpuAssist, assist, &cached), beside(Mode::OnDemand, on_demand, &cached)])
}

fn beside(mode: Mode, ours: Samples, cached: &Samples) -> Comparison {
    let rival = PeerSamples {
        name: "holobiont, cached".to_owned(),
        format: "Q4_1".to_owned(),
        samples: cached.clone(),
    };
    Comparison {
        bench: "decode-modes",
        case: format!("a step of {STREAMS} streams on adapters of rank {RANK}, all arrived, {}", mode.name()),
        unit: "ms",
        better: Better::Lower,
        ours,
        rival,
        target: Some(BenchTarget::ShareAtMost(MOST)),
    }
}

fn streams(round: u64) -> Vec<RequestArrival> {
    (0..STREAMS)
        .map(|stream| RequestArrival {
            at: Duration::ZERO,
            adapter: Some(stream),
            prompt: PROMPT,
            answer: ANSWER,
            seed: (round << 8) + stream as u64,
        })
        .collect()
}

fn step_ms(served: &[ServedTiming]) -> Result<f64> {
    let gaps = served
        .iter()
        .flat_map(|served| served.steps.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1000.0));
    Ok(Samples::new(gaps.collect())?.median())
}
