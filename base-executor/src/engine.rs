//! The resident engine: one thread, one loop, three phases.
//!
//! ```text
//! events -> [ schedule -> run -> postprocess ] -> one message of outputs for each gateway
//! ```
//!
//! # Layout
//!
//! - [`event`]: what the loop reacts to.
//! - `queues`: every sequence, by how far it is; `tiers`: the adapters; `computing`: the pass and who shares it.
//! - `calls`: answers about adapters and figures.
//! - [`admission`]: which requests are refused, and with what words.
//! - `cold`: requests that wait for their adapter to reach the device.
//! - `sequence`: one request: its tokens, its blocks, its sampling.
//! - `schedule`: carries out what `policy::batch` decides: who is let in, takes part in a step, or gives way.
//! - `postprocess`: from logits to outputs.
//! - `shortage`: steps that the device has no memory for.
//! - `outboxes`: outputs on their way to the gateways.
//! - [`layers`]: the layer service in the same thread.
//!
//! # Invariants
//!
//! - A sequence is in one of the `queues`, and leaves the engine through `retire` alone: there its blocks and its
//!   adapter are given back.
//! - The oldest sequence is never made to give way, so there is always one that ends, and everyone becomes the oldest.
//! - Nothing here waits for a disk or a network.

pub mod admission;
mod calls;
mod cold;
mod computing;
pub mod event;
pub mod layers;
mod outboxes;
mod postprocess;
mod queues;
mod schedule;
mod sequence;
mod shortage;
mod tiers;

use std::time::Instant;

use cache::KvCache;
use ids::AdapterId;
use model::forward::{BLOCK_TOKENS, ForwardPass};
use policy::{batch::BatchLimits, clock::Clock};
use shmproto::message::{ErrorCode, Generate, Stats, ToGateway, Welcome, WireError};
use tokio::sync::mpsc;

pub(crate) use self::sequence::failure;
use self::{
    admission::Refusal,
    computing::Computing,
    event::{Caller, ConnectionId, Event},
    layers::LayerService,
    outboxes::Outboxes,
    queues::Queues,
    sequence::{Adapted, Hold, Origin, Sequence},
    tiers::Tiers,
};
use crate::{
    placement::Placement,
    pulse::{DeviceLost, Figures, Pulse},
};

/// Rows of logits that prompt log-probabilities may take in a step: a row is as long as the vocabulary.
const SCORED_TOKENS: usize = 64;

/// Events taken in before a step begins, at most: a flood of them does not stop the computing.
const EVENTS_PER_STEP: usize = 1024;

/// What the engine holds itself to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences computed together.
    pub max_running: usize,
    /// Requests that wait for their turn.
    pub max_waiting: usize,
    /// Prompt tokens of all requests that wait; one that waits alone may be longer.
    pub max_waiting_tokens: usize,
    /// Prompt tokens of a step; prompts are cut to fit.
    pub chunk_tokens: usize,
    /// KV blocks of the pool.
    pub kv_blocks: u32,
    /// Most tokens of a sequence.
    pub context_length: usize,
}

impl Limits {
    /// Those of a step.
    fn batch(&self) -> BatchLimits {
        let Self { max_running, chunk_tokens, .. } = *self;
        BatchLimits { max_running, chunk_tokens, scored_tokens: SCORED_TOKENS }
    }
}

/// The engine over a forward pass.
pub struct Engine<P: ForwardPass> {
    computing: Computing<P>,
    queues: Queues<P::Adapter>,
    tiers: Tiers<P::Adapter>,
    kv: KvCache,
    outboxes: Outboxes,
    limits: Limits,
    clock: Box<dyn Clock>,
    welcome: Welcome,
    stats: Stats,
    pulse: Pulse,
    /// When to give up what still runs; set once the process is to end.
    draining_until: Option<Instant>,
    /// The last step found no memory.
    is_short: bool,
}

impl<P: ForwardPass> std::fmt::Debug for Engine<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (waiting, running) = (self.queues.idle().count(), self.queues.running().len());
        f.debug_struct("Engine").field("waiting", &waiting).field("running", &running).finish_non_exhaustive()
    }
}

