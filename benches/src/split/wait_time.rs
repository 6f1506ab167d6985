//! S-22: wait of a fast client at a site, beside a slow one. In lockstep it waits for the slow client;
//! opportunistically for at most its own deadline and the running computation.

use std::time::Duration;

use anyhow::{Context, Result};
use shmproto::layer::CallClass;

use super::{
    SplitRow,
    executor::{BatchingFlag, CallTransport, SplitExecutor},
    load::{Habits, LoadClient, together},
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    plot::{self, PlotCurve},
    report::{BenchTarget, Better, Comparison},
};

const ROWS: usize = 4;
/// Pause of the slow client between two calls.
const PACES_MS: [u64; 6] = [1, 2, 4, 8, 16, 32];
const LASTS: Duration = Duration::from_millis(1500);
/// Maximum growth of the fast client's wait between the fastest and the slowest pace. A few of the hundreds
/// of microseconds at a site are noise.
const NOISE_US: f64 = 10.0;

pub(super) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let mut executors = Vec::new();
    for policy in [BatchingFlag::Opportunistic, BatchingFlag::Lockstep] {
        executors.push(SplitExecutor::start(config, cores.numbers(), policy)?);
    }
    let mut waits = vec![[Vec::new(), Vec::new()]; PACES_MS.len()];
    for _ in 0..config.runs {
        for (pace_ms, waits) in PACES_MS.iter().zip(&mut waits) {
            for (executor, waits) in executors.iter().zip(waits) {
                waits.push(mean_wait_us(executor, Duration::from_millis(*pace_ms))?);
            }
        }
    }
    let waits: Vec<[Samples; 2]> = waits
        .into_iter()
        .map(|[ours, lockstep]| Ok([Samples::new(ours)?, Samples::new(lockstep)?]))
        .collect::<Result<_>>()?;
    if let Some(folder) = &config.plot {
        draw(&waits, &folder.join("split-waits.svg"))?;
    }
    compare(&waits)
}

fn mean_wait_us(executor: &SplitExecutor, pace: Duration) -> Result<f64> {
    let habits = |pause| Habits { rows: ROWS, class: CallClass::Decode, pause };
    let fast = LoadClient::new(executor, CallTransport::Channel, habits(Duration::ZERO))?;
    let slow = LoadClient::new(executor, CallTransport::Channel, habits(pace))?;
    let mut clients = [fast, slow];
    let done = together(&mut clients, LASTS)?;
    let calls = done.first().map(|done| &done.calls[..]).unwrap_or_default();
    let waits = calls.iter().map(|call| call.waited.as_secs_f64() * 1e6).collect();
    Ok(Samples::new(waits).context("the fast client made no call")?.mean())
}

fn compare(waits: &[[Samples; 2]]) -> Result<Vec<Comparison>> {
    let ends = waits.first().zip(waits.last()).zip(PACES_MS.first().zip(PACES_MS.last()));
    let (([least, _], [ours, lockstep]), (quick_ms, slow_ms)) = ends.context("no pace was measured")?;
    let row = |target| SplitRow {
        bench: "split-batching",
        case: format!("wait of {ROWS} rows at a site, beside a client that calls every {slow_ms} ms"),
        unit: "us",
        better: Better::Lower,
        target,
    };
    let goal = BenchTarget::OursAtMost(least.median() + NOISE_US);
    Ok(vec![
        row(None).beside(ours, "lockstep", lockstep),
        row(Some(goal)).beside(ours, &format!("beside one that calls every {quick_ms} ms"), least),
    ])
}

fn draw(waits: &[[Samples; 2]], path: &std::path::Path) -> Result<()> {
    let points = |side: usize| {
        let point = |(&pace, waits): (&u64, &[Samples; 2])| (pace as f64, waits[side].median() / 1000.0);
        PACES_MS.iter().zip(waits).map(point).collect()
    };
    // In lockstep a site is computed once per pace; otherwise at the deadline of its own rows, which is
    // nearly zero.
    let line = |of: fn(f64) -> f64| PACES_MS.iter().map(|&pace| (pace as f64, of(pace as f64))).collect();
    let curves = [
        PlotCurve { name: "opportunistic".to_owned(), points: points(0), line: line(|_| 0.0) },
        PlotCurve { name: "lockstep".to_owned(), points: points(1), line: line(|pace| pace) },
    ];
    let title = "What a fast split client waits for at a site, beside a slow one";
    plot::lines(path, title, ["pause of the slow client, ms", "wait of the fast client, ms"], &curves)
}
