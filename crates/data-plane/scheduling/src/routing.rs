//! Routing policy: chooses the executor of a request (CaraServe §5, Algorithm 1; C-13 to C-16).
//!
//! A function maps a request and a snapshot of all executors to a choice with its forecast. Equal snapshots
//! give equal choices, in any order of the candidates.
//!
//! # Layout
//!
//! - here: requests, candidates and policies.
//! - `score`: scores of a candidate by Algorithm 1, printed and corrected; forecasts.
//! - [`in_flight`]: tracks the load of an executor, request by request.
//! - [`prefixes`]: remembers which executor computed the beginning of a prompt last.
//! - [`cost_estimates`]: estimates the time models of executors from observed timings.

pub mod cost_estimates;
pub mod in_flight;
pub mod prefixes;
mod score;
#[cfg(test)]
mod tests;

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
    fmt,
    str::FromStr,
};

use self::score::CandidateRank;
use crate::{
    perf::serving::{RequestLoad, ServingModel},
    random::Rng,
};

/// Promised times of an answer; `None` promises nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slo {
    /// Microseconds to the first token.
    pub ttft_us: Option<u64>,
    /// Mean microseconds per later token.
    pub tpot_us: Option<u64>,
}

/// Request that needs an executor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlacementRequest {
    /// Number of tokens of the prompt.
    pub prompt_tokens: u64,
    /// Rank of the request's adapter; 0 for the base.
    pub rank: u64,
    /// Times that the request was promised.
    pub slo: Slo,
    /// Mean number of tokens of an answer: [`MeanAnswer`](in_flight::MeanAnswer).
    pub answer_tokens: f64,
}

/// Where a request's adapter is, from the view of one executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// On the executor's device, or the request has no adapter.
    Device,
    /// In the executor's host memory; `bytes` must travel to the device.
    Host {
        /// Bytes that are not on the device.
        bytes: u64,
    },
    /// Only in the adapter store.
    Absent {
        /// Total bytes of the adapter.
        bytes: u64,
    },
}

/// Whether an executor can take a request at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    /// The executor is healthy and has the request's base and memory for the request.
    Open,
    /// The executor has another base or too little memory, drains, or is gone.
    Closed,
}

/// Executor as one request sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Number of the executor, which breaks ties.
    pub executor: usize,
    /// Time model of the executor.
    pub model: ServingModel,
    /// Load of the requests that generate.
    pub running: RequestLoad,
    /// Load of the requests that have not begun.
    pub waiting: RequestLoad,
    /// Maximum number of concurrent requests.
    pub places: u64,
    /// Where the executor has the adapter.
    pub adapter: Residency,
    /// Tokens at the prompt's beginning whose KV cache the executor has.
    pub cached_tokens: u64,
    /// Shortest time per token that was promised to a request on this executor, in microseconds.
    pub promised_tpot_us: Option<u64>,
    /// Whether the executor can take the request.
    pub availability: Availability,
}

impl Candidate {
    /// Returns the number of requests on this executor, running and waiting.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.running.requests.saturating_add(self.waiting.requests)
    }
}

/// Rule that chooses an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RoutingPolicy {
    /// Algorithm 1, corrected (C-15), with terms for cold adapters and cached prefixes.
    #[default]
    RankAware,
    /// Algorithm 1 as the paper prints it, for comparison.
    Algo1Printed,
    /// The executor with the fewest requests.
    MostIdle,
    /// The first executor with a free slot (Punica).
    FirstFit,
    /// A random executor for each request.
    Random,
}

/// Error of a policy name that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a routing policy; use rank-aware, algo1-printed, most-idle, first-fit or random")]
pub struct UnknownPolicy(String);

impl RoutingPolicy {
    /// All policies, in the order of their description.
    pub const ALL: [Self; 5] =
        [Self::RankAware, Self::Algo1Printed, Self::MostIdle, Self::FirstFit, Self::Random];

