//! The choice of hosts for a request, by the functions that choose among the executors of one host
//! ([`scheduling::routing`]).
//!
//! A candidate is an executor of a host that knows the adapter. If no host knows it, all are candidates, and
//! the chosen one reports the error. Requests that generate nothing concern a file, a job or a session of one
//! host. All of them go to the first host, so that they find it again.

use std::{hash::BuildHasher as _, sync::Arc, time::Instant};

use control_protocol::fleet::{ReportedAdapter, adapter_of};
use scheduling::{
    perf::serving::RequestLoad,
    routing::{
        self, Availability, Candidate, PlacementRequest, Residency,
        cost_estimates::EstimateSelector,
        prefixes::{Blocks, KnownPrefix},
    },
};

use super::{
    HostFleet, HostTable,
    host::{ExecutorReport, Host, HostReport, RegisteredAdapters},
};
use crate::request_parser::{AdapterField, MAX_BEGINNING_BYTES, ParsedRequest, RequestHead, TOKEN_BYTES};

/// Bytes of prompt text per remembered block.
const BLOCK_BYTES: usize = 256;
/// Maximum number of executors per host that are distinguished.
const MAX_EXECUTORS: usize = 64;

#[derive(Debug)]
pub struct Pick {
    /// Endpoints in order, best first.
    pub endpoints: Vec<String>,
    blocks: Blocks,
}

/// The reason why no host was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PickRefusal {
    /// No permitted host is ready.
    #[error("no host is ready; try again shortly")]
    Nobody,
    /// Every host would miss an SLO target.
    #[error("no host can answer within the SLO target; try again in {retry_after_s} s")]
    Late {
        /// Time until a host may meet the target, in seconds.
        retry_after_s: u64,
    },
}

/// Endpoints of the permitted hosts; `None` permits all.
pub type Subset = Option<Vec<String>>;

/// The adapter of a request, as the routing policy needs it.
#[derive(Debug, Clone, Copy)]
struct RequestedAdapter {
    /// Keyed hash of the adapter name.
    hash: u64,
    rank: u64,
    bytes: u64,
}

/// A host with the adapter that the request names.
struct HostCandidate<'a> {
    host: &'a Host,
    latest: &'a HostReport,
    /// `None` for the base and for an unknown adapter.
    adapter: Option<RequestedAdapter>,
    /// Whether the host knows the requested adapter or base.
    is_known: bool,
}

impl HostFleet {
    /// Chooses the hosts of a request.
    ///
    /// # Errors
    /// If no permitted host is ready, or none can meet the SLO targets.
    pub fn pick(
        &self,
        head: &RequestHead,
        ask: &ParsedRequest,
        subset: &Subset,
        now: Instant,
    ) -> Result<Pick, PickRefusal> {
        let mut table = self.table();
        if !head.generates() {
            return self.home(&table, subset, now);
        }
        let blocks = self.blocks(head, ask);
        let seats = self.seats(&table, ask, subset, now);
        let asked = self.asked(ask, &seats).ok_or(PickRefusal::Nobody)?;
        let mut candidates = candidates(&asked, &seats, &table.prefixes.known(&blocks));
        let draw = self.hasher.hash_one(table.decisions);
        if candidates.iter().all(|one| one.availability == Availability::Closed) {
            // All executors are full: the least loaded one queues the request or rejects it.
            candidates.iter_mut().for_each(|one| one.availability = Availability::Open);
        }
        let mut ranked = routing::ranked(self.rules.policy, &asked, &candidates, draw);
        let best = ranked.next().ok_or(PickRefusal::Nobody)?;
        check(&asked, best)?;
        let endpoints = endpoints(&seats, std::iter::once(best).chain(ranked), 1 + self.rules.fallbacks);
        table.decisions += 1;
        let (number, executor) = (best.executor / MAX_EXECUTORS, best.executor % MAX_EXECUTORS);
        if let Some(host) = table.hosts.values_mut().find(|host| host.number == number) {
            host.send(now, executor, RequestLoad::of(asked.rank, asked.prompt_tokens));
        }
        table.prefixes.note(&blocks, number);
        Ok(Pick { endpoints, blocks })
    }

    /// Records that `endpoint` answered a request, which need not be the first one picked.
    pub(crate) fn served(&self, pick: &Pick, endpoint: &str) {
        if pick.endpoints.first().is_some_and(|first| first == endpoint) {
            return;
        }
        let mut table = self.table();
        let number = table.hosts.values().find(|host| host.endpoint == endpoint).map(|host| host.number);
        if let Some(number) = number {
            table.prefixes.note(&pick.blocks, number);
        }
    }

    /// Returns the first ready host and its fallbacks.
    fn home(&self, table: &HostTable, subset: &Subset, now: Instant) -> Result<Pick, PickRefusal> {
        let ready = table.hosts.values().filter(|host| host.is_ready(now, self.rules.stale));
        let allowed = ready.filter(|host| is_in(subset, host)).take(1 + self.rules.fallbacks);
        let endpoints: Vec<_> = allowed.map(|host| host.endpoint.clone()).collect();
        if endpoints.is_empty() {
            Err(PickRefusal::Nobody)
        } else {
            Ok(Pick { endpoints, blocks: Blocks::default() })
        }
    }

    /// Returns the prompt blocks of a request, which depend on its key, model and adapter too.
    pub(super) fn blocks(&self, head: &RequestHead, ask: &ParsedRequest) -> Blocks {
        let namespace = (&head.key, &ask.model, &ask.adapter);
        let size = (BLOCK_BYTES, BLOCK_BYTES / TOKEN_BYTES, MAX_BEGINNING_BYTES / BLOCK_BYTES);
        Blocks::of(&self.hasher, namespace, ask.beginning(), size)
    }

