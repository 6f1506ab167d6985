//! The gateway: the queue of all tenants, and the state of each executor as reported by it.

use std::{collections::BTreeMap, time::Duration};

use scheduling::{
    fairness::{
        DequeuedRequest, FairLimits, FairQueue, QueueEntry,
        burst_limit::{BurstCapacity, BurstLimit},
    },
    perf::serving::{RequestLoad, ServingFit, ServingModel},
    random::Rng,
    routing::{
        Availability, Candidate, PlacementRequest, RoutingChoice, choose,
        in_flight::{InFlightLoad, MeanAnswer},
    },
};

use super::{
    FleetRequest, FleetSetup, GatewayKnowledge, Nanos, ServerSetup,
    server::{StepMessage, residency, touch},
};

/// Progress of a request in its executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExecutorStage {
    /// The request has no token yet.
    Waits,
    /// The request has its first token.
    Runs,
}

/// State of a request in the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GatewayRequestState {
    /// The request has not arrived.
    Unknown,
    /// The request is in the queue.
    Waiting,
    /// The request was sent to an executor.
    Sent {
        server: usize,
        stage: ExecutorStage,
        /// Time at which the stage began.
        since_us: u64,
    },
    Ended,
}

/// State of an executor in the gateway.
#[derive(Debug)]
struct View {
    setup: ServerSetup,
    availability: Availability,
    running: InFlightLoad,
    waiting: InFlightLoad,
    resident: BTreeMap<u32, u64>,
    asked: u64,
    /// Serving model fitted to observed timings; `None` if the simulated gateway knows the executor's own
    /// model.
    fit: Option<ServingFit>,
}

/// A request that was sent to an executor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DispatchedRequest {
    pub(super) id: usize,
    pub(super) asked: PlacementRequest,
    pub(super) choice: RoutingChoice,
    /// Tokens charged to the tenant.
    pub(super) cost_tokens: u64,
}

#[derive(Debug)]
pub(super) struct Gateway {
    setup: FleetSetup,
    queue: FairQueue<u16, usize>,
    headroom: BurstLimit<u16>,
    /// Tenant of each request that has arrived.
    tenants: Vec<u16>,
    views: Vec<View>,
    pub(super) states: Vec<GatewayRequestState>,
    deadlines_us: Vec<Option<u64>>,
    /// Tokens charged for each sent request.
    charged: Vec<u64>,
    /// Candidates of the last sent request.
    pub(super) candidates: Vec<Candidate>,
    answers: MeanAnswer,
    draws: u64,
    /// Monotonic clock that ignores backward jumps of the system clock.
    clock_us: u64,
}

impl Gateway {
    pub(super) fn new(setup: FleetSetup, requests: usize) -> Self {
        let views =
            setup.servers.iter().map(|&server| View::new(server, setup.knowledge, Availability::Open));
        Self {
            views: views.collect(),
            setup,
            queue: FairQueue::new(FairLimits { max_waiting: 1 << 20, ..FairLimits::default() }),
            headroom: BurstLimit::default(),
            tenants: vec![0; requests],
            states: vec![GatewayRequestState::Unknown; requests],
            deadlines_us: vec![None; requests],
            charged: vec![0; requests],
            candidates: Vec::new(),
            answers: MeanAnswer::default(),
            draws: 0,
            clock_us: 0,
        }
    }

    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Takes a reading of the system clock, which may jump.
    pub(super) fn tick(&mut self, wall: Nanos) {
        self.clock_us = self.clock_us.max(wall / 1000);
    }

    fn weight(&self, tenant: u16) -> u64 {
        self.setup.weights.get(usize::from(tenant)).copied().unwrap_or(1)
    }

    /// Returns the cost of a request in the queue, with the usual answer length.
    pub(super) fn cost_tokens(&self, request: &FleetRequest) -> u64 {
        u64::from(request.prompt) + self.answers.tokens() as u64
    }

    /// Queues a new request, or one from a failed executor. Returns the requests that were displaced.
    pub(super) fn enqueue(
        &mut self,
        id: usize,
        request: &FleetRequest,
        deadline_us: Option<u64>,
    ) -> Option<usize> {
        let (tenant, weight) = (request.tenant, self.weight(request.tenant));
        let entry =
            QueueEntry { item: id, cost_tokens: self.cost_tokens(request), size: 1, class: 0, deadline_us };
        self.states[id] = GatewayRequestState::Waiting;
        self.deadlines_us[id] = deadline_us;
        self.tenants[id] = tenant;
        self.headroom.ask(&tenant, weight, self.clock_us);
        let out = match self.queue.push(&tenant, weight, entry) {
            Ok(mut displaced) => displaced.pop().map(|turn| turn.entry.item),
            Err(full) => Some(full.entry.item),
        };
        if let Some(id) = out {
            self.states[id] = GatewayRequestState::Ended;
        }
        out
    }

