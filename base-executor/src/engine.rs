//! The resident engine: one thread, one loop, three phases.
//!
//! ```text
//! events -> [ schedule -> run -> postprocess ] -> one message of outputs for each gateway
//! ```
//!
//! # Layout
//!
//! - [`event`]: what the loop reacts to.
//! - `calls`: answers about adapters and figures.
//! - [`admission`]: which requests are refused, and with what words.
//! - `cold`: requests that wait for their adapter to reach the device.
//! - `sequence`: one request: its tokens, its blocks, its sampling.
//! - `schedule`: who takes part in a step, with how many tokens; who has to give way.
//! - `postprocess`: from logits to outputs.
//! - `shortage`: steps that the device has no memory for.
//! - `outboxes`: outputs on their way to the gateways.
//! - [`company`]: the layer service in the same thread.
//!
//! # Invariants
//!
//! - A sequence is in `cold`, in `waiting` or in `running`, and leaves the engine through `retire` alone: there its
//!   blocks and its adapter are given back.
//! - `waiting` and `running` are in order of arrival (for one that was cold: of its adapter's), and everything running
//!   is older than everything waiting. The oldest sequence is never made to give way, so there is always one that ends,
//!   and everyone becomes the oldest.
//! - Nothing here waits for a disk or a network.

pub mod admission;
mod calls;
mod cold;
pub mod company;
pub mod event;
mod outboxes;
mod postprocess;
mod schedule;
mod sequence;
mod shortage;

use std::{collections::VecDeque, time::Instant};

use cache::KvCache;
use model::{
    forward::{BLOCK_TOKENS, ForwardPass},
    generation::AdapterId,
};
use shmproto::message::{ErrorCode, Generate, Stats, ToGateway, Welcome, WireError};
use tokio::sync::mpsc;

pub(crate) use self::sequence::failure;
use self::{
    admission::Refusal,
    company::Tenancy,
    event::{Caller, ConnectionId, Event},
    outboxes::Outboxes,
    sequence::{Adapted, Hold, Origin, Sequence},
};
use crate::{
    adapters::AdapterTable,
    clock::Clock,
    placement::{OneTier, Placement},
    pulse::{Figures, Pulse},
};

/// Events taken in before a step begins, at most: a flood of them does not stop the computing.
const EVENTS_PER_STEP: usize = 1024;

/// What the engine holds itself to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences computed together.
    pub max_running: usize,
    /// Requests that wait for their turn.
    pub max_waiting: usize,
    /// Prompt tokens of a step; prompts are cut to fit.
    pub chunk_tokens: usize,
    /// KV blocks of the pool.
    pub kv_blocks: u32,
    /// Most tokens of a sequence.
    pub context_length: usize,
}

/// Nothing can be computed in this process any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the device that holds the base is lost; the log says why, and the process must start anew")]
pub struct DeviceLost;

/// The engine over a forward pass.
pub struct Engine<P: ForwardPass> {
    pass: P,
    limits: Limits,
    clock: Box<dyn Clock>,
    kv: KvCache,
    waiting: VecDeque<Sequence<P::Adapter>>,
    running: Vec<Sequence<P::Adapter>>,
    /// Those that wait for their adapter to reach the device, in order of arrival.
    cold: Vec<Sequence<P::Adapter>>,
    adapters: AdapterTable<P::Adapter>,
    placement: Box<dyn Placement<P::Adapter>>,
    /// Load calls that are answered once their adapter is on the device.
    arriving: Vec<(AdapterId, Caller)>,
    outboxes: Outboxes,
    welcome: Welcome,
    stats: Stats,
    pulse: Pulse,
    /// Split clients that the base is lent to.
    tenancy: Option<Tenancy<P>>,
    /// When to give up what still runs; set once the process is to end.
    draining_until: Option<Instant>,
    /// The logits of a step, kept for the next.
    logits: Vec<f32>,
    /// The last step found no memory.
    is_short: bool,
}

impl<P: ForwardPass> std::fmt::Debug for Engine<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (waiting, running) = (self.waiting.len(), self.running.len());
        f.debug_struct("Engine").field("waiting", &waiting).field("running", &running).finish_non_exhaustive()
    }
}

impl<P: ForwardPass> Engine<P> {
    /// An idle engine. `welcome` is what gateways are told; its list of adapters is filled in here.
    #[must_use]
    pub fn new(pass: P, limits: Limits, welcome: Welcome, clock: Box<dyn Clock>) -> Self {
        Self {
            pass,
            limits,
            clock,
            kv: KvCache::new(limits.kv_blocks, BLOCK_TOKENS),
            waiting: VecDeque::new(),
            running: Vec::new(),
            cold: Vec::new(),
            adapters: AdapterTable::default(),
            placement: Box::new(OneTier),
            arriving: Vec::new(),
            outboxes: Outboxes::default(),
            welcome,
            stats: Stats::default(),
            pulse: Pulse::default(),
            tenancy: None,
            draining_until: None,
            logits: Vec::new(),
            is_short: false,
        }
    }

