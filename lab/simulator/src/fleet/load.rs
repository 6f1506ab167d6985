//! Requests of many adapters: arrivals as the functions of MAF 2019 have them, or of a trace, lengths as Alpaca's.

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

/// Lengths of prompts and answers: mean and deviation of the logarithm, and the longest (CHECKLIST C2: Alpaca).
const PROMPT: (f64, f64, f64) = (2.81, 0.55, 512.0);
const ANSWER: (f64, f64, f64) = (3.62, 0.95, 1024.0);

/// When requests come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// Rates that move by the minute, and Poisson within it: what is in MAF 2019.
    Minutes,
    /// Independent of each other.
    Poisson,
}

/// What is asked of a fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetLoad {
    /// When requests come.
    pub arrivals: Arrivals,
    /// How many adapters there are.
    pub adapters: usize,
    /// How often each is asked for.
    pub popularity: Popularity,
    /// Their ranks; each adapter has one of them, all alike often.
    pub ranks: Vec<u32>,
    /// Requests a second.
    pub per_s: f64,
    /// How long.
    pub length: Duration,
    /// No more than so many.
    pub max_requests: usize,
    /// Who shares the adapters.
    pub tenants: u16,
}

impl FleetLoad {
    /// Makes it.
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

/// The requests of a workload of one executor: each turn comes when those before it should have been answered, which is after
/// the time that it was thought about.
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