    /// Returns the deadline of a request that arrives now.
    pub(super) fn deadline_us(&self, request: &FleetRequest) -> Option<u64> {
        request.patience.map(|patience| self.clock_us + patience / 1000)
    }

    pub(super) fn expire(&mut self) -> Vec<usize> {
        let gone: Vec<usize> =
            self.queue.expire(self.clock_us).into_iter().map(|turn| turn.entry.item).collect();
        gone.iter().for_each(|id| self.states[*id] = GatewayRequestState::Ended);
        gone
    }

    /// Returns the performance model of each executor.
    fn models(&self) -> Vec<ServingModel> {
        let learnt: Option<Vec<ServingModel>> = self.views.iter().map(View::learnt).collect();
        learnt.unwrap_or_else(|| self.views.iter().map(|view| view.setup.model).collect())
    }

    fn has_place(&self) -> bool {
        self.views.iter().any(View::is_open)
    }

    /// Whether a sendable request waits, checked one by one without the queue's own accounting.
    pub(super) fn keeps_somebody_waiting(&self) -> bool {
        let in_time =
            |id: usize| self.deadlines_us[id].is_none_or(|deadline_us| deadline_us >= self.clock_us);
        let waits = |id: usize| self.states[id] == GatewayRequestState::Waiting && in_time(id);
        let (crowd, places) = (self.headroom.crowd(self.clock_us), self.places());
        let may_go = |id: usize| crowd.lets(&self.tenants[id], places);
        self.has_place() && (0..self.states.len()).any(|id| waits(id) && may_go(id))
    }

    /// Returns the slots of available executors for the burst limit.
    fn places(&self) -> BurstCapacity {
        let open = self.views.iter().filter(|view| view.availability == Availability::Open);
        let each: Vec<usize> = open.map(|view| view.setup.limits.max_running).collect();
        let flood = |places: &usize| (*places as f64 * self.setup.flood_share) as usize;
        BurstCapacity { executors: each.len(), all: each.iter().sum(), floods: each.iter().map(flood).sum() }
    }

    /// Takes the next request of the queue, if an executor has capacity.
    fn next(&mut self) -> Option<DequeuedRequest<u16, usize>> {
        let now_us = self.clock_us;
        self.headroom.update_waiting(|tenant| self.queue.waiting_of(tenant) > 0, now_us);
        let (places, is_open) = (self.places(), self.has_place());
        let crowd = self.headroom.crowd(now_us);
        let turn = self.queue.pop(now_us, |tenant, _| is_open && crowd.lets(tenant, places));
        if turn.is_none() {
            self.headroom.update_waiting(|tenant| self.queue.waiting_of(tenant) > 0, now_us);
        }
        turn
    }

    /// Sends the next request, if an executor has capacity.
    pub(super) fn dispatch(&mut self, requests: &[FleetRequest]) -> Option<DispatchedRequest> {
        let turn = self.next()?;
        self.headroom.send(&turn.tenant, 1);
        let (id, request) = (turn.entry.item, &requests[turn.entry.item]);
        let asked = PlacementRequest {
            prompt_tokens: u64::from(request.prompt),
            rank: u64::from(request.rank),
            slo: self.setup.slo,
            answer_tokens: self.answers.tokens(),
        };
        self.candidates.clear();
        let models = self.models();
        let views = self.views.iter().zip(models).enumerate();
        self.candidates
            .extend(views.map(|(executor, (view, model))| view.candidate(executor, model, request)));
        self.draws += 1;
        let draw = Rng::seeded(self.setup.seed).bits(self.draws);
        let choice = choose(self.setup.policy, &asked, &self.candidates, draw)?;
        let view = &mut self.views[choice.executor];
        view.waiting.add_request(asked.rank, asked.slo.tpot_us, asked.prompt_tokens);
        touch(&mut view.resident, &mut view.asked, view.setup.adapter_slots, request);
        self.states[id] = GatewayRequestState::Sent {
            server: choice.executor,
            stage: ExecutorStage::Waits,
            since_us: self.clock_us,
        };
        self.charged[id] = turn.entry.cost_tokens;
        Some(DispatchedRequest { id, asked, choice, cost_tokens: turn.entry.cost_tokens })
    }

