//! C-07: prompts on adapters that never arrive; workers are called in the device's stream, or through the
//! host.
//!
//! Two executors with workers of their own alternate. The emulated link is so slow that the device has no
//! block of a requested adapter: workers compute everything, and the executor's cores what the workers cannot
//! keep up with.

use anyhow::Result;

use super::{
    executors::{GpuTestbed, first_token_ms, runtime},
    lab::{GpuBenchContext, GpuMeasurement, own},
};
use crate::{
    cold::{ColdExecutor, ExecutorPlacement, Mode},
    measure::Samples,
    report::{BenchTarget, Better},
};

const BENCH: &str = "cuda-fused";
const RANK: usize = 16;
/// Adapters in turn, so that none is requested often enough to arrive.
const ADAPTERS: usize = 4;
/// On this link even the smallest shape's blocks take seconds each.
const STILL_GBPS: f64 = 0.000_005;
/// Maximum ratio of fused to native time, from the first length on.
const MAX_SHARE_OF_NATIVE: f64 = 0.9;

/// Prints every row of this benchmark.
///
/// # Errors
/// If an executor does not start or does not answer.
pub(super) fn run(lab: &GpuBenchContext) -> Result<()> {
    runtime()?.block_on(measure(lab))
}

async fn measure(lab: &GpuBenchContext) -> Result<()> {
    let ground = GpuTestbed::new(lab, RANK, ADAPTERS)?;
    let ways = ["fused", "native"].map(|way| ground.options(&["--worker-invocation", way]));
    let place = |options| ExecutorPlacement { link_gbps: STILL_GBPS, ..ground.place(options) };
    let [fused, native] = ways.each_ref().map(|options| ColdExecutor::start(place(options), Mode::CpuAssist));
    let (fused, native) = tokio::join!(fused, native);
    let mut executors = [fused?, native?];
    for executor in &mut executors {
        executor.load(&ground.adapters).await?;
    }
    for (length, &tokens) in lab.sizes.prompts.iter().enumerate() {
        let mut ms = [Vec::new(), Vec::new()];
        let mut base = Vec::new();
        // The first round does not count.
        for round in 0..=lab.runs {
            let seed = length * 100 + round;
            for turn in [round % 2, 1 - round % 2] {
                let first = first_token_ms(&mut executors[turn], Some(seed % ADAPTERS), tokens, seed).await?;
                if round > 0 {
                    ms[turn].push(first);
                }
            }
            if round > 0 {
                base.push(first_token_ms(&mut executors[0], None, tokens, seed).await?);
            }
        }
        report_fused(lab, &ground, tokens, ms, base)?;
    }
    tell_who_computed(&mut executors).await
}

fn report_fused(
    lab: &GpuBenchContext,
    ground: &GpuTestbed<'_>,
    tokens: usize,
    ms: [Vec<f64>; 2],
    base: Vec<f64>,
) -> Result<()> {
    let [fused, native] = ms.map(Samples::new);
    let fused = fused?;
    let workers = ground.workers();
    let figure = |ours| GpuMeasurement {
        bench: BENCH,
        case: format!("first token of {tokens}, rank {RANK}, none of it on the device, workers: {workers}"),
        unit: "ms",
        better: Better::Lower,
        ours,
    };
    let goal = Some(BenchTarget::ShareAtMost(MAX_SHARE_OF_NATIVE));
    lab.report(figure(fused.clone()), own("holobiont, through the host", native?), goal)?;
    lab.report(figure(fused), own("holobiont, the base model", Samples::new(base)?), None)
}

/// Prints the shares of workers, host and device in the adapters' work: the device's should be zero.
async fn tell_who_computed(executors: &mut [ColdExecutor; 2]) -> Result<()> {
    for (executor, way) in executors.iter_mut().zip(["fused", "native"]) {
        let stats = executor.stats().await?;
        let sum =
            |of: fn(&shmproto::message::AdapterStats) -> u64| stats.adapters.iter().map(of).sum::<u64>();
        let (device, workers, here) =
            (sum(|a| a.rank_rows_device), sum(|a| a.rank_rows_workers), sum(|a| a.rank_rows_executor));
        let share = |part: u64| part as f64 / (device + workers + here).max(1) as f64;
        eprintln!(
            "holobiont-bench: {way}: adapters' work: device {:.3}, workers {:.3}, executor {:.3}",
            share(device),
            share(workers),
            share(here)
        );
    }
    Ok(())
}
