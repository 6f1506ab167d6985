//! Two jobs beside six decoding requests: loss of the requests, and gain of the machine.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

use super::trainer::{self, StepWork};
use crate::{
    cold::{ColdCompute, ColdExecutor, ExecutorPlacement, Mode, RequestArrival},
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const JOBS: usize = 2;
const STREAMS: usize = 6;
const PROMPT: usize = 16;
const ANSWER: usize = 192;
/// Targets: maximum ratio of time per token, and minimum ratio of the tokens of both kinds.
const TIMES: f64 = 1.1;
const TOTAL: f64 = 1.2;
/// More steps than any measurement takes.
const ENDLESS_STEPS: usize = 1 << 20;
/// Steps of each job during the requests, and tokens of a sequence: short, so that a measurement holds some
/// steps.
const STEPS: usize = 3;
const TOKENS: usize = 128;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let mut requests = BackgroundRequests::new(config, cores)?;
    requests.serve(0)?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for round in 1..=config.runs as u64 {
        alone.push(requests.serve(2 * round)?);
        beside.push(requests.beside_jobs(2 * round + 1)?);
    }
    let row = |case: &str, unit, better, target, figure: fn(&RequestRates) -> f64| -> Result<Comparison> {
        let rival = PeerSamples {
            name: "the requests alone".to_owned(),
            format: "Q4_1".to_owned(),
            samples: Samples::of(&alone, figure)?,
        };
        let ours = Samples::of(&beside, figure)?;
        Ok(Comparison {
            bench: "tune-mixed",
            case: case.to_owned(),
            unit,
            better,
            ours,
            rival,
            target: Some(target),
        })
    };
    let (times, total) = (BenchTarget::ShareAtMost(TIMES), BenchTarget::RatioAtLeast(TOTAL));
    Ok(vec![
        row("a token of 6 requests beside 2 jobs", "ms", Better::Lower, times, |served| served.token_ms)?,
        row("tokens of 6 requests and 2 jobs", "tokens/s", Better::Higher, total, |served| {
            served.tokens_per_s
        })?,
    ])
}

struct RequestRates {
    /// Mean time between two tokens of a stream.
    token_ms: f64,
    /// Generated tokens and trained tokens of the same time.
    tokens_per_s: f64,
}

struct BackgroundRequests {
    runtime: Runtime,
    executor: ColdExecutor,
    place: trainer::JobSetup,
}

impl BackgroundRequests {
    fn new(config: &SuiteConfig, cores: &Cores) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build().context("no runtime")?;
        let place = ExecutorPlacement {
            base_cores: cores.numbers(),
            helper: ColdCompute::Nobody,
            ..ExecutorPlacement::on(config, cores)?
        };
        let executor = runtime.block_on(ColdExecutor::start(place, Mode::Cached))?;
        let socket = executor.run_folder().join("layers.sock");
        let place = trainer::JobSetup::new(config, socket, StepWork { batch: 1, tokens: TOKENS })?;
        Ok(Self { runtime, executor, place })
    }

    fn serve(&mut self, round: u64) -> Result<RequestRates> {
        let arrival = |stream: usize| {
            let seed = round * STREAMS as u64 + stream as u64;
            RequestArrival { at: Duration::ZERO, adapter: None, prompt: PROMPT, answer: ANSWER, seed }
        };
        let arrivals: Vec<RequestArrival> = (0..STREAMS).map(arrival).collect();
        let begun = Instant::now();
        self.runtime.block_on(self.executor.serve(&arrivals))?;
        let seconds = begun.elapsed().as_secs_f64();
        Ok(RequestRates {
            token_ms: seconds * 1e3 / ANSWER as f64,
            tokens_per_s: (STREAMS * ANSWER) as f64 / seconds,
        })
    }

    /// Repeats the requests while two jobs train, until both have made some steps.
    fn beside_jobs(&mut self, round: u64) -> Result<RequestRates> {
        let start =
            |number: usize| self.place.start(&format!("adapter-{round}-{number}"), ENDLESS_STEPS, None);
        let jobs: Vec<trainer::RunningTrainer> =
            (0..JOBS).map(|number| start(number)?.run()).collect::<Result<_>>()?;
        jobs.iter().try_for_each(trainer::RunningTrainer::wait_for_a_step)?;
        let (begun, mut served) = (Instant::now(), Vec::new());
        let rates = loop {
            served.push(self.serve(round)?);
            let rates: Option<Vec<f64>> =
                jobs.iter().map(|job| job.rate_since(begun, STEPS)).collect::<Result<_>>()?;
            if let Some(rates) = rates {
                break rates;
            }
        };
        let mean =
            |figure: fn(&RequestRates) -> f64| served.iter().map(figure).sum::<f64>() / served.len() as f64;
        Ok(RequestRates {
            token_ms: mean(|served| served.token_ms),
            tokens_per_s: mean(|served| served.tokens_per_s) + rates.iter().sum::<f64>(),
        })
    }
}
