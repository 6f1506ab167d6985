//! `split-batching`: eight clients of mixed sizes under the three policies, and the wait of
//! a fast client beside a slow one (S-22).

use std::time::Duration;

use anyhow::{Context, Result};
use shmproto::layer::CallClass;

use super::{
    SplitRow,
    executor::{BatchingFlag, CallTransport, SplitExecutor},
    load::{ClientMeasurement, Habits, LoadClient, sites, together},
    wait_time,
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison},
};

const BENCH: &str = "split-batching";
/// Rows of the clients' calls, as of the paper's eight clients.
const SIZES: [usize; 8] = [2, 4, 8, 16, 32, 64, 128, 256];
/// Calls from this size on are prompts or training; smaller ones are decode.
const PROMPT_ROWS: usize = 64;
/// Client time between two calls, for norms, attention and adapters: fixed, and per row.
const PAUSE: Duration = Duration::from_micros(50);
const ROW_PAUSE: Duration = Duration::from_micros(4);
/// Length of a measurement, and of the warm-up before it.
const LASTS: Duration = Duration::from_secs(6);
const WARM_UP: Duration = Duration::from_secs(1);

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let mut comparisons = policies(config, cores)?;
    comparisons.extend(wait_time::run(config, cores)?);
    Ok(comparisons)
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct PolicyResult {
    rows_per_s: f64,
    /// Mean over the clients of the mean time of a pass.
    latency_ms: f64,
    batch: f64,
}

fn policies(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let policies = [BatchingFlag::Opportunistic, BatchingFlag::None, BatchingFlag::Lockstep];
    let mut sides = Vec::new();
    for policy in policies {
        let executor = SplitExecutor::start(config, cores.numbers(), policy)?;
        let clients: Result<Vec<LoadClient>> = SIZES
            .iter()
            .map(|&rows| LoadClient::new(&executor, CallTransport::Channel, habits(rows)))
            .collect();
        sides.push((executor, clients?, Vec::new()));
    }
    for round in 0..config.runs {
        for turn in 0..sides.len() {
            let who = if round.is_multiple_of(2) { turn } else { sides.len() - 1 - turn };
            let (_, clients, reached) = &mut sides[who];
            together(clients, WARM_UP)?;
            let done = together(clients, LASTS)?;
            let figures = PolicyResult::of(&done, sites(clients))?;
            print_policy(policies[who], &figures, &done);
            reached.push(figures);
        }
    }
    let reached: Vec<Vec<PolicyResult>> = sides.into_iter().map(|(_, _, reached)| reached).collect();
    compare(&reached)
}

fn habits(rows: usize) -> Habits {
    let class = if rows < PROMPT_ROWS { CallClass::Decode } else { CallClass::Prefill };
    Habits { rows, class, pause: PAUSE + ROW_PAUSE * rows as u32 }
}

impl PolicyResult {
    fn of(done: &[ClientMeasurement], sites: usize) -> Result<Self> {
        let calls = || done.iter().flat_map(|done| &done.calls);
        let rows: f64 = calls().map(|call| f64::from(call.rows)).sum();
        let mut latency_ms = 0.0;
        for done in done {
            let passes = done.passes.iter().map(|pass| pass.as_secs_f64() * 1000.0).collect();
            latency_ms += Samples::new(passes).context("a client came through no pass")?.mean();
        }
        let batches: f64 = calls().map(|call| f64::from(call.rows) / f64::from(call.batch_rows.max(1))).sum();
        Ok(Self {
            rows_per_s: rows / sites as f64 / LASTS.as_secs_f64(),
            latency_ms: latency_ms / done.len() as f64,
            batch: calls().count() as f64 / batches.max(1.0),
        })
    }
}

fn print_policy(policy: BatchingFlag, reached: &PolicyResult, done: &[ClientMeasurement]) {
    let PolicyResult { rows_per_s, latency_ms, batch } = reached;
    let each: Vec<String> =
        done.iter().zip(SIZES).map(|(done, rows)| format!("{rows}: {} passes", done.passes.len())).collect();
    eprintln!(
        "holobiont-bench: {}: {rows_per_s:.0} rows/s, {latency_ms:.1} ms a pass, {batch:.2} calls a batch ({})",
        policy.name(),
        each.join(", ")
    );
}

fn compare(reached: &[Vec<PolicyResult>]) -> Result<Vec<Comparison>> {
    let [opportunistic, none, lockstep] = reached else { return Ok(Vec::new()) };
    let mut comparisons = Vec::new();
    for (rival, name, more, less) in [(none, "none", 1.05, 0.85), (lockstep, "lockstep", 1.1, 0.6)] {
        for (figure, of, unit, better, target) in [
            (
                "throughput",
                rows_per_s as fn(&PolicyResult) -> f64,
                "rows/s",
                Better::Higher,
                BenchTarget::RatioAtLeast(more),
            ),
            (
                "a pass, mean of the clients",
                |r| r.latency_ms,
                "ms",
                Better::Lower,
                BenchTarget::ShareAtMost(less),
            ),
        ] {
            let case = format!("8 clients of {} to {} rows, {figure}", SIZES[0], SIZES[SIZES.len() - 1]);
            let row = SplitRow { bench: BENCH, case, unit, better, target: Some(target) };
            comparisons.push(row.beside(&Samples::of(opportunistic, of)?, name, &Samples::of(rival, of)?));
        }
    }
    let batch = |reached: &[PolicyResult]| Samples::of(reached, |reached| reached.batch);
    for (rival, name, better) in [(none, "none", Better::Higher), (lockstep, "lockstep", Better::Lower)] {
        let case = "8 clients, calls computed together".to_owned();
        let target = Some(BenchTarget::RatioAtLeast(1.01));
        let row = SplitRow { bench: BENCH, case, unit: "calls a batch", better, target };
        comparisons.push(row.beside(&batch(opportunistic)?, name, &batch(rival)?));
    }
    Ok(comparisons)
}

fn rows_per_s(reached: &PolicyResult) -> f64 {
    reached.rows_per_s
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split::watch::ObservedCall;

    #[test]
    fn a_batch_counts_once_however_many_calls_it_has() {
        let call = |rows, batch_rows| ObservedCall {
            site: 0,
            rows,
            took: Duration::ZERO,
            waited: Duration::ZERO,
            batch_rows,
        };
        let pass = |ms, calls: &[ObservedCall]| ClientMeasurement {
            passes: vec![Duration::from_millis(ms)],
            calls: calls.to_vec(),
        };
        // One batch of 2 + 4 rows, and one of 4.
        let done = [pass(10, &[call(2, 6)]), pass(30, &[call(4, 6), call(4, 4)])];
        let reached = PolicyResult::of(&done, 1).unwrap();
        assert!((reached.batch - 1.5).abs() < 1e-9, "{reached:?}");
        assert_eq!((reached.latency_ms, reached.rows_per_s), (20.0, 10.0 / LASTS.as_secs_f64()));
    }

    #[test]
    fn a_client_that_came_through_no_pass_is_an_error_and_not_a_fast_one() {
        assert!(PolicyResult::of(&[ClientMeasurement::default()], 1).is_err());
    }
}
