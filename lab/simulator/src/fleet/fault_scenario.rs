//! Injects faults into a fleet and checks its invariants.
//!
//! A scenario is a few seconds of a small fleet in which executors fail, return, drain, and are slower than
//! their models, messages are late or lost, and the system clock jumps. All of it is drawn from one seed,
//! and a seed gives the same scenario to the byte. After every event:
//!
//! - a request has ended at most once, and was sent only to a free slot;
//! - SLO-aware routing has broken the fewest possible SLO targets;
//! - no sendable request waits unless it is held back, and no executor is idle with runnable work;
//! - within a tenant, requests are sent in order of arrival, and other tenants are not served beyond their
//!   weights, if no tenant is held back for exceeding its share.
//!
//! At the end every request was answered, refused, or expired.

use std::hash::{DefaultHasher, Hash, Hasher};

use scheduling::{
    batch::BatchLimits,
    fairness::burst_limit::FLOOD_SHARE,
    perf::{
        linear_fit::LinearFit,
        linear_model::LinearModel,
        serving::{ColdStart, LoraForm, ServingModel},
    },
    routing::{Availability, Candidate, PlacementRequest, RoutingPolicy, Slo, forecast},
};
use serde::Serialize;

use super::{
    FleetRequest, FleetSetup, GatewayKnowledge, LowerTier, Nanos, Prompts, RequestEnd, RequestOutcome,
    SECOND, ServerSetup,
    gateway::{DispatchedRequest, GatewayRequestState},
    run::{FaultEvent, Network, Simulation},
};
use crate::random::RandomStream;

/// Maximum number of events of a scenario.
const MAX_TURNS: usize = 1_000_000;

/// Time at which all faults are repaired.
const MENDED: Nanos = 6 * SECOND;

/// Counters of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ScenarioResult {
    /// Number of requests in the scenario.
    pub requests: u64,
    /// Number of requests that were answered.
    pub answered: u64,
    /// Number of resends because an executor was gone.
    pub sent_again: u64,
    /// Number of failures, joins, drains and clock jumps.
    pub happenings: u64,
    /// Number of simulated events.
    pub turns: u64,
    /// Hash of the results of all requests.
    pub digest: u64,
}

/// Error of a broken invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("world {seed}: {what}")]
pub struct InvariantBroken {
    /// Seed that reproduces the scenario.
    pub seed: u64,
    /// Description of the broken invariant.
    pub what: String,
}

/// Runs the scenario of a seed.
///
/// # Errors
/// If an invariant is broken.
pub fn run_scenario(seed: u64) -> Result<ScenarioResult, InvariantBroken> {
    let plan = FaultScenario::draw(seed);
    let stream = RandomStream::new(seed, "network", 0);
    let mut simulation =
        Simulation::new(&plan.setup, &plan.requests).troubled(plan.network, stream, &plan.happenings);
    let mut watch = InvariantWatch::new(&plan);
    let broken = |what: String| InvariantBroken { seed, what };
    let mut turns = 0;
    while simulation.step() {
        turns += 1;
        if turns > MAX_TURNS {
            return Err(broken("it does not end".to_owned()));
        }
        watch.check(&simulation).map_err(broken)?;
    }
    let outcomes: Vec<RequestOutcome> = simulation.outcomes.iter().flatten().copied().collect();
    if outcomes.len() < plan.requests.len() {
        let lost = simulation.outcomes.iter().position(Option::is_none);
        return Err(broken(format!("request {lost:?} is lost")));
    }
    let mut hasher = DefaultHasher::new();
    outcomes.hash(&mut hasher);
    Ok(ScenarioResult {
        requests: outcomes.len() as u64,
        answered: outcomes.iter().filter(|outcome| outcome.end == RequestEnd::Answered).count() as u64,
        sent_again: outcomes.iter().map(|outcome| u64::from(outcome.sent.saturating_sub(1))).sum(),
        happenings: plan.happenings.len() as u64,
        turns: turns as u64,
        digest: hasher.finish(),
    })
}

/// Fleet, requests and faults of a scenario.
#[derive(Debug)]
struct FaultScenario {
    setup: FleetSetup,
    requests: Vec<FleetRequest>,
    network: Network,
    happenings: Vec<(Nanos, FaultEvent)>,
}

