//! Which executor a request goes to (CaraServe §5, Algorithm 1; C-13 to C-16).
//!
//! A request and a snapshot of all executors go in, a choice with its forecast comes out. The same snapshot gives the same
//! choice, in whatever order the candidates stand.
//!
//! # Layout
//!
//! - here: what is asked, who could take it, and the policies.
//! - `score`: what Algorithm 1 makes of a candidate, as printed and mended; forecasts.
//! - [`in_flight`]: how the load of an executor is kept, request by request.
//! - [`prefixes`]: who computed the beginning of a prompt last.
//! - [`cost_estimates`]: what executors are taken to need, from what was seen of them.

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

/// How long an answer may take; what is `None` is not promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slo {
    /// To the first token.
    pub ttft_us: Option<u64>,
    /// For each token after it, in the mean.
    pub tpot_us: Option<u64>,
}

/// A request that is to be placed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlacementRequest {
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// The rank of its adapter; 0 for the base.
    pub rank: u64,
    /// What it was promised.
    pub slo: Slo,
    /// Tokens that answers have in the mean: [`MeanAnswer`](in_flight::MeanAnswer).
    pub answer_tokens: f64,
}

/// Where the adapter of a request is, as seen from one executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// On its device, or there is none.
    Device,
    /// In its memory; so many bytes would travel to the device.
    Host {
        /// Bytes that are not on the device.
        bytes: u64,
    },
    /// In the store alone.
    Absent {
        /// Bytes of it.
        bytes: u64,
    },
}

/// Whether an executor can take a request at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    /// It has the base, memory for the request, and goes on.
    Open,
    /// It has another base or no memory, it drains, or it is gone.
    Closed,
}

/// An executor as a request sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Its number, which ties are broken by.
    pub executor: usize,
    /// What it takes for batches.
    pub model: ServingModel,
    /// What it is generating for.
    pub running: RequestLoad,
    /// What it has not begun to.
    pub waiting: RequestLoad,
    /// Requests that it runs together, at most.
    pub places: u64,
    /// Where it has the adapter.
    pub adapter: Residency,
    /// Tokens at the prompt's beginning that it has keys and values of.
    pub cached_tokens: u64,
    /// The shortest time for a token that was promised to one of those it has.
    pub promised_tpot_us: Option<u64>,
    /// Whether it can take the request.
    pub availability: Availability,
}

impl Candidate {
    /// Requests that it has, running and waiting.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.running.requests.saturating_add(self.waiting.requests)
    }
}

/// How a choice is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RoutingPolicy {
    /// Algorithm 1, mended (C-15), with terms for cold adapters and known beginnings (D4.5).
    #[default]
    RankAware,
    /// Algorithm 1 as the paper prints it, for comparison.
    Algo1Printed,
    /// Who has the fewest requests.
    MostIdle,
    /// The first that has a place (Punica).
    FirstFit,
    /// Anybody.
    Random,
}

/// A policy that nobody knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no routing policy; there are rank-aware, algo1-printed, most-idle, first-fit and random")]
pub struct UnknownPolicy(String);

impl RoutingPolicy {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::RankAware, Self::Algo1Printed, Self::MostIdle, Self::FirstFit, Self::Random];

    /// What settings call it.
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

/// What a request should see on an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forecast {
    /// To its first token.
    pub ttft_us: u64,
    /// For each after it.
    pub tpot_us: u64,
}

/// Where a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutingChoice {
    /// The candidate's number.
    pub executor: usize,
    /// What it should see there.
    pub forecast: Forecast,
}

/// Chooses among those that can take the request; `None` if nobody can. `draw` are 64 random bits, which `random` alone
/// looks at. The order of `candidates` says nothing; their numbers must differ.
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

/// All that can take the request, the best first: [`choose`] takes that one, and whoever cannot have it goes on to the next.
/// They are sorted as far as somebody looks.
pub fn ranked<'a>(
    policy: RoutingPolicy,
    asked: &PlacementRequest,
    candidates: &'a [Candidate],
    draw: u64,
) -> impl Iterator<Item = &'a Candidate> + use<'a> {
    let mut heap: BinaryHeap<_> = standings(policy, asked, candidates, draw).map(Reverse).collect();
    std::iter::from_fn(move || heap.pop().map(|Reverse(standing)| standing.candidate))
}

/// Those that can take the request, with what they are compared by.
fn standings<'a>(
    policy: RoutingPolicy,
    asked: &PlacementRequest,
    candidates: &'a [Candidate],
    draw: u64,
) -> impl Iterator<Item = RankedCandidate<'a>> {
    let open = candidates.iter().filter(|candidate| candidate.availability == Availability::Open);
    open.map(move |candidate| RankedCandidate { rank: rank(policy, asked, candidate, draw), candidate })
}

/// A candidate among others: the least is the best.
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

/// What a request should see on a candidate.
#[must_use]
pub fn forecast(asked: &PlacementRequest, candidate: &Candidate) -> Forecast {
    score::forecast(asked, candidate)
}

/// How many promises would be broken if a candidate took the request: those to it, and the strictest to those it has.
#[must_use]
pub fn violations(asked: &PlacementRequest, candidate: &Candidate) -> u32 {
    score::violations(asked, candidate)
}

/// The least is chosen.
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
        // Each candidate draws for itself, so that neither their order nor who else is there matters.
        RoutingPolicy::Random => {
            CandidateRank { class: 0, cost: 0.0, requests: Rng::keyed(draw).bits(candidate.executor as u64) }
        }
    }
}
