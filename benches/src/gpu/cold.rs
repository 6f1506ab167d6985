//! C-20 over the real link: requests on adapters that are not on the device, in the three modes of a cold
//! start.
//!
//! The device holds half of the adapters, and requests use them in turn, so that each next one was evicted.
//! First lone requests, where only the link's and the workers' time can be hidden; then arrivals at half of
//! the capacity.

use anyhow::{Context, Result};

use super::{
    executors::{GpuTestbed, file_bytes, first_token_ms, runtime},
    lab::{GpuBenchContext, GpuMeasurement, own},
};
use crate::{
    cold::{ColdCompute, ColdExecutor, ColdLoad, ExecutorPlacement, Mode, Popularity, ServedTiming},
    measure::Samples,
    report::{BenchTarget, Better},
};

const BENCH: &str = "cuda-cold";
const ADAPTERS: usize = 12;
/// Divisor of the shortest prompt length for a lone prompt, which then takes a few milliseconds on a GPU.
const PROMPT_SHARE: usize = 4;
const LOAD: f64 = 0.5;
/// Rounds of arrivals; each takes seconds.
const MAX_ROUNDS: usize = 3;
/// Maximum ratio of cpu-assist's first token to cached's: of a lone request, layer by layer, and under load
/// (C-20).
const MAX_LONE_SHARE: f64 = 1.05;
const MAX_LOADED_SHARE: f64 = 1.22;

/// Prints every row of this benchmark.
///
/// # Errors
/// If an executor does not start or does not answer.
pub(super) fn run(lab: &GpuBenchContext) -> Result<()> {
    runtime()?.block_on(measure(lab))
}

async fn measure(lab: &GpuBenchContext) -> Result<()> {
    let ground = GpuTestbed::new(lab, lab.sizes.cold_rank, ADAPTERS)?;
    let options = ground.options(&[]);
    let bytes = file_bytes(&ground.adapters[0])?;
    let place = ExecutorPlacement {
        host_bytes: (bytes * ADAPTERS as u64 * 3 / 2).max(64 << 20),
        device_bytes: bytes * ADAPTERS as u64 / 2,
        ..ground.place(&options)
    };
    let alone = ExecutorPlacement { helper: ColdCompute::Nobody, ..place };
    let (cached, on_demand, assist) = tokio::join!(
        started(alone, Mode::Cached, &ground),
        started(alone, Mode::OnDemand, &ground),
        started(place, Mode::CpuAssist, &ground)
    );
    let mut executors = [cached?, on_demand?, assist?];
    lone(lab, &mut executors).await?;
    loaded(lab, &mut executors).await
}

async fn started(place: ExecutorPlacement<'_>, mode: Mode, ground: &GpuTestbed<'_>) -> Result<ColdExecutor> {
    let mut executor = ColdExecutor::start(place, mode).await?;
    executor.load(&ground.adapters).await?;
    executor.wait_for_copies().await?;
    Ok(executor)
}

async fn lone(lab: &GpuBenchContext, executors: &mut [ColdExecutor; 3]) -> Result<()> {
    let tokens = lab.sizes.prompts[0] / PROMPT_SHARE;
    let mut ms: [Vec<f64>; 3] = Default::default();
    // The first request on each adapter does not count: it evicts what was loaded at the start.
    let rounds = ADAPTERS..ADAPTERS + 3 * lab.runs;
    for round in 0..rounds.end {
        for turn in 0..executors.len() {
            let who = (turn + round) % executors.len();
            let adapter = Some(round % ADAPTERS);
            let first = first_token_ms(&mut executors[who], adapter, tokens, round).await?;
            if rounds.contains(&round) {
                ms[who].push(first);
            }
            executors[who].wait_for_copies().await?;
        }
    }
    for executor in executors.iter_mut() {
        let (mode, stats) = (executor.mode.name(), executor.stats().await?);
        eprintln!("holobiont-bench: {mode}: {} of {} lone requests were cold", stats.cold_starts, rounds.end);
    }
    let case = format!("first token of a lone prompt of {tokens}");
    report_modes(lab, &case, ms, MAX_LONE_SHARE)
}

/// Measures Poisson arrivals, with the adapters in turn.
async fn loaded(lab: &GpuBenchContext, executors: &mut [ColdExecutor; 3]) -> Result<()> {
    let requests = lab.sizes.arrivals;
    let load =
        |rate| ColdLoad { rate, requests, adapters: ADAPTERS, popularity: Popularity::Distinct { first: 0 } };
    let arrivals = |rate, seed| {
        let mut arrivals = load(rate).arrivals(seed);
        for arrival in &mut arrivals {
            arrival.prompt = arrival.prompt.min(lab.sizes.longest);
            arrival.answer = arrival.answer.min(lab.sizes.longest);
        }
        arrivals
    };
    let burst = executors[0].serve(&arrivals(1e6, 1)).await?;
    let last = burst.iter().map(|served| served.last).max().context("nothing was served")?;
    let rate = LOAD * requests as f64 / last.as_secs_f64();
    let mut ms: [Vec<f64>; 3] = Default::default();
    for round in 0..lab.runs.min(MAX_ROUNDS) {
        let arrivals = arrivals(rate, 100 + round as u64);
        for turn in 0..executors.len() {
            let who = (turn + round) % executors.len();
            let served = executors[who].serve(&arrivals).await?;
            ms[who].push(mean_first_ms(&served)?);
            executors[who].wait_for_copies().await?;
        }
    }
    let case = format!("mean first token, {rate:.1} requests/s on distinct adapters");
    report_modes(lab, &case, ms, MAX_LOADED_SHARE)
}

fn mean_first_ms(served: &[ServedTiming]) -> Result<f64> {
    Ok(Samples::of(served, |served| served.first.as_secs_f64() * 1000.0)?.mean())
}

/// Compares the modes: cpu-assist has the target, and on-demand shows the time that could be hidden.
fn report_modes(lab: &GpuBenchContext, case: &str, ms: [Vec<f64>; 3], most: f64) -> Result<()> {
    let [cached, on_demand, assist] = ms.map(Samples::new);
    let (cached, on_demand, assist) = (cached?, on_demand?, assist?);
    let rank = lab.sizes.cold_rank;
    let figure = |mode: Mode, ours| GpuMeasurement {
        bench: BENCH,
        case: format!("{case}, rank {rank}, {}", mode.name()),
        unit: "ms",
        better: Better::Lower,
        ours,
    };
    let warm = || own("holobiont, cached", cached.clone());
    lab.report(figure(Mode::CpuAssist, assist.clone()), warm(), Some(BenchTarget::ShareAtMost(most)))?;
    lab.report(figure(Mode::OnDemand, on_demand.clone()), warm(), None)?;
    lab.report(figure(Mode::CpuAssist, assist), own("holobiont, on-demand", on_demand), None)
}