impl FaultScenario {
    fn draw(seed: u64) -> Self {
        let mut stream = RandomStream::new(seed, "world", 0);
        let servers: Vec<ServerSetup> = (0..1 + stream.below(5)).map(|_| server(&mut stream)).collect();
        let promise = |stream: &mut RandomStream, longest: f64| {
            (stream.uniform() < 0.7).then(|| (stream.uniform() * longest) as u64)
        };
        let slo = Slo { ttft_us: promise(&mut stream, 1e6), tpot_us: promise(&mut stream, 60e3) };
        // Half of the scenarios route by SLO targets; the others use the remaining policies.
        let policy = if stream.uniform() < 0.5 {
            RoutingPolicy::RankAware
        } else {
            RoutingPolicy::ALL[stream.below(5)]
        };
        let weights = (0..4).map(|_| 1 + stream.below(3) as u64).collect();
        // In every third scenario over-quota tenants are held back.
        let flood_share = [FLOOD_SHARE, 1.0, 1.0][RandomStream::new(seed, "floods", 0).below(3)];
        let setup = FleetSetup {
            servers,
            knowledge: GatewayKnowledge::Given,
            policy,
            slo,
            weights,
            flood_share,
            seed,
        };
        let requests = requests(&mut stream);
        let is_calm = stream.uniform() < 0.2;
        let nanos = |stream: &mut RandomStream, longest: Nanos| (stream.uniform() * longest as f64) as Nanos;
        let network = Network {
            loss: if is_calm { 0.0 } else { stream.uniform() * 0.3 },
            delay: if is_calm { 0 } else { nanos(&mut stream, SECOND / 50) },
            silence: SECOND / 10 + nanos(&mut stream, SECOND / 2),
            notice: nanos(&mut stream, SECOND / 3),
        };
        let happenings = if is_calm { Vec::new() } else { happenings(&mut stream, setup.servers.len()) };
        Self { setup, requests, network, happenings }
    }
}

fn server(stream: &mut RandomStream) -> ServerSetup {
    let line = LinearFit { alpha: stream.uniform() * 1e-9, beta: stream.uniform() * 1e-3 };
    let model = ServingModel {
        form: if stream.uniform() < 0.5 { LoraForm::Padded } else { LoraForm::TrueRank },
        decode: LinearModel {
            seconds_each: [
                1e-3 + stream.uniform() * 0.03,
                stream.uniform() * 2e-3,
                stream.uniform() * 1e-6,
                stream.uniform() * 1e-5,
            ],
        },
        prefill: LinearModel {
            seconds_each: [stream.uniform() * 0.03, stream.uniform() * 1e-3, stream.uniform() * 1e-6],
        },
        link: line,
        store: line,
        cold: if stream.uniform() < 0.5 { ColdStart::Assisted } else { ColdStart::Waits },
    };
    ServerSetup {
        model,
        costs: None,
        prompts: if stream.uniform() < 0.5 { Prompts::Preempt } else { Prompts::Beside },
        limits: BatchLimits {
            max_running: 1 + stream.below(6),
            chunk_tokens: 16 + stream.below(100),
            scored_tokens: 1,
        },
        adapter_slots: 1 + stream.below(4),
        below: LowerTier::Host,
        rank_bytes: 1 << 20,
        kv_tokens: 200 + stream.below(2000) as u64,
    }
}

/// Creates requests of four tenants, one of which may send ten times as many as all others.
fn requests(stream: &mut RandomStream) -> Vec<FleetRequest> {
    let flood = stream.uniform();
    let mut requests: Vec<FleetRequest> = (0..5 + stream.below(60))
        .map(|_| FleetRequest {
            at: (stream.uniform() * 3.0 * SECOND as f64) as Nanos,
            tenant: if stream.uniform() < flood { 0 } else { stream.below(4) as u16 },
            adapter: stream.below(8) as u32,
            rank: [0, 8, 16, 64, 128][stream.below(5)],
            prompt: 1 + stream.below(80) as u32,
            answer: 1 + stream.below(60) as u32,
            patience: (stream.uniform() < 0.3).then(|| (stream.uniform() * 4.0 * SECOND as f64) as Nanos),
        })
        .collect();
    requests.sort_by_key(|request| request.at);
    requests
}

fn happenings(stream: &mut RandomStream, servers: usize) -> Vec<(Nanos, FaultEvent)> {
    let mut all: Vec<(Nanos, FaultEvent)> = (0..stream.below(12))
        .map(|_| {
            let at = (stream.uniform() * MENDED as f64) as Nanos;
            let (server, slowness) = (stream.below(servers), 0.3 + 3.0 * stream.uniform());
            let happening = match stream.below(8) {
                0..3 => FaultEvent::Dies(server),
                3 | 4 => FaultEvent::Joins(server, slowness),
                5 => FaultEvent::Drains(server),
                6 => FaultEvent::Reopens(server),
                _ => FaultEvent::Jumps(((stream.uniform() - 0.5) * 20.0 * SECOND as f64) as i64),
            };
            (at, happening)
        })
        .collect();
    // At the end the first executor and most others are present; an executor that is gone by then never
    // returns.
    let comes_back: Vec<usize> =
        (0..servers).filter(|server| *server == 0 || stream.uniform() < 0.7).collect();
    all.extend(comes_back.into_iter().flat_map(|server| {
        [(MENDED, FaultEvent::Joins(server, 1.0)), (MENDED + SECOND, FaultEvent::Reopens(server))]
    }));
    all.sort_by_key(|(at, _)| *at);
    all
}

/// Independent accounting that is compared with the simulation's.
#[derive(Debug)]
struct InvariantWatch<'a> {
    plan: &'a FaultScenario,
    /// Tokens charged to each tenant, or used if that is more.
    spent: [u64; 4],
    refunds: u64,
    largest: u64,
    sent: Vec<u32>,
    /// Last charge of each request until it is refunded.
    charged: Vec<u64>,
    /// Tokens of all other tenants at the time when each request was first queued.
    others_before: Vec<Option<u64>>,
}