    /// Handles an executor's message; returns whether it is new and its request was not sent elsewhere.
    pub(super) fn hear(&mut self, from: usize, said: StepMessage, request: &FleetRequest) -> bool {
        let (StepMessage::Began(id) | StepMessage::Done(id)) = said;
        let GatewayRequestState::Sent { server, stage, since_us } = self.states[id] else { return false };
        if server != from {
            return false;
        }
        let took = Duration::from_micros(self.clock_us.saturating_sub(since_us));
        match said {
            StepMessage::Began(_) if stage == ExecutorStage::Runs => return false,
            StepMessage::Began(_) => {
                if let Some(fit) = &mut self.views[server].fit {
                    fit.observe_prefill(RequestLoad::of(request.rank.into(), request.prompt.into()), took);
                }
                self.take_out(server, request, ExecutorStage::Waits);
                let (rank, context) = self.running_as(request);
                self.views[server].running.add_request(rank, self.setup.slo.tpot_us, context);
                self.states[id] =
                    GatewayRequestState::Sent { server, stage: ExecutorStage::Runs, since_us: self.clock_us };
            }
            StepMessage::Done(_) => {
                let View { running, fit, .. } = &mut self.views[server];
                if let (ExecutorStage::Runs, Some(fit), 2..) = (stage, fit, request.answer) {
                    fit.observe_decode(running.load(), took / (request.answer - 1));
                }
                self.take_out(server, request, stage);
                self.states[id] = GatewayRequestState::Ended;
                self.reconcile(id, request.tenant, u64::from(request.prompt) + u64::from(request.answer));
                self.answers.observe(u64::from(request.answer));
            }
        }
        true
    }

    /// Corrects the charge of a request to its actual tokens.
    fn reconcile(&mut self, id: usize, tenant: u16, cost_tokens: u64) {
        self.headroom.end(&tenant, 1, cost_tokens, self.clock_us);
        let charged = std::mem::take(&mut self.charged[id]);
        self.queue.reconcile(&tenant, self.weight(tenant), charged, cost_tokens);
    }

    /// Returns the ledger entry of a running request. The progress is ignored, so the same amount is
    /// removed as was added.
    fn running_as(&self, request: &FleetRequest) -> (u64, u64) {
        (u64::from(request.rank), u64::from(request.prompt) + u64::from(request.answer) / 2)
    }

    fn take_out(&mut self, server: usize, request: &FleetRequest, stage: ExecutorStage) {
        if stage == ExecutorStage::Waits {
            self.headroom.begin(&request.tenant, 1);
        }
        let (rank, context) = self.running_as(request);
        let (view, promised) = (&mut self.views[server], self.setup.slo.tpot_us);
        match stage {
            ExecutorStage::Runs => view.running.remove_request(rank, promised, context),
            ExecutorStage::Waits => view.waiting.remove_request(rank, promised, u64::from(request.prompt)),
        }
    }

    /// Handles the loss of an executor: its requests return to the queue. Returns the requests that were
    /// displaced.
    pub(super) fn gone(&mut self, server: usize, requests: &[FleetRequest]) -> Vec<usize> {
        let setup = self.views[server].setup;
        self.views[server] = View::new(setup, self.setup.knowledge, Availability::Closed);
        let has = |state: &GatewayRequestState| matches!(state, GatewayRequestState::Sent { server: at, .. } if *at == server);
        let lost: Vec<usize> = (0..self.states.len()).filter(|&id| has(&self.states[id])).collect();
        for &id in &lost {
            if matches!(self.states[id], GatewayRequestState::Sent { stage: ExecutorStage::Waits, .. }) {
                self.headroom.begin(&requests[id].tenant, 1);
            }
            self.reconcile(id, requests[id].tenant, 0);
        }
        // These requests were already admitted, so no deadline applies.
        lost.into_iter().filter_map(|id| self.enqueue(id, &requests[id], None)).collect()
    }

    /// Marks an executor as available or draining.
    pub(super) fn set_open(&mut self, server: usize, availability: Availability) {
        self.views[server].availability = availability;
    }
}

impl View {
    fn new(setup: ServerSetup, knowledge: GatewayKnowledge, availability: Availability) -> Self {
        let learns = knowledge == GatewayKnowledge::Learnt;
        Self {
            setup,
            availability,
            running: InFlightLoad::default(),
            waiting: InFlightLoad::default(),
            resident: BTreeMap::new(),
            asked: 0,
            fit: learns.then(|| ServingFit::new(setup.model.form, setup.model.cold)),
        }
    }

    /// Returns the fitted model; the links are known.
    fn learnt(&self) -> Option<ServingModel> {
        let ServingModel { link, store, .. } = self.setup.model;
        Some(ServingModel { link, store, ..self.fit.as_ref()?.model()? })
    }

    /// Whether the executor has a free slot and KV capacity; the new request's own size is small in
    /// comparison.
    fn is_open(&self) -> bool {
        let (running, waiting) = (self.running.load(), self.waiting.load());
        let places = self.setup.limits.max_running as u64;
        self.availability == Availability::Open
            && running.requests + waiting.requests < places
            && running.tokens + waiting.tokens < self.setup.kv_tokens
    }

    fn candidate(&self, executor: usize, model: ServingModel, request: &FleetRequest) -> Candidate {
        Candidate {
            executor,
            model,
            running: self.running.load(),
            waiting: self.waiting.load(),
            places: self.setup.limits.max_running as u64,
            adapter: residency(&self.resident, &self.setup, request),
            cached_tokens: 0,
            promised_tpot_us: self.running.promised_tpot_us(),
            availability: if self.is_open() { Availability::Open } else { Availability::Closed },
        }
    }
}
