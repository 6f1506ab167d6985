//! The clock of a fleet, and the messages between gateway and executors.

use std::{cmp::Reverse, collections::BinaryHeap};

use scheduling::routing::{Availability, Candidate};

use super::{
    FleetRequest, FleetSetup, Nanos, RequestEnd, RequestOutcome, SECOND,
    gateway::{DispatchedRequest, Gateway, GatewayRequestState},
    server::{SimulatedExecutor, StepMessage},
};
use crate::random::RandomStream;

/// Period at which the gateway looks for expired requests.
const LATE_EVERY: Nanos = SECOND / 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FleetEvent {
    /// An executor's step ends.
    StepEnds { server: usize, life: u32 },
    /// An awaited adapter arrives.
    Wake { server: usize, life: u32 },
    /// A message reaches an executor.
    Asks { server: usize, id: usize },
    /// A message reaches the gateway.
    Tells { server: usize, began: bool, id: usize },
    /// The gateway asks again for the state of a request.
    AskAgain { id: usize, sent: u32 },
    /// The gateway looks for expired requests.
    Expires,
    /// An injected event occurs.
    Happens(usize),
    /// The gateway notices that an executor has gone or returned.
    Notices { server: usize, life: u32 },
}

/// Events that may be injected into a fleet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum FaultEvent {
    /// An executor fails with all its requests.
    Dies(usize),
    /// An executor joins or returns, slower than its model by this factor.
    Joins(usize, f64),
    /// An executor takes no new requests.
    Drains(usize),
    /// An executor takes new requests again.
    Reopens(usize),
    /// The system clock shifts by this amount.
    Jumps(i64),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Network {
    /// Share of messages that are lost.
    pub(super) loss: f64,
    /// Maximum delay of a message.
    pub(super) delay: Nanos,
    /// Time without a message after which the gateway asks again.
    pub(super) silence: Nanos,
    /// Time until the gateway notices a failure.
    pub(super) notice: Nanos,
}

#[derive(Debug)]
struct ServerSlot {
    server: Option<SimulatedExecutor>,
    /// Number of starts of the executor.
    life: u32,
}

#[derive(Debug)]
pub(super) struct Simulation<'a> {
    requests: &'a [FleetRequest],
    next: usize,
    setup: FleetSetup,
    pub(super) gateway: Gateway,
    slots: Vec<ServerSlot>,
    happenings: Vec<FaultEvent>,
    network: Option<(Network, RandomStream)>,
    events: BinaryHeap<Reverse<(Nanos, u64, FleetEvent)>>,
    order: u64,
    pub(super) now: Nanos,
    clock_offset: i64,
    pub(super) outcomes: Vec<Option<RequestOutcome>>,
    first_tokens: Vec<Option<Nanos>>,
    sent: Vec<u32>,
    /// Whether a check for expired requests is scheduled.
    is_looked_for: bool,
    /// Requests sent in this turn, with their candidates; recorded only for checks.
    pub(super) sent_now: Option<Vec<(DispatchedRequest, Vec<Candidate>)>>,
    pub(super) ended_twice: Vec<usize>,
}

/// Runs a fleet on `requests`, which are in order of arrival, until all have ended.
#[must_use]
pub fn run(setup: &FleetSetup, requests: &[FleetRequest]) -> Vec<RequestOutcome> {
    let mut simulation = Simulation::new(setup, requests);
    while simulation.step() {}
    simulation.outcomes.into_iter().flatten().collect()
}

impl<'a> Simulation<'a> {
    pub(super) fn new(setup: &FleetSetup, requests: &'a [FleetRequest]) -> Self {
        let slots = setup
            .servers
            .iter()
            .map(|&server| ServerSlot { server: Some(SimulatedExecutor::new(server, 1.0)), life: 0 });
        Self {
            requests,
            next: 0,
            gateway: Gateway::new(setup.clone(), requests.len()),
            slots: slots.collect(),
            setup: setup.clone(),
            happenings: Vec::new(),
            network: None,
            events: BinaryHeap::new(),
            order: 0,
            now: 0,
            clock_offset: 0,
            outcomes: vec![None; requests.len()],
            first_tokens: vec![None; requests.len()],
            sent: vec![0; requests.len()],
            is_looked_for: false,
            sent_now: None,
            ended_twice: Vec::new(),
        }
    }