    /// Returns the candidate hosts.
    fn seats<'a>(
        &self,
        table: &'a HostTable,
        ask: &'a ParsedRequest,
        subset: &Subset,
        now: Instant,
    ) -> Vec<HostCandidate<'a>> {
        let allowed = table.hosts.values().filter(|host| is_in(subset, host));
        let ready = allowed.filter_map(|host| Some((host, host.ready_word(now, self.rules.stale)?)));
        // Hosts with the same adapter list are looked up once.
        let mut last: Option<(&Arc<RegisteredAdapters>, Option<RequestedAdapter>)> = None;
        let mut seats: Vec<_> = ready
            .map(|(host, latest)| {
                let Some(name) = named(ask, latest) else {
                    // The request names the base, or an adapter version that this host does not have.
                    let is_known = !matches!(ask.adapter, AdapterField::Generation(_));
                    return HostCandidate { host, latest, adapter: None, is_known };
                };
                let adapter = match last {
                    Some((registered, found)) if Arc::ptr_eq(registered, &latest.registered) => found,
                    _ => latest.registered.get(name).map(|adapter| self.wanted(adapter)),
                };
                last = Some((&latest.registered, adapter));
                HostCandidate { host, latest, adapter, is_known: adapter.is_some() }
            })
            .collect();
        if seats.iter().any(|seat| seat.is_known) {
            seats.retain(|seat| seat.is_known);
        }
        seats
    }

    fn wanted(&self, adapter: &ReportedAdapter) -> RequestedAdapter {
        RequestedAdapter {
            hash: self.hasher.hash_one(&adapter.name),
            rank: adapter.rank,
            bytes: adapter.bytes,
        }
    }

    fn asked(&self, ask: &ParsedRequest, seats: &[HostCandidate<'_>]) -> Option<PlacementRequest> {
        let first = seats.first()?;
        let answers = seats.iter().map(|seat| seat.latest.answer_tokens).sum::<f64>();
        Some(PlacementRequest {
            prompt_tokens: ask.prompt_tokens(),
            rank: first.adapter.map_or(0, |adapter| adapter.rank),
            slo: self.rules.slo,
            answer_tokens: answers / seats.len() as f64,
        })
    }
}

/// Returns the adapter that a request names; `None` for the base.
fn named<'a>(ask: &'a ParsedRequest, latest: &'a HostReport) -> Option<&'a str> {
    match &ask.adapter {
        AdapterField::Not => adapter_of(&ask.model, &latest.base),
        AdapterField::Name(name) => Some(name),
        AdapterField::Generation(beginning) => latest.registered.name_of(*beginning),
    }
}

fn is_in(subset: &Subset, host: &Host) -> bool {
    subset.as_ref().is_none_or(|subset| subset.contains(&host.endpoint))
}

/// Returns every executor of every host.
fn candidates(asked: &PlacementRequest, seats: &[HostCandidate<'_>], known: &KnownPrefix) -> Vec<Candidate> {
    let each = |seat| executors(seat).map(move |(index, executor)| (seat, index, executor));
    let executors = || seats.iter().flat_map(each);
    let estimates = EstimateSelector::of(asked, &executors().map(|(_, _, executor)| executor.seen));
    let candidate = |(seat, index, executor): (&HostCandidate<'_>, usize, &ExecutorReport)| {
        let queued = RequestLoad { requests: seat.latest.queued_each(), ..RequestLoad::default() };
        Candidate {
            executor: seat.host.number * MAX_EXECUTORS + index,
            model: estimates.model(executor.seen),
            running: executor.running,
            waiting: executor.waiting.plus(queued).plus(seat.host.on_the_way(index)),
            places: executor.places,
            adapter: match seat.adapter {
                Some(adapter) if !seat.latest.has(index, adapter.hash) => {
                    Residency::Absent { bytes: adapter.bytes }
                }
                _ => Residency::Device,
            },
            cached_tokens: known.tokens(seat.host.number),
            promised_tpot_us: executor.promised_tpot_us,
            availability: executor.availability,
        }
    };
    // The iterator does not know its length, and growth of the list would move large candidates.
    let mut all = Vec::with_capacity(seats.iter().map(|seat| seat.latest.executors.len()).sum());
    all.extend(executors().map(candidate));
    all
}

fn executors<'a>(
    seat: &HostCandidate<'a>,
) -> impl Iterator<Item = (usize, &'a ExecutorReport)> + Clone + use<'a> {
    seat.latest.executors.iter().take(MAX_EXECUTORS).enumerate()
}

/// Refuses if the best executor would miss an SLO target although it has work that will end.
fn check(asked: &PlacementRequest, best: &Candidate) -> Result<(), PickRefusal> {
    if best.requests() == 0 || routing::violations(asked, best) == 0 {
        return Ok(());
    }
    let ttft_us = routing::forecast(asked, best).ttft_us;
    let late_us = ttft_us.saturating_sub(asked.slo.ttft_us.unwrap_or(ttft_us));
    Err(PickRefusal::Late { retry_after_s: late_us.div_ceil(1_000_000).max(1) })
}

/// Returns the endpoints of the ranked executors, each host once.
fn endpoints<'a>(
    seats: &[HostCandidate<'_>],
    ranked: impl Iterator<Item = &'a Candidate>,
    most: usize,
) -> Vec<String> {
    let mut numbers: Vec<usize> = Vec::with_capacity(most);
    for candidate in ranked {
        let number = candidate.executor / MAX_EXECUTORS;
        if numbers.len() == most {
            break;
        }
        if !numbers.contains(&number) {
            numbers.push(number);
        }
    }
    let endpoint = |number| seats.iter().find(|seat| seat.host.number == number);
    numbers.into_iter().filter_map(endpoint).map(|seat| seat.host.endpoint.clone()).collect()
}
