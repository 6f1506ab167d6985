//! Latency that Envoy and the picker add to a request, and throughput that they leave.

use std::time::Duration;

use anyhow::Result;

use super::{at, envoy::EnvoyFront, hosts, row};
use crate::{
    config::SuiteConfig,
    holobiont_runner::Holobiont,
    machine::Cores,
    measure::{Samples, alternate},
    report::{BenchTarget, Better, Comparison},
    workload::{BenchRequest, BurstMix, WARM_UP_ROUND, burst, first_token},
};

/// Sequential requests of a run, alternating between both ways.
const LONE: usize = 200;
/// Maximum time added to a first token, and minimum share of the tokens per second.
const ADDED_MS: f64 = 1.5;
const LEFT: f64 = 0.97;

pub(super) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir()?;
    let direct = hosts::alone(config, cores, &folder.path().join("host"))?;
    let front = EnvoyFront::start(config, &direct, folder.path())?;
    for server in [&direct, &front.server] {
        server.warm_up(&together(WARM_UP_ROUND))?;
    }
    let (mut added, mut beside) = ([vec![], vec![]], [vec![], vec![]]);
    for run in 0..config.runs {
        let [through, plain] = alternate(
            LONE,
            [
                Box::new(|number| first_ms(&front.server, number_of(run, number, 0))),
                Box::new(|number| first_ms(&direct, number_of(run, number, 1))),
            ],
        )?;
        for (index, share) in [0.5, 0.99].into_iter().enumerate() {
            let times = (at(&through, share)?, at(&plain, share)?);
            added[index].push(times.0 - times.1);
            beside[index].push(times.1);
        }
    }
    let rates = alternate(
        config.runs,
        [Box::new(|round| rate(&front.server, 2 * round)), Box::new(|round| rate(&direct, 2 * round + 1))],
    )?;
    front.ensure_picked(config.runs * LONE)?;
    let mut rows = Vec::new();
    for (index, name) in ["median", "p99"].into_iter().enumerate() {
        let [added, beside] = [&added, &beside].map(|all| Samples::new(all[index].clone()));
        let case = format!("through Envoy and picker: added to a first token, {name}");
        let target = Some(BenchTarget::OursAtMost(ADDED_MS));
        rows.push(row(&case, "ms", added?, ("the whole time, directly", beside?), target));
    }
    let [through, plain] = rates.map(Samples::new);
    let case = "through Envoy and picker: 16 streams";
    let target = Some(BenchTarget::RatioAtLeast(LEFT));
    rows.push(Comparison {
        better: Better::Higher,
        ..row(case, "tokens/s", through?, ("directly", plain?), target)
    });
    Ok(rows)
}

/// Number of a request; no two requests have the same prompt.
fn number_of(run: usize, number: usize, way: usize) -> usize {
    2 * (run * LONE + number) + way
}

fn first_ms(server: &Holobiont, number: usize) -> Result<f64> {
    let timeline = server.ask(&first_token(number))?;
    let waited: Duration = timeline.first - timeline.sent;
    Ok(waited.as_secs_f64() * 1e3)
}

fn rate(server: &Holobiont, round: usize) -> Result<f64> {
    Ok(server.burst(&together(round))?.aggregate_tokens_per_s())
}

fn together(round: usize) -> Vec<BenchRequest> {
    [2 * round, 2 * round + 1].into_iter().flat_map(|round| burst(BurstMix::Base, round)).collect()
}