    /// Shows its turns on `pulse`.
    #[must_use]
    pub fn with_pulse(self, pulse: Pulse) -> Self {
        Self { pulse, ..self }
    }

    /// Asks `placement` where adapters are; without it they are on the device as soon as they are loaded.
    #[must_use]
    pub fn with_placement(self, placement: Box<dyn Placement<P::Adapter>>) -> Self {
        Self { placement, ..self }
    }

    /// Lends the base to split clients, too.
    #[must_use]
    pub fn with_tenancy(self, tenancy: Tenancy<P>) -> Self {
        Self { tenancy: Some(tenancy), ..self }
    }

    /// Serves `events` until it has drained or nobody can send any more.
    ///
    /// # Errors
    /// The device is lost. Nothing is answered any more: gateways redo what was under way once the process is back.
    pub fn run(mut self, mut events: mpsc::Receiver<Event<P::Adapter>>) -> Result<(), DeviceLost> {
        while self.take_events(&mut events) {
            let begin = self.clock.now();
            self.step();
            self.serve_tenants(self.clock.now().saturating_duration_since(begin));
            if self.pass.is_lost() {
                return Err(DeviceLost);
            }
        }
        Ok(())
    }

    /// Takes in what has happened, waiting for something if there is nothing to compute. Returns false when the
    /// engine is done.
    fn take_events(&mut self, events: &mut mpsc::Receiver<Event<P::Adapter>>) -> bool {
        if self.waiting.is_empty() && self.running.is_empty() {
            if self.is_idle() && self.draining_until.is_some() {
                self.finish_tenants();
                failpoint::pass("executor.drain_done");
                return false;
            }
            let Some(event) = self.next_event(events) else { return false };
            self.handle(event);
        }
        for _ in 0..EVENTS_PER_STEP {
            let Ok(event) = events.try_recv() else { break };
            self.handle(event);
        }
        self.pulse.beat(self.figures());
        true
    }

    fn figures(&self) -> Figures {
        Figures {
            adapters: count(self.adapters.len()),
            running: count(self.running.len()),
            waiting: count(self.waiting.len() + self.cold.len()),
        }
    }

