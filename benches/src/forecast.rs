//! Forecast beside reality: three executors of unequal speed behind one gateway, with each routing policy.
//!
//! The fastest executor is measured alone, and the slowdown of the others while the rest are drained. Then
//! Poisson requests of twenty adapters of mixed ranks go to the real deployment and, with those costs,
//! through the fleet of `holobiont simulate`.
//!
//! - [`deployment`]: three executors on two cores. [`cpu_quota`]: CPU share of each executor.

mod cpu_quota;
mod deployment;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use scheduling::routing::{RoutingPolicy, Slo};
use simulator::{
    cost::{ComputedWork, CostModel},
    fleet::{
        self, FleetRequest, SECOND,
        load::{Arrivals, FleetLoad},
        measured::MeasuredFleet,
        summary::Summary,
    },
    workload::popularity::Popularity,
};

use self::deployment::{NAMES, RANKS, UnequalFleet};
use crate::{
    arrivals::at_their_times,
    config::SuiteConfig,
    http::Timeline,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    sim_validation::{LIMITS, SAID, costs},
    workload::{AdapterChoice, AnswerKind, BenchRequest, prompt},
};

/// Maximum relative error of the times.
const NEAR: f64 = 0.15;
const POLICIES: [RoutingPolicy; 4] =
    [RoutingPolicy::RankAware, RoutingPolicy::MostIdle, RoutingPolicy::FirstFit, RoutingPolicy::Random];
const ADAPTERS: usize = 20;
const LOAD: f64 = 0.6;
/// Length of the load, and start of the measurement: by then the gateway knows the executors' speeds.
const LENGTH: Duration = Duration::from_secs(75);
const WARM_UP: Duration = Duration::from_secs(15);
/// Mean prompt and answer tokens (Alpaca), and batch size of an executor: inputs of the request rate.
const MEAN: (usize, usize) = (19, 58);
const BESIDE: usize = 8;

/// Mean milliseconds to the first token, and between tokens.
type ForecastSample = [f64; 2];

/// Measured and forecast samples of a policy, run by run.
struct PolicyForecast {
    policy: RoutingPolicy,
    real: Vec<ForecastSample>,
    forecast: Vec<ForecastSample>,
}

/// Measures every comparison of this benchmark.
///
/// # Errors
/// If executors cannot be held to their shares, or a request fails.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let costs = measured(config, cores)?;
    let per_s = LOAD * costs.iter().map(served_per_s).sum::<f64>();
    eprintln!("holobiont-bench: {per_s:.2} requests a second");
    let mut all = Vec::new();
    for policy in POLICIES {
        let (mut real, mut forecast) = (Vec::new(), Vec::new());
        for run in 0..config.runs {
            let requests = load(per_s).make(run as u64 + 1);
            real.push(ask(config, cores, policy, &requests)?);
            forecast.push(simulate(&costs, policy, &requests)?);
        }
        all.push(PolicyForecast { policy, real, forecast });
    }
    let mut comparisons = Vec::new();
    for judged in &all {
        comparisons.extend(compare(judged)?);
    }
    comparisons.push(order(&all)?);
    Ok(comparisons)
}

/// Measures the costs of each executor and writes them beside `--costs`, for `holobiont simulate`.
fn measured(config: &SuiteConfig, cores: &Cores) -> Result<Vec<CostModel>> {
    let ranks = RANKS.into_iter().cycle().take(ADAPTERS).collect();
    let models = UnequalFleet::start(config, cores, RoutingPolicy::RankAware, ranks)?.costs(config)?;
    NAMES.iter().zip(&models).try_for_each(|(name, model)| costs::write(model, &file(config, name)))?;
    Ok(models)
}

fn file(config: &SuiteConfig, name: &str) -> PathBuf {
    let stem = config.costs.file_stem().unwrap_or_default().to_string_lossy();
    config.costs.with_file_name(format!("{stem}-{name}.json"))
}

/// Requests per second of an executor with a full batch.
fn served_per_s(costs: &CostModel) -> f64 {
    let (prompt, answer) = MEAN;
    let rank = RANKS.iter().sum::<usize>() / RANKS.len();
    let step = ComputedWork {
        decode_sequences: BESIDE,
        context_tokens: BESIDE * (prompt + answer / 2),
        rank_rows: BESIDE * rank,
        ..ComputedWork::default()
    };
    let both = ComputedWork { prefill_tokens: prompt, rank_rows: step.rank_rows + prompt * rank, ..step };
    let (step_s, both_s) = (costs.step(step).as_secs_f64(), costs.step(both).as_secs_f64());
    1.0 / (answer as f64 * step_s / BESIDE as f64 + both_s - step_s)
}

