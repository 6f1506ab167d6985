//! Simulates four tenants beside one that sends ten times as many requests as each of them.

use std::{io::Write, path::PathBuf, time::Duration};

use clap::Args;
use scheduling::{
    batch::BatchLimits,
    routing::{RoutingPolicy, Slo},
};
use serde_json::json;

use super::{CommandError, compare::IntervalEstimate, print, side_by_side};
use crate::{
    cost::CostModel,
    fleet::{self, FleetRequest, RequestEnd, SECOND, measured::MeasuredFleet},
    random::RandomStream,
    statistics::{mean, quantile},
};

/// Number of moderate tenants; the tenant after them floods.
const MODERATE: u16 = 4;
const FLOOD: f64 = 10.0;

/// Simulates four tenants beside one that sends ten times as many requests as each of them.
#[derive(Debug, Args)]
pub(super) struct Flood {
    /// Requests per second of each of the four tenants.
    #[arg(long, default_value_t = 2.0, value_name = "PER_S")]
    rate: f64,
    /// Prompt tokens of every request.
    #[arg(long, default_value_t = 24)]
    prompt: u32,
    /// Answer tokens of every request.
    #[arg(long, default_value_t = 48)]
    answer: u32,
    /// Share of an executor's batch slots that the flood gets beside other tenants.
    #[arg(long, value_delimiter = ',', default_values_t = [1.0, 0.25, 0.125, 0.0625, 0.03125, 0.0])]
    shares: Vec<f64>,
    /// Number of simulated executors.
    #[arg(long, default_value_t = 1)]
    executors: usize,
    /// Cost file of an executor; by default a small model on two cores.
    #[arg(long, value_name = "PATH")]
    cost_model: Option<PathBuf>,
    /// Maximum number of sequences per step.
    #[arg(long, default_value_t = 64)]
    max_running: usize,
    /// Seconds in which requests arrive.
    #[arg(long, default_value_t = 120.0, value_name = "S")]
    duration: f64,
    /// Warm-up seconds whose requests are not measured.
    #[arg(long, default_value_t = 20.0, value_name = "S")]
    warmup: f64,
    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds, from --seed on.
    #[arg(long, default_value_t = 20)]
    seeds: u64,
}

#[derive(Debug, Clone, Copy)]
struct FloodResult {
    ttft_ms: f64,
    ttft_p99_ms: f64,
    /// Tokens per second: of the four tenants, and of the flood.
    goodput: [f64; 2],
}

impl Flood {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let costs = self.cost_model.as_deref().map_or(Ok(CostModel::CPU), CostModel::read)?;
        let is_good = |number: f64| number.is_finite() && number >= 0.0;
        if !is_good(self.rate) || !is_good(self.duration) || !self.shares.iter().copied().all(is_good) {
            return Err(CommandError::Option("--rate, --duration or --shares"));
        }
        print(
            out,
            &json!({
                "rate_per_s": self.rate, "flood_times": FLOOD, "prompt": self.prompt, "answer": self.answer,
                "executors": self.executors, "max_running": self.max_running, "duration_s": self.duration,
                "warmup_s": self.warmup, "seed": self.seed, "seeds": self.seeds, "cost": costs,
            }),
        )?;
        let cases = std::iter::once((0.0, 1.0)).chain(self.shares.iter().map(|share| (FLOOD, *share)));
        for (flood, flood_share) in cases {
            let seeds: Vec<u64> = (self.seed..self.seed + self.seeds).collect();
            let figures =
                side_by_side::all(&seeds, |seed| self.observe(&costs, *seed, (flood, flood_share)))?;
            let of = |value: fn(&FloodResult) -> f64| {
                IntervalEstimate::of(&figures.iter().map(value).collect::<Vec<_>>())
            };
            print(
                out,
                &json!({
                    "flood_times": flood, "flood_share": flood_share,
                    "ttft_ms": of(|one| one.ttft_ms), "ttft_p99_ms": of(|one| one.ttft_p99_ms),
                    "tokens_per_s": of(|one| one.goodput[0]), "flood_tokens_per_s": of(|one| one.goodput[1]),
                }),
            )?;
        }
        Ok(())
    }

    fn observe(
        &self,
        costs: &CostModel,
        seed: u64,
        (flood, flood_share): (f64, f64),
    ) -> Result<FloodResult, CommandError> {
        let measured = MeasuredFleet {
            limits: BatchLimits { max_running: self.max_running, chunk_tokens: 512, scored_tokens: 1 },
            adapter_slots: usize::MAX,
            kv_tokens: u64::MAX,
            policy: RoutingPolicy::RankAware,
            slo: Slo::default(),
            seed,
        };
        let setup = measured.fleet(&[*costs], self.executors).ok_or(CommandError::Option("--cost-model"))?;
        let requests = self.requests(seed, flood);
        let outcomes = fleet::run(&fleet::FleetSetup { flood_share, ..setup }, &requests);
        let [from, to] = [self.warmup, self.duration].map(|s| (s * SECOND as f64) as u64);
        let of = |is_meant: fn(u16) -> bool| {
            let all = requests.iter().zip(&outcomes).filter(move |(request, _)| is_meant(request.tenant));
            all.filter(|(_, outcome)| outcome.end == RequestEnd::Answered)
        };
        let tokens = |is_meant| {
            let ended = of(is_meant).filter(|(_, outcome)| (from..to).contains(&outcome.ended));
            ended.map(|(request, _)| f64::from(request.answer)).sum::<f64>() / (self.duration - self.warmup)
        };
        let begun = of(|tenant| tenant < MODERATE).filter(|(request, _)| request.at >= from);
        let ttft: Vec<f64> = begun
            .filter_map(|(request, outcome)| Some((outcome.first_token? - request.at) as f64 * 1e-6))
            .collect();
        Ok(FloodResult {
            ttft_ms: mean(&ttft),
            ttft_p99_ms: quantile(&ttft, 0.99),
            goodput: [tokens(|tenant| tenant < MODERATE), tokens(|tenant| tenant == MODERATE)],
        })
    }

    /// Creates independent arrivals of each tenant. Requests of the flood expire after a few seconds in the
    /// queue.
    fn requests(&self, seed: u64, flood: f64) -> Vec<FleetRequest> {
        let mut requests: Vec<FleetRequest> =
            (0..=MODERATE).flat_map(|tenant| self.of(tenant, seed, flood)).collect();
        requests.sort_by_key(|request| (request.at, request.tenant));
        requests
    }

    fn of(&self, tenant: u16, seed: u64, flood: f64) -> Vec<FleetRequest> {
        let (times, patience) = if tenant < MODERATE { (1.0, None) } else { (flood, Some(5 * SECOND)) };
        let mut stream = RandomStream::new(seed, "flood", tenant.into());
        let gaps = std::iter::repeat_with(|| stream.exponential() / (self.rate * times));
        let arrivals = gaps.scan(0.0, |at, gap| {
            *at += gap;
            Some(*at)
        });
        let request = |at: f64| FleetRequest {
            at: u64::try_from(Duration::from_secs_f64(at).as_nanos()).unwrap_or(u64::MAX),
            tenant,
            adapter: 0,
            rank: 0,
            prompt: self.prompt,
            answer: self.answer,
            patience,
        };
        // Without a flood its first gap is infinite.
        arrivals.take_while(|at| *at < self.duration).map(request).collect()
    }
}