    /// There is no request.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.sequences().next().is_none()
    }

    /// One turn of the loop: computes the next tokens of those whose turn it is, and sends what there is to send.
    pub fn step(&mut self) {
        self.expire();
        self.warm_up();
        self.admit();
        let plan = self.schedule();
        if !plan.is_empty() {
            self.stats.steps += 1;
            self.run_plan(&plan);
            // Whoever waits is served by the next process, from the beginning.
            if self.pass.is_lost() {
                return;
            }
        }
        self.flush();
        // Those who have left made room for others. If nobody runs any more, nothing else would wake the loop.
        self.warm_up();
        if !plan.is_empty() {
            failpoint::pass("executor.after_outputs");
        }
    }

    /// Reacts to an event; answers are sent at the end of the next step.
    pub fn handle(&mut self, event: Event<P::Adapter>) {
        match event {
            Event::Connected { connection, outbox } => {
                self.outboxes.open(connection, outbox);
                self.greet(connection);
            }
            Event::Greeted(connection) => self.greet(connection),
            Event::Disconnected(connection) => self.forget(connection),
            Event::Generate { connection, request, received_at } => {
                self.generate(connection, request, received_at)
            }
            Event::Cancel(caller) => self.cancel(caller),
            Event::AdapterLoaded { caller, loaded } => self.adapter_loaded(caller, loaded),
            Event::AdapterArrived(id) => self.adapter_arrived(id),
            Event::UnloadAdapter { connection, call } => self.unload_adapter(connection, &call),
            Event::GetStats(caller) => self.answer_stats(caller),
            Event::Pulse => {}
            Event::Drain { until } => {
                failpoint::pass("executor.drain_begun");
                self.draining_until = Some(until);
                if let Some(tenancy) = &self.tenancy {
                    tenancy.hub.drain();
                }
            }
        }
    }

    fn greet(&mut self, connection: ConnectionId) {
        failpoint::pass("executor.welcome");
        let adapters = self.adapters.ids().map(|id| id.0).collect();
        let welcome = Welcome { adapters, ..self.welcome.clone() };
        self.outboxes.answer(connection, ToGateway::Welcome(welcome));
    }

    fn generate(&mut self, connection: ConnectionId, request: Generate, received_at: Instant) {
        if !self.outboxes.is_open(connection) {
            return;
        }
        failpoint::pass("executor.admission");
        let caller = Caller { connection, request: request.request };
        match self.accept(caller, request, received_at) {
            Ok(sequence) => self.waiting.push_back(sequence),
            Err(refusal) => self.outboxes.output(caller, failure(caller.request, refusal.into())),
        }
    }

    fn accept(
        &mut self,
        caller: Caller,
        request: Generate,
        received_at: Instant,
    ) -> Result<Sequence<P::Adapter>, Refusal> {
        if self.draining_until.is_some() {
            return Err(Refusal::ShuttingDown);
        }
        if self.sequences().any(|sequence| sequence.caller == caller) {
            return Err(Refusal::DuplicateRequest(caller.request));
        }
        let virtual_tokens = request.adapter.map_or(0, |id| self.adapters.virtual_tokens(AdapterId(id)));
        let vocab_size = self.pass.vocab_size();
        let task = admission::check(&request, received_at, vocab_size, &self.limits, virtual_tokens)?;
        let under_way = self.sequences().count();
        if under_way >= self.limits.max_running + self.limits.max_waiting {
            return Err(Refusal::QueueFull { under_way });
        }
        let adapted = request.adapter.map(|id| self.adapt(AdapterId(id))).transpose()?;
        Ok(Sequence::new(Origin { caller, received_at }, adapted, request.namespace, request.prompt, task))
    }

    fn adapt(&mut self, id: AdapterId) -> Result<Adapted<P::Adapter>, Refusal> {
        let adapter = self.adapters.acquire(id)?;
        Ok(Adapted { id, adapter, hold: Hold::None })
    }

    fn sequences(&self) -> impl Iterator<Item = &Sequence<P::Adapter>> {
        self.running.iter().chain(&self.cold).chain(&self.waiting)
    }

    fn cancel(&mut self, caller: Caller) {
        failpoint::pass("executor.cancel");
        self.stats.cancelled += self.drop_where(|sequence| sequence.caller == caller);
    }

    /// A gateway is gone: nobody waits for its requests.
    fn forget(&mut self, connection: ConnectionId) {
        failpoint::pass("executor.gateway_gone");
        self.outboxes.close(connection);
        self.stats.cancelled += self.drop_where(|sequence| sequence.caller.connection == connection);
    }

    /// Retires the sequences that `is_meant` names, in silence; returns how many.
    fn drop_where(&mut self, is_meant: impl Fn(&Sequence<P::Adapter>) -> bool) -> u64 {
        let taken = self.take_where(is_meant);
        let count = taken.len() as u64;
        taken.into_iter().for_each(|sequence| self.retire(sequence));
        count
    }

    /// Retires the sequences that `is_meant` names with an error.
    fn fail_where(&mut self, is_meant: impl Fn(&Sequence<P::Adapter>) -> bool, error: &WireError) {
        for sequence in self.take_where(is_meant) {
            self.outboxes.output(sequence.caller, failure(sequence.caller.request, error.clone()));
            self.retire(sequence);
        }
    }

    fn take_where(&mut self, is_meant: impl Fn(&Sequence<P::Adapter>) -> bool) -> Vec<Sequence<P::Adapter>> {
        if !self.sequences().any(&is_meant) {
            return Vec::new();
        }
        let mut taken: Vec<_> = self.running.extract_if(.., |sequence| is_meant(sequence)).collect();
        taken.extend(self.cold.extract_if(.., |sequence| is_meant(sequence)));
        for sequence in std::mem::take(&mut self.waiting) {
            if is_meant(&sequence) {
                taken.push(sequence);
            } else {
                self.waiting.push_back(sequence);
            }
        }
        taken
    }

    /// The one way out of the engine.
    fn retire(&mut self, sequence: Sequence<P::Adapter>) {
        self.kv.release(&sequence.blocks);
        let adapter = sequence.adapter_id();
        if let Some(id) = sequence.held_adapter() {
            self.placement.leave(id);
        }
        failpoint::pass("executor.retire");
        // The sequence's hold on the adapter ends before its unloading is reported.
        drop(sequence);
        if let Some(unloaded) = adapter.and_then(|id| self.adapters.release(id)) {
            self.report_unloaded(&unloaded);
        }
    }

    /// Ends what has run out of time.
    fn expire(&mut self) {
        let now = self.clock.now();
        if self.draining_until.is_some_and(|until| until <= now) {
            self.fail_where(|_| true, &Refusal::ShuttingDown.into());
        }
        let message = "the request's deadline has passed; allow more time or ask for fewer tokens".to_owned();
        let error = WireError { code: ErrorCode::DeadlineExceeded, message };
        self.fail_where(|sequence| sequence.task.deadline.is_some_and(|deadline| deadline <= now), &error);
    }

    fn flush(&mut self) {
        for connection in self.outboxes.flush() {
            tracing::warn!(?connection, "a gateway does not take its messages; its requests are cancelled");
            self.forget(connection);
        }
    }
}

fn count(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}