    /// Creates a simulation with injected faults.
    pub(super) fn troubled(
        mut self,
        network: Network,
        stream: RandomStream,
        happenings: &[(Nanos, FaultEvent)],
    ) -> Self {
        self.network = Some((network, stream));
        self.sent_now = Some(Vec::new());
        for &(at, happening) in happenings {
            self.happenings.push(happening);
            self.at(at, FleetEvent::Happens(self.happenings.len() - 1));
        }
        self
    }

    fn at(&mut self, at: Nanos, event: FleetEvent) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, event)));
    }

    /// Advances to the next event; false if there is none.
    pub(super) fn step(&mut self) -> bool {
        if let Some(sent) = &mut self.sent_now {
            sent.clear();
        }
        let arrival = self.requests.get(self.next).map(|request| request.at);
        let event = self.events.peek().map(|Reverse((at, ..))| *at);
        match (arrival, event) {
            (None, None) => return false,
            (Some(at), event) if event.is_none_or(|event| at <= event) => {
                self.advance(at);
                self.next += 1;
                self.arrives(self.next - 1);
            }
            _ => {
                let Some(Reverse((at, _, event))) = self.events.pop() else { return false };
                self.advance(at);
                self.happens(event);
            }
        }
        self.dispatch();
        true
    }

    fn advance(&mut self, at: Nanos) {
        self.now = at;
        self.gateway.tick(at.saturating_add_signed(self.clock_offset));
    }

    fn arrives(&mut self, id: usize) {
        let request = &self.requests[id];
        let deadline_us = self.gateway.deadline_us(request);
        let refused = self.gateway.enqueue(id, request, deadline_us);
        refused.into_iter().for_each(|id| self.ends(id, RequestEnd::Refused, None));
        if deadline_us.is_some() {
            self.look_for_late_ones();
        }
    }

    /// Schedules a check for expired requests while requests wait.
    fn look_for_late_ones(&mut self) {
        if !self.is_looked_for && self.gateway.queued() > 0 {
            self.is_looked_for = true;
            self.at(self.now + LATE_EVERY, FleetEvent::Expires);
        }
    }

    fn happens(&mut self, event: FleetEvent) {
        match event {
            FleetEvent::StepEnds { server, life } => self.step_ends(server, life),
            FleetEvent::Wake { server, life } => {
                if self.slots[server].life == life {
                    self.start_step(server);
                }
            }
            FleetEvent::Asks { server, id } => self.asks(server, id),
            FleetEvent::Tells { server, began, id } => {
                self.hears(server, if began { StepMessage::Began(id) } else { StepMessage::Done(id) });
            }
            FleetEvent::AskAgain { id, sent } => self.ask_again(id, sent),
            FleetEvent::Expires => {
                self.is_looked_for = false;
                self.gateway.expire().into_iter().for_each(|id| self.ends(id, RequestEnd::Expired, None));
                self.look_for_late_ones();
            }
            FleetEvent::Happens(index) => self.befalls(self.happenings[index]),
            FleetEvent::Notices { server, life } => self.notices(server, life),
        }
    }

    fn dispatch(&mut self) {
        while let Some(sent) = self.gateway.dispatch(self.requests) {
            self.sent[sent.id] += 1;
            if let Some(all) = &mut self.sent_now {
                all.push((sent, self.gateway.candidates.clone()));
            }
            self.ask(sent.choice.executor, sent.id);
        }
    }

    /// Sends a request, or asks for its state.
    fn ask(&mut self, server: usize, id: usize) {
        let silence = self.network.as_ref().map(|(network, _)| network.silence);
        if let Some(silence) = silence {
            self.at(self.now + silence, FleetEvent::AskAgain { id, sent: self.sent[id] });
        }
        self.message(FleetEvent::Asks { server, id });
    }

    /// Delivers a message with delay and loss, or at once if messages are reliable.
    fn message(&mut self, event: FleetEvent) {
        let Some((network, stream)) = &mut self.network else { return self.happens(event) };
        let (is_lost, delay) =
            (stream.uniform() < network.loss, (stream.uniform() * network.delay as f64) as Nanos);
        if !is_lost {
            self.at(self.now + delay, event);
        }
    }

    fn ask_again(&mut self, id: usize, sent: u32) {
        if let GatewayRequestState::Sent { server, .. } = self.gateway.states[id]
            && self.sent[id] == sent
        {
            self.ask(server, id);
        }
    }

    fn asks(&mut self, server: usize, id: usize) {
        let request = &self.requests[id];
        let Some(there) = &mut self.slots[server].server else { return };
        match there.submit(id, request, self.now) {
            Some(said) => self.deliver(server, said),
            None => self.start_step(server),
        }
    }

    fn deliver(&mut self, server: usize, said: StepMessage) {
        let (began, id) = match said {
            StepMessage::Began(id) => (true, id),
            StepMessage::Done(id) => (false, id),
        };
        self.message(FleetEvent::Tells { server, began, id });
    }

    fn start_step(&mut self, server: usize) {
        let (now, slot) = (self.now, &mut self.slots[server]);
        let life = slot.life;
        let Some(there) = slot.server.as_mut().filter(|there| !there.is_busy() && there.has_work()) else {
            return;
        };
        match there.begin(now) {
            Ok(took) => self.at(now + took, FleetEvent::StepEnds { server, life }),
            Err(Some(warm_at)) => self.at(warm_at, FleetEvent::Wake { server, life }),
            Err(None) => {}
        }
    }

    fn step_ends(&mut self, server: usize, life: u32) {
        if self.slots[server].life != life {
            return;
        }
        let said = self.slots[server].server.as_mut().map(SimulatedExecutor::end).unwrap_or_default();
        said.into_iter().for_each(|said| self.deliver(server, said));
        // Expired requests free capacity in the queue at once.
        self.dispatch();
        self.start_step(server);
    }

    fn hears(&mut self, server: usize, said: StepMessage) {
        let (StepMessage::Began(id) | StepMessage::Done(id)) = said;
        if !self.gateway.hear(server, said, &self.requests[id]) {
            return;
        }
        self.first_tokens[id].get_or_insert(self.now);
        if let StepMessage::Done(_) = said {
            self.ends(id, RequestEnd::Answered, Some(server));
        }
    }

    fn ends(&mut self, id: usize, end: RequestEnd, server: Option<usize>) {
        let (first_token, sent) = (self.first_tokens[id], self.sent[id]);
        let outcome = RequestOutcome { end, ended: self.now, first_token, server, sent };
        if self.outcomes[id].replace(outcome).is_some() {
            self.ended_twice.push(id);
        }
    }

    fn befalls(&mut self, happening: FaultEvent) {
        let notice = self.network.as_ref().map_or(0, |(network, _)| network.notice);
        match happening {
            FaultEvent::Dies(server) => {
                let slot = &mut self.slots[server];
                if slot.server.take().is_some() {
                    slot.life += 1;
                    let life = slot.life;
                    self.at(self.now + notice, FleetEvent::Notices { server, life });
                }
            }
            FaultEvent::Joins(server, slowness) => {
                let slot = &mut self.slots[server];
                if slot.server.is_none() {
                    slot.life += 1;
                    slot.server = Some(SimulatedExecutor::new(self.setup.servers[server], slowness));
                    let life = slot.life;
                    self.at(self.now + notice, FleetEvent::Notices { server, life });
                } else if let Some(there) = &mut slot.server {
                    there.slowness = slowness;
                }
            }
            FaultEvent::Drains(server) => self.gateway.set_open(server, Availability::Closed),
            FaultEvent::Reopens(server) => {
                if self.slots[server].server.is_some() {
                    self.gateway.set_open(server, Availability::Open);
                }
            }
            FaultEvent::Jumps(by) => self.clock_offset = self.clock_offset.saturating_add(by),
        }
    }

    /// Drops the state of the executor's earlier life and marks it available if it is back.
    fn notices(&mut self, server: usize, life: u32) {
        if self.slots[server].life != life {
            return;
        }
        let refused = self.gateway.gone(server, self.requests);
        refused.into_iter().for_each(|id| self.ends(id, RequestEnd::Refused, None));
        if self.slots[server].server.is_some() {
            self.gateway.set_open(server, Availability::Open);
        }
    }

    /// Counts executors that are idle though they have runnable work.
    pub(super) fn idlers(&self) -> usize {
        let idles = |slot: &&ServerSlot| {
            slot.server.as_ref().is_some_and(|server| server.could_go_on(self.now) && !server.is_busy())
        };
        self.slots.iter().filter(idles).count()
    }
}