impl<'a> InvariantWatch<'a> {
    fn new(plan: &'a FaultScenario) -> Self {
        let requests = plan.requests.len();
        let costs = plan.requests.iter().map(|request| u64::from(request.prompt) + 64);
        Self {
            plan,
            spent: [0; 4],
            refunds: 0,
            largest: costs.max().unwrap_or(0),
            sent: vec![0; requests],
            charged: vec![0; requests],
            others_before: vec![None; requests],
        }
    }

    fn check(&mut self, simulation: &Simulation<'_>) -> Result<(), String> {
        if let Some(id) = simulation.ended_twice.first() {
            return Err(format!("request {id} has ended twice"));
        }
        // A request that returned from a failed executor was refunded to its tenant, even if it was sent
        // again since.
        let sent_now = || simulation.sent_now.iter().flatten();
        let waits = |id: &usize| simulation.gateway.states[*id] == GatewayRequestState::Waiting;
        let waiting = (0..self.sent.len()).filter(waits);
        for id in waiting.chain(sent_now().map(|(sent, _)| sent.id)) {
            self.refunds += std::mem::take(&mut self.charged[id]);
        }
        for (sent, candidates) in sent_now() {
            self.choice(sent, candidates)?;
            self.check_order(sent)?;
        }
        if simulation.gateway.keeps_somebody_waiting() {
            return Err("somebody waits who could be sent".to_owned());
        }
        if simulation.idlers() > 0 {
            return Err("an executor does nothing though it could go on".to_owned());
        }
        for (id, state) in simulation.gateway.states.iter().enumerate() {
            if *state == GatewayRequestState::Waiting
                && self.sent[id] == 0
                && self.others_before[id].is_none()
            {
                self.others_before[id] = Some(self.others(self.plan.requests[id].tenant));
            }
        }
        Ok(())
    }

    fn others(&self, tenant: u16) -> u64 {
        (0..4).filter(|other| *other != usize::from(tenant)).map(|other| self.spent[other]).sum()
    }

    fn choice(&self, sent: &DispatchedRequest, candidates: &[Candidate]) -> Result<(), String> {
        let DispatchedRequest { id, asked, choice, .. } = sent;
        let chosen = &candidates[choice.executor];
        if chosen.availability != Availability::Open || chosen.requests() >= chosen.places {
            return Err(format!("request {id} was sent where there is no place"));
        }
        let open = || candidates.iter().filter(|one| one.availability == Availability::Open);
        let least = open().map(|one| broken_promises(asked, one)).min();
        if self.plan.setup.policy == RoutingPolicy::RankAware && Some(broken_promises(asked, chosen)) != least
        {
            return Err(format!("request {id} breaks a promise that another executor would keep"));
        }
        Ok(())
    }

    /// Checks the order in which a request was sent.
    fn check_order(&mut self, sent: &DispatchedRequest) -> Result<(), String> {
        let request = &self.plan.requests[sent.id];
        let tenant = usize::from(request.tenant);
        let is_first = self.sent[sent.id] == 0;
        self.sent[sent.id] += 1;
        let by_weight = self.plan.setup.flood_share == 1.0;
        if is_first
            && by_weight
            && let Some(before) = self.others_before[sent.id]
        {
            let weights = &self.plan.setup.weights;
            let own = self.spent[tenant] + self.ahead(sent.id) + 2 * self.largest;
            let allowed: u64 = (0..4)
                .filter(|other| *other != tenant)
                .map(|other| own * weights[other] / weights[tenant] + 2 * self.largest)
                .sum();
            let passed = self.others(request.tenant) - before;
            if passed > allowed + self.refunds {
                return Err(format!(
                    "{passed} tokens of others went before request {}, of {allowed} that may and {} given back",
                    sent.id, self.refunds
                ));
            }
        }
        self.charged[sent.id] = sent.cost_tokens;
        let cost = u64::from(request.prompt) + u64::from(request.answer);
        self.refunds += sent.cost_tokens.saturating_sub(cost);
        self.spent[tenant] += sent.cost_tokens.max(cost);
        Ok(())
    }

    /// Returns the tokens of the tenant's earlier requests that were not sent yet.
    fn ahead(&self, id: usize) -> u64 {
        let tenant = self.plan.requests[id].tenant;
        let earlier = self.plan.requests[..id].iter().filter(|request| request.tenant == tenant);
        earlier.map(|request| u64::from(request.prompt) + u64::from(request.answer)).sum()
    }
}

/// Counts broken SLO targets by the forecast, computed independently.
fn broken_promises(asked: &PlacementRequest, candidate: &Candidate) -> usize {
    let forecast = forecast(asked, candidate);
    let promised = [
        (forecast.ttft_us, asked.slo.ttft_us),
        (forecast.tpot_us, asked.slo.tpot_us),
        (forecast.tpot_us, candidate.promised_tpot_us),
    ];
    promised.into_iter().filter(|(us, promised)| promised.is_some_and(|promised| *us > promised)).count()
}