impl<P: ForwardPass> Engine<P> {
    /// An idle engine. `welcome` is what gateways are told; its list of adapters is filled in here.
    #[must_use]
    pub fn new(pass: P, limits: Limits, welcome: Welcome, clock: Box<dyn Clock>) -> Self {
        Self {
            computing: Computing::new(pass),
            queues: Queues::default(),
            tiers: Tiers::new(),
            kv: KvCache::new(limits.kv_blocks, BLOCK_TOKENS),
            outboxes: Outboxes::default(),
            limits,
            clock,
            welcome,
            stats: Stats::default(),
            pulse: Pulse::default(),
            draining_until: None,
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
    pub fn with_placement(mut self, placement: Box<dyn Placement<P::Adapter>>) -> Self {
        self.tiers.set_device(placement);
        self
    }

    /// Lends the base to split clients, too.
    #[must_use]
    pub fn with_layers(mut self, layers: LayerService<P>) -> Self {
        self.computing.layers = Some(layers);
        self
    }

    /// Serves `events` until it has drained or nobody can send any more.
    ///
    /// # Errors
    /// The device is lost. Nothing is answered any more: gateways redo what was under way once the process is back.
    pub fn run(mut self, mut events: mpsc::Receiver<Event<P::Adapter>>) -> Result<(), DeviceLost> {
        while self.take_events(&mut events) {
            let begin = self.clock.now();
            self.step();
            self.computing.serve_layers(self.clock.now().saturating_duration_since(begin));
            if self.computing.is_lost() {
                return Err(DeviceLost);
            }
        }
        Ok(())
    }

    /// Takes in what has happened, waiting for something if there is nothing to compute. Returns false when the
    /// engine is done.
    fn take_events(&mut self, events: &mut mpsc::Receiver<Event<P::Adapter>>) -> bool {
        if !self.queues.has_work() {
            if self.is_idle() && self.draining_until.is_some() {
                self.computing.finish_layers();
                failpoint::pass("executor.drain_done");
                return false;
            }
            let Some(event) = self.computing.next_event(events) else { return false };
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
            adapters: count(self.tiers.len()),
            running: count(self.queues.running().len()),
            waiting: count(self.queues.idle().count()),
        }
    }

    /// There is no request.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queues.iter().next().is_none()
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
            if self.computing.is_lost() {
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
                if let Some(layers) = &self.computing.layers {
                    layers.hub.drain();
                }
            }
        }
    }

    fn greet(&mut self, connection: ConnectionId) {
        failpoint::pass("executor.welcome");
        let adapters = self.tiers.ids().map(|id| id.0).collect();
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
            Ok(sequence) => self.queues.push(sequence),
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
        if self.queues.iter().any(|sequence| sequence.caller == caller) {
            return Err(Refusal::DuplicateRequest(caller.request));
        }
        let virtual_tokens = request.adapter.map_or(0, |id| self.tiers.virtual_tokens(AdapterId(id)));
        let vocab_size = self.computing.vocab_size();
        let task = admission::check(&request, received_at, vocab_size, &self.limits, virtual_tokens)?;
        let under_way = self.queues.iter().count();
        if under_way >= self.limits.max_running + self.limits.max_waiting {
            return Err(Refusal::QueueFull { under_way });
        }
        let waiting_tokens: usize = self.queues.idle().map(Sequence::pending).sum();
        if waiting_tokens > 0 && waiting_tokens + request.prompt.len() > self.limits.max_waiting_tokens {
            return Err(Refusal::QueueLong { waiting_tokens });
        }
        let adapted = request.adapter.map(|id| self.adapt(AdapterId(id))).transpose()?;
        Ok(Sequence::new(Origin { caller, received_at }, adapted, request.namespace, request.prompt, task))
    }

    fn adapt(&mut self, id: AdapterId) -> Result<Adapted<P::Adapter>, Refusal> {
        let adapter = self.tiers.acquire(id)?;
        Ok(Adapted { id, adapter, hold: Hold::None })
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
        let taken = self.queues.take_where(is_meant);
        let count = taken.len() as u64;
        taken.into_iter().for_each(|sequence| self.retire(sequence));
        count
    }

    /// Retires the sequences that `is_meant` names with an error.
    fn fail_where(&mut self, is_meant: impl Fn(&Sequence<P::Adapter>) -> bool, error: &WireError) {
        for sequence in self.queues.take_where(is_meant) {
            self.outboxes.output(sequence.caller, failure(sequence.caller.request, error.clone()));
            self.retire(sequence);
        }
    }

    /// The one way out of the engine.
    fn retire(&mut self, sequence: Sequence<P::Adapter>) {
        self.kv.release(&sequence.blocks);
        let adapter = sequence.adapter_id();
        if let Some(id) = sequence.held_adapter() {
            self.tiers.leave(id);
        }
        failpoint::pass("executor.retire");
        // The sequence's hold on the adapter ends before its unloading is reported.
        drop(sequence);
        if let Some(unloaded) = adapter.and_then(|id| self.tiers.release(id)) {
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
