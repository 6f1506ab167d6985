//! Routing: chooses the executor of a request (`CaraServe` section 5), and the one that takes over when an
//! executor is lost.
//!
//! All choices go through [`RoutingRequest::choose`]. Candidates are executors that are connected, have
//! capacity, are not drained, and have not failed this request; `scheduling::routing` ranks them. A single
//! executor is used without ranking. [`RoutingRequest::forecast`] predicts the latency of a request before it
//! is admitted.

use std::collections::BTreeMap;

use scheduling::{
    perf::serving::ServingModel,
    routing::{
        self, Availability, Candidate, Forecast, PlacementRequest, Residency, RoutingPolicy, Slo,
        cost_estimates::EstimateSelector,
    },
};
use shmproto::message::Generate;

use crate::{
    adapters::{AdapterEntry, Registry},
    executors::{
        Executors,
        executor_handle::ReadyExecutor,
        prefix_affinity::{Blocks, KnownPrefix},
    },
    lifecycle::ServingState,
    random::random_u64,
};

#[derive(Debug)]
pub(crate) struct RoutingRequest {
    executors: Executors,
    policy: RoutingPolicy,
    asked: PlacementRequest,
    /// KV blocks of the prompt; `None` if there is only one executor.
    blocks: Option<Blocks>,
    /// Adapter id, and bytes of the adapter.
    adapter: Option<(types::AdapterId, u64)>,
    /// Newest failed or refusing connection per executor. This connection and earlier ones are not used
    /// again.
    failed: BTreeMap<usize, u64>,
}

impl RoutingRequest {
    /// Creates the routing of `sequences` of `adapter`, which usually share a prefix. `slo` are their SLO
    /// targets.
    #[must_use]
    pub(crate) fn of(
        executors: &Executors,
        policy: RoutingPolicy,
        serving: &ServingState,
        (adapter, sequences): (Option<&AdapterEntry>, &[Generate]),
        slo: Slo,
    ) -> Self {
        let first = sequences.first();
        let blocks = first.filter(|_| executors.are_several()).map(|first| {
            executors.prefixes().blocks(&first.namespace, &first.prompt, serving.welcome.block_tokens)
        });
        let asked = PlacementRequest {
            prompt_tokens: first.map_or(0, |first| first.prompt.len() as u64),
            rank: adapter.map_or(0, |adapter| adapter.record.rank.into()),
            slo,
            answer_tokens: executors.answer_tokens(),
        };
        let adapter = adapter.map(|adapter| (adapter.id(), adapter.record.bytes));
        Self { executors: executors.clone(), policy, asked, blocks, adapter, failed: BTreeMap::new() }
    }

    /// Replaces prompt and adapter by those of the next stage of an answer that switches adapters.
    pub(crate) fn enter_stage(
        &mut self,
        serving: &ServingState,
        adapter: Option<&AdapterEntry>,
        stage: &Generate,
    ) {
        let sequences = std::slice::from_ref(stage);
        let next = Self::of(&self.executors, self.policy, serving, (adapter, sequences), self.asked.slo);
        *self = Self { failed: std::mem::take(&mut self.failed), ..next };
    }

    /// Rank of the adapter; 0 for the base.
    #[must_use]
    pub(crate) fn rank(&self) -> u64 {
        self.asked.rank
    }

    /// Target for the time per output token in microseconds.
    #[must_use]
    pub(crate) fn promised_tpot_us(&self) -> Option<u64> {
        self.asked.slo.tpot_us
    }

    /// Forecasts the latency on the best executor of `ready`, given its present load. Returns `None` if that
    /// executor is idle, or if an executor of `ready` has no measurements yet.
    #[must_use]
    pub(crate) fn forecast(&self, ready: &[ReadyExecutor], registry: &Registry) -> Option<Forecast> {
        let known = self.known();
        let candidates = ready.iter().map(|one| {
            let seen = self.executors.member(one.index).books().seen()?;
            Some(self.candidate(one, seen.model, &known, registry))
        });
        let candidates = candidates.collect::<Option<Vec<_>>>()?;
        let chosen = routing::choose(RoutingPolicy::RankAware, &self.asked, &candidates, 0)?;
        let busy = candidates.iter().find(|one| one.executor == chosen.executor && one.requests() > 0);
        busy.map(|_| chosen.forecast)
    }

    /// Excludes connection `epoch` of the executor at `index`, because it failed this request.
    pub(crate) fn avoid(&mut self, index: usize, epoch: u64) {
        let failed = self.failed.entry(index).or_default();
        *failed = epoch.max(*failed);
    }

    /// Chooses the executor of `ready` with the least cost. `home` is the executor that lost the request, if
    /// any; it is taken again, even if drained, when no other executor can take the request.
    #[must_use]
    pub(crate) fn choose<'a>(
        &self,
        ready: &'a [ReadyExecutor],
        home: Option<usize>,
        registry: &Registry,
    ) -> Option<&'a ReadyExecutor> {
        let can = |one: &&ReadyExecutor| self.failed.get(&one.index).is_none_or(|failed| one.epoch > *failed);
        let mut can: Vec<_> = ready.iter().filter(can).collect();
        if !self.executors.are_several() {
            return can.pop();
        }
        let seen = can.iter().map(|one| self.executors.member(one.index).books().seen());
        let seen: Vec<_> = seen.collect();
        let (judge, known) = (EstimateSelector::of(&self.asked, &seen.iter().copied()), self.known());
        let models = seen.iter().map(|seen| judge.model(*seen));
        let candidates =
            can.iter().zip(models).map(|(one, model)| self.candidate(one, model, &known, registry));
        let mut candidates: Vec<_> = candidates.collect();
        let has_room = |one: &Candidate| {
            one.availability == Availability::Open
                && self.executors.member(one.executor).executor().load().free() > 0
        };
        // A resumed request may wait in an executor; a new one goes to an executor with capacity if there is one.
        if home.is_none() && candidates.iter().any(has_room) {
            candidates.retain(has_room);
        }
        let chosen = routing::choose(self.policy, &self.asked, &candidates, random_u64());
        let chosen = chosen.map(|choice| choice.executor).or(home)?;
        can.into_iter().find(|one| one.index == chosen)
    }

    /// Records that the request was sent to the executor at `index`.
    pub(crate) fn note(&self, index: usize) {
        if let Some(blocks) = &self.blocks {
            self.executors.prefixes().note(blocks, index);
        }
    }

    /// Returns which prefix of the prompt each executor has computed.
    fn known(&self) -> KnownPrefix {
        self.blocks
            .as_ref()
            .map_or_else(KnownPrefix::default, |blocks| self.executors.prefixes().known(blocks))
    }

    fn candidate(
        &self,
        one: &ReadyExecutor,
        model: ServingModel,
        known: &KnownPrefix,
        registry: &Registry,
    ) -> Candidate {
        let member = self.executors.member(one.index);
        let (books, load) = (member.books().loads(), member.executor().load());
        let is_open = !member.is_drained() && load.held < load.limit;
        Candidate {
            executor: one.index,
            model,
            running: books.running,
            waiting: books.waiting,
            places: load.places as u64,
            adapter: match self.adapter {
                Some((id, bytes)) if !registry.is_at(id, one.index) => Residency::Absent { bytes },
                _ => Residency::Device,
            },
            cached_tokens: known.tokens(one.index),
            promised_tpot_us: books.promised_tpot_us,
            availability: if is_open { Availability::Open } else { Availability::Closed },
        }
    }
}
