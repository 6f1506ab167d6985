//! Creates requests of many adapters: arrivals as in MAF 2019 or a trace, lengths as in Alpaca.

use std::time::Duration;

use super::{FleetRequest, Nanos};
use crate::{
    random::RandomStream,
    workload::{
        Workload,
        arrivals::{AdapterArrival, Demand},
        popularity::Popularity,
    },
};

/// Lengths of prompts and answers: mean and deviation of the logarithm, and the maximum, as in
/// Alpaca.
const PROMPT: (f64, f64, f64) = (2.81, 0.55, 512.0);
const ANSWER: (f64, f64, f64) = (3.62, 0.95, 1024.0);

/// Arrival process of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// Rates vary by the minute with Poisson arrivals within it, as in MAF 2019.
    Minutes,
    /// Arrivals are independent of each other.
    Poisson,
}

/// Parameters of a fleet's load.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetLoad {
    /// Arrival process of the requests.
    pub arrivals: Arrivals,
    /// Number of adapters in the load.
    pub adapters: usize,
    /// Distribution of requests over adapters.
    pub popularity: Popularity,
    /// Ranks of the adapters, all equally frequent.
    pub ranks: Vec<u32>,
    /// Mean number of requests per second.
    pub per_s: f64,
    /// Duration of the load.
    pub length: Duration,
    /// Maximum number of requests.
    pub max_requests: usize,
    /// Number of tenants that share the adapters.
    pub tenants: u16,
}

impl FleetLoad {
    /// Creates the requests of a seed.
    #[must_use]
    pub fn make(&self, seed: u64) -> Vec<FleetRequest> {
        let demand = Demand {
            adapters: self.adapters,
            popularity: self.popularity,
            drift: 0.0,
            per_s: self.per_s,
            end: self.length,
        };
        let arrivals = match self.arrivals {
            Arrivals::Minutes => demand.minutes(seed),
            Arrivals::Poisson => demand.poisson(seed),
        };
        let rank_of = |adapter: usize| {
            self.ranks[RandomStream::new(seed, "ranks", adapter as u64).below(self.ranks.len())]
        };
        let request = |(number, AdapterArrival { at, adapter }): (usize, AdapterArrival)| {
            let mut stream = RandomStream::new(seed, "lengths", number as u64);
            let mut length = |(mu, sigma, max): (f64, f64, f64)| {
                stream.lognormal(mu, sigma).min(max).round().max(1.0) as u32
            };
            FleetRequest {
                at: nanos(at),
                tenant: (adapter % usize::from(self.tenants.max(1))) as u16,
                adapter: adapter as u32,
                rank: rank_of(adapter),
                prompt: length(PROMPT),
                answer: length(ANSWER),
                patience: None,
            }
        };
        arrivals.into_iter().take(self.max_requests).enumerate().map(request).collect()
    }
}

/// Creates the requests of a one-executor workload. Each turn arrives when the previous ones should have
/// been answered, after its think time.
#[must_use]
pub fn of_workload(workload: &Workload) -> Vec<FleetRequest> {
    let mut requests: Vec<FleetRequest> = Vec::new();
    for talk in &workload.conversations {
        let mut at = talk.start;
        let adapter = workload.adapters[talk.adapter];
        for (turn, spoken) in talk.turns.iter().enumerate() {
            at += spoken.think;
            requests.push(FleetRequest {
                at: nanos(at),
                tenant: adapter.tenant,
                adapter: talk.adapter as u32,
                rank: adapter.rank,
                prompt: talk.span(turn).0 as u32,
                answer: spoken.reply as u32,
                patience: None,
            });
        }
    }
    requests.sort_by_key(|request| (request.at, request.adapter));
    requests
}

fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