fn load(per_s: f64) -> FleetLoad {
    FleetLoad {
        arrivals: Arrivals::Poisson,
        adapters: ADAPTERS,
        popularity: Popularity::Zipf(0.9),
        ranks: RANKS.map(|rank| rank as u32).to_vec(),
        per_s,
        length: LENGTH,
        max_requests: usize::MAX,
        tenants: 1,
    }
}

fn ask(
    config: &SuiteConfig,
    cores: &Cores,
    policy: RoutingPolicy,
    requests: &[FleetRequest],
) -> Result<ForecastSample> {
    let fleet = UnequalFleet::start(config, cores, policy, ranks(requests))?;
    let numbered: Vec<(usize, &FleetRequest)> = requests.iter().enumerate().collect();
    let due = |(_, request): &(usize, &FleetRequest)| Duration::from_nanos(request.at);
    let heard = at_their_times(&numbered, due, |&(number, request)| {
        Ok((request.at, fleet.server.ask(&job(number, request))?))
    })?;
    let measured: Vec<Timeline> = heard
        .into_iter()
        .filter(|(at, _)| Duration::from_nanos(*at) >= WARM_UP)
        .map(|(_, timeline)| timeline)
        .collect();
    let first_ms = |timeline: &Timeline| (timeline.first - timeline.sent).as_secs_f64() * 1e3;
    let each_ms = |timeline: &Timeline| {
        let further = timeline.tokens - 1;
        (further > 0).then(|| (timeline.last - timeline.first).as_secs_f64() * 1e3 / further as f64)
    };
    Ok([
        Samples::of(&measured, first_ms)?.mean(),
        Samples::new(measured.iter().filter_map(each_ms).collect())?.mean(),
    ])
}

/// Rank of each adapter; an adapter without requests gets an arbitrary rank.
fn ranks(requests: &[FleetRequest]) -> Vec<usize> {
    let mut ranks = vec![RANKS[0]; ADAPTERS];
    requests.iter().for_each(|request| ranks[request.adapter as usize] = request.rank as usize);
    ranks
}

fn job(number: usize, request: &FleetRequest) -> BenchRequest {
    BenchRequest {
        prompt: prompt((1 << 32) + number as u64, request.prompt as usize),
        who: AdapterChoice::Adapter(request.adapter as usize),
        generate: request.answer as usize,
        says: AnswerKind::Token(SAID),
    }
}

fn simulate(costs: &[CostModel], policy: RoutingPolicy, requests: &[FleetRequest]) -> Result<ForecastSample> {
    let measured = MeasuredFleet {
        limits: LIMITS,
        adapter_slots: ADAPTERS,
        kv_tokens: u64::MAX,
        policy,
        slo: Slo::default(),
        seed: 1,
    };
    let setup = measured.fleet(costs, costs.len()).context("the costs say too little of a step")?;
    let outcomes = fleet::run(&setup, requests);
    let warm_up = WARM_UP.as_secs() * SECOND;
    let summary = Summary::of(requests, &outcomes, warm_up, &Slo::default(), costs[0].request_s);
    Ok([summary.ttft_ms, summary.tpot_ms])
}

fn compare(judged: &PolicyForecast) -> Result<Vec<Comparison>> {
    let lines = ["mean time to first token", "mean time per token"];
    let row = |(index, what): (usize, &str)| {
        Ok(Comparison {
            bench: "forecast",
            case: format!("{}: {what}", judged.policy.name()),
            unit: "ms",
            better: Better::Lower,
            ours: Samples::of(&judged.real, |figures| figures[index])?,
            rival: forecast(Samples::of(&judged.forecast, |figures| figures[index])?),
            target: Some(BenchTarget::Near(NEAR)),
        })
    };
    lines.into_iter().enumerate().map(row).collect()
}

/// Counts the pairs of policies whose measured order, by time per token, is the forecast order.
fn order(all: &[PolicyForecast]) -> Result<Comparison> {
    let median =
        |figures: &[ForecastSample]| Samples::of(figures, |figures| figures[1]).map(|one| one.median());
    let mut medians = Vec::new();
    for judged in all {
        medians.push((median(&judged.real)?, median(&judged.forecast)?));
    }
    let pairs = || (0..all.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
    let agree = pairs()
        .filter(|&(one, other)| (medians[one].0 < medians[other].0) == (medians[one].1 < medians[other].1));
    let (agree, pairs) = (agree.count() as f64, pairs().count() as f64);
    Ok(Comparison {
        bench: "forecast",
        case: "pairs of policies in the order that was forecast, by time per token".to_owned(),
        unit: "pairs",
        better: Better::Higher,
        ours: Samples::new(vec![agree])?,
        rival: forecast(Samples::new(vec![pairs])?),
        target: Some(BenchTarget::OursAtLeast(pairs)),
    })
}

fn forecast(samples: Samples) -> PeerSamples {
    PeerSamples { name: "holobiont simulate".to_owned(), format: "Q4_1".to_owned(), samples }
}