    /// Returns the policy's name in settings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RankAware => "rank-aware",
            Self::Algo1Printed => "algo1-printed",
            Self::MostIdle => "most-idle",
            Self::FirstFit => "first-fit",
            Self::Random => "random",
        }
    }
}

impl fmt::Display for RoutingPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for RoutingPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// Predicted times of a request on an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forecast {
    /// Microseconds to the first token.
    pub ttft_us: u64,
    /// Microseconds for each later token.
    pub tpot_us: u64,
}

/// Executor that a request goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutingChoice {
    /// Number of the chosen candidate.
    pub executor: usize,
    /// Predicted times on that executor.
    pub forecast: Forecast,
}

/// Chooses among the open candidates; `None` if there is none. `draw` is 64 random bits for the policy
/// `random`. The order of `candidates` has no effect; their numbers must differ.
#[must_use]
pub fn choose(
    policy: RoutingPolicy,
    asked: &PlacementRequest,
    candidates: &[Candidate],
    draw: u64,
) -> Option<RoutingChoice> {
    let best = standings(policy, asked, candidates, draw).min()?.candidate;
    Some(RoutingChoice { executor: best.executor, forecast: score::forecast(asked, best) })
}

/// Returns all open candidates, the best first, as in [`choose`]; sorts only as many as the caller takes.
pub fn ranked<'a>(
    policy: RoutingPolicy,
    asked: &PlacementRequest,
    candidates: &'a [Candidate],
    draw: u64,
) -> impl Iterator<Item = &'a Candidate> + use<'a> {
    let mut heap: BinaryHeap<_> = standings(policy, asked, candidates, draw).map(Reverse).collect();
    std::iter::from_fn(move || heap.pop().map(|Reverse(standing)| standing.candidate))
}

fn standings<'a>(
    policy: RoutingPolicy,
    asked: &PlacementRequest,
    candidates: &'a [Candidate],
    draw: u64,
) -> impl Iterator<Item = RankedCandidate<'a>> {
    let open = candidates.iter().filter(|candidate| candidate.availability == Availability::Open);
    open.map(move |candidate| RankedCandidate { rank: rank(policy, asked, candidate, draw), candidate })
}

/// Candidate with its rank: the least is the best.
struct RankedCandidate<'a> {
    rank: CandidateRank,
    candidate: &'a Candidate,
}

impl Ord for RankedCandidate<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank.cmp(&other.rank).then(self.candidate.executor.cmp(&other.candidate.executor))
    }
}

impl PartialOrd for RankedCandidate<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for RankedCandidate<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for RankedCandidate<'_> {}

/// Predicts the times of a request on a candidate.
#[must_use]
pub fn forecast(asked: &PlacementRequest, candidate: &Candidate) -> Forecast {
    score::forecast(asked, candidate)
}

/// Counts promises that would break on `candidate`: to this request, and the strictest to those it has.
#[must_use]
pub fn violations(asked: &PlacementRequest, candidate: &Candidate) -> u32 {
    score::violations(asked, candidate)
}

/// Ranks a candidate under a policy; the least is chosen.
fn rank(policy: RoutingPolicy, asked: &PlacementRequest, candidate: &Candidate, draw: u64) -> CandidateRank {
    let requests = candidate.requests();
    match policy {
        RoutingPolicy::RankAware => score::mended(asked, candidate),
        RoutingPolicy::Algo1Printed => {
            CandidateRank { class: 0, cost: score::printed(asked, candidate), requests: 0 }
        }
        RoutingPolicy::MostIdle => CandidateRank { class: 0, cost: 0.0, requests },
        RoutingPolicy::FirstFit if requests < candidate.places => {
            CandidateRank { class: 0, cost: 0.0, requests: 0 }
        }
        RoutingPolicy::FirstFit => CandidateRank { class: 1, cost: 0.0, requests },
        // Each candidate draws on its own, so neither the order nor other candidates matter.
        RoutingPolicy::Random => {
            CandidateRank { class: 0, cost: 0.0, requests: Rng::keyed(draw).bits(candidate.executor as u64) }
        }
    }
}
