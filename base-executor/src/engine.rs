//! The resident engine: one thread, one loop, three phases.
//!
//! ```text
//! events -> [ schedule -> run -> postprocess ] -> one message of outputs for each gateway
//! ```
//!
//! # Layout
//!
//! - [`event`]: the events of the loop.
//! - `queues`: all sequences, by state. `adapter_tiers`: the adapters. `model_runner`: the pass and its
//!   users.
//! - `block_updates`: changes of the cached KV blocks, for gateways that watch them.
//! - `control_replies`: replies about adapters and stats.
//! - `requests`: requests become sequences. [`admission`]: refusals and their messages.
//! - `waiting_for_adapter`: requests that wait for their adapter or their KV blocks to reach the device.
//! - `memory`: offload and swap-in of blocks. `sequence`: one sequence: its tokens, blocks and sampling.
//! - `drafts`: draft tokens of a step. `drafter_state`: their drafters. `tree_drafting`: trees of several
//!   sequences at once. `overlapped_drafting`: drafting during a step. `step_cost`: estimated step durations.
//! - `schedule`: executes the decisions of `scheduling::batch`: admission, participation and preemption.
//! - `postprocess`: from logits to outputs. `output_queues`: outputs for the gateways.
//! - `oom_fallback`: steps for which the device lacks memory.
//! - [`layers`]: the layer service in the same thread.
//!
//! # Invariants
//!
//! - A sequence is in one of the `queues`, and leaves the engine only by `retire`, which releases its blocks
//!   and adapter.
//! - The oldest sequence is never preempted, so some sequence always ends, and each becomes the oldest.
//! - The engine never waits for a disk or a network.

mod adapter_tiers;
pub(crate) mod admission;
mod block_updates;
mod control_replies;
mod drafter_state;
pub mod drafts;
pub mod event;
pub(crate) mod layers;
mod memory;
mod model_runner;
mod oom_fallback;
mod output_queues;
mod overlapped_drafting;
mod postprocess;
mod queues;
mod requests;
mod schedule;
mod sequence;
mod step_cost;
mod tree_drafting;
mod waiting_for_adapter;

use std::time::Instant;

use kv_cache::Cache;
use model::forward::{BLOCK_TOKENS, ForwardPass};
use scheduling::{batch::BatchLimits, clock::Clock};
use shmproto::message::{ErrorCode, Stats, ToGateway, Welcome, WireError};
use tokio::sync::mpsc;

pub(crate) use self::sequence::failure;
use self::{
    adapter_tiers::AdapterTiers,
    admission::AdmissionRefusal,
    block_updates::BlockWatchers,
    drafts::Drafts,
    event::{ConnectionId, EngineEvent},
    layers::LayerService,
    model_runner::ModelRunner,
    output_queues::OutputQueues,
    queues::Queues,
    sequence::Sequence,
};
use crate::{
    budget::MemoryBudget,
    constrained_decoding::GrammarWorkers,
    heartbeat::{ComputeHeartbeat, DeviceLost, EngineGauges},
    kv_offload::KvOffload,
    placement::Placement,
};

/// Rows of logits for prompt log-probabilities per step; each row is as long as the vocabulary.
const SCORED_TOKENS: usize = 64;

/// Maximum number of events taken in before a step, so that many events cannot stop the computation.
const EVENTS_PER_STEP: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLimits {
    /// Maximum number of sequences per step.
    pub max_running: usize,
    /// Maximum number of waiting requests.
    pub max_waiting: usize,
    /// Maximum prompt tokens of all waiting requests; a single waiting request may have more.
    pub max_waiting_tokens: usize,
    /// Prompt tokens per step; longer prompts are split.
    pub chunk_tokens: usize,
    pub kv_blocks: u32,
    /// Maximum tokens of a sequence.
    pub context_length: usize,
}

impl EngineLimits {
    fn batch(&self) -> BatchLimits {
        let Self { max_running, chunk_tokens, .. } = *self;
        BatchLimits { max_running, chunk_tokens, scored_tokens: SCORED_TOKENS }
    }
}

pub struct Engine<P: ForwardPass> {
    computing: ModelRunner<P>,
    queues: Queues<P::Adapter>,
    tiers: AdapterTiers<P::Adapter>,
    kv: Cache,
    offload: KvOffload,
    outboxes: OutputQueues,
    watchers: BlockWatchers,
    drafts: Drafts,
    grammars: Option<GrammarWorkers>,
    limits: EngineLimits,
    clock: Box<dyn Clock>,
    began_at: Instant,
    welcome: Welcome,
    stats: Stats,
    heartbeat: ComputeHeartbeat,
    /// Time at which running requests fail; set when the process shuts down.
    draining_until: Option<Instant>,
    /// Whether the latest step found no memory.
    is_short: bool,
    budget: MemoryBudget,
}

impl<P: ForwardPass> std::fmt::Debug for Engine<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (waiting, running) = (self.queues.idle().count(), self.queues.running().len());
        f.debug_struct("Engine").field("waiting", &waiting).field("running", &running).finish_non_exhaustive()
    }
}

impl<P: ForwardPass> Engine<P> {
    /// Creates an idle engine. `welcome` is sent to gateways; its adapter list is filled in here.
    #[must_use]
    pub fn new(pass: P, limits: EngineLimits, welcome: Welcome, clock: Box<dyn Clock>) -> Self {
        Self {
            computing: ModelRunner::new(pass),
            queues: Queues::default(),
            tiers: AdapterTiers::new(),
            kv: Cache::new(kv_cache::CacheSettings {
                max_adapter_blocks: 0,
                ..kv_cache::CacheSettings::device_alone(limits.kv_blocks, BLOCK_TOKENS)
            }),
            offload: KvOffload::default(),
            outboxes: OutputQueues::default(),
            watchers: BlockWatchers::default(),
            drafts: Drafts::default(),
            grammars: None,
            limits,
            began_at: clock.now(),
            clock,
            welcome,
            stats: Stats::default(),
            heartbeat: ComputeHeartbeat::default(),
            draining_until: None,
            is_short: false,
            budget: MemoryBudget::default(),
        }
    }

    /// Reports its loops to `heartbeat`.
    #[must_use]
    pub(crate) fn with_heartbeat(self, heartbeat: ComputeHeartbeat) -> Self {
        Self { heartbeat, ..self }
    }

    /// Sets the device tier; without one, adapters are on the device as soon as they are loaded.
    #[must_use]
    pub fn with_placement(mut self, placement: Box<dyn Placement<P::Adapter>>) -> Self {
        self.tiers.device = placement;
        self
    }

    /// Offloads KV blocks to `below` when they leave the device, as `cache` decides.
    #[must_use]
    pub fn with_memory(mut self, cache: Cache, offload: KvOffload) -> Self {
        // The blocks that a sequence gets despite any number of adapters decide which requests are refused.
        self.limits.kv_blocks = self.limits.kv_blocks.min(cache.sure_kv_blocks());
        self.welcome.kv_blocks = self.limits.kv_blocks;
        self.welcome.device_budget_bytes =
            u64::from(cache.max_adapter_blocks()) * offload.block_bytes() as u64;
        Self { kv: cache, offload, ..self }
    }

    /// Enables drafting. Answers do not depend on it.
    #[must_use]
    pub fn with_drafts(self, drafts: Drafts) -> Self {
        Self { drafts, ..self }
    }

    /// Enables structured output; without `grammars`, such requests are refused.
    #[must_use]
    pub fn with_grammars(self, grammars: GrammarWorkers) -> Self {
        Self { grammars: Some(grammars), ..self }
    }

    /// Sets the memory budget for stats.
    #[must_use]
    pub(crate) fn with_budget(self, budget: MemoryBudget) -> Self {
        Self { budget, ..self }
    }

    /// Serves the base to split clients too.
    #[must_use]
    pub(crate) fn with_layers(mut self, layers: LayerService<P>) -> Self {
        self.computing.layers = Some(layers);
        self
    }

    /// Handles `events` until the engine has drained or all senders are gone.
    ///
    /// # Errors
    /// If the device is lost. The engine then sends no more replies; gateways retry after the restart.
    pub fn run(mut self, mut events: mpsc::Receiver<EngineEvent<P::Adapter>>) -> Result<(), DeviceLost> {
        while self.take_events(&mut events) {
            // Replies to calls wait for no step.
            self.flush();
            let begin = self.clock.now();
            self.step();
            self.computing.serve_layers(self.clock.now().saturating_duration_since(begin));
            if self.computing.is_lost() {
                return Err(DeviceLost);
            }
        }
        Ok(())
    }

    /// Handles pending events; waits for one if there is nothing to compute. False when the engine is done.
    fn take_events(&mut self, events: &mut mpsc::Receiver<EngineEvent<P::Adapter>>) -> bool {
        if !self.queues.has_work() {
            if self.is_idle()
                && self.draining_until.is_some_and(|until| self.is_kept() || until <= self.clock.now())
            {
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
        self.heartbeat.beat(self.gauges());
        true
    }

    fn gauges(&self) -> EngineGauges {
        EngineGauges {
            adapters: count(self.tiers.host.len()),
            running: count(self.queues.running().len()),
            waiting: count(self.queues.idle().count()),
        }
    }

    /// True if the engine has no request.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queues.iter().next().is_none()
    }

    /// Runs one loop: computes the next tokens of the scheduled sequences and sends the outputs.
    pub fn step(&mut self) {
        self.advance_cache_clock();
        self.expire();
        self.admit_ready();
        self.admit();
        let mut plan = self.schedule();
        self.draft(&mut plan);
        self.run_transfers(plan.iter().map(|portion| portion.count).sum());
        if !plan.is_empty() {
            self.stats.steps += 1;
            self.run_plan(&plan);
            // The next process serves the waiting requests from the beginning.
            if self.computing.is_lost() {
                return;
            }
        } else {
            self.await_looks();
        }
        self.flush();
        // Ended sequences free capacity for others. If none runs any more, no event would wake the loop.
        self.admit_ready();
        if !self.queues.has_work() {
            self.run_transfers(0);
            self.flush();
        }
        if !plan.is_empty() {
            failpoint::pass("executor.after_outputs");
        }
    }

    /// Handles an event; replies are sent before the next step, or at its end.
    pub fn handle(&mut self, event: EngineEvent<P::Adapter>) {
        match event {
            EngineEvent::Connected { connection, outbox } => {
                self.outboxes.open(connection, outbox);
                self.greet(connection);
            }
            EngineEvent::Greeted(connection) => self.greet(connection),
            EngineEvent::Disconnected(connection) => self.forget(connection),
            EngineEvent::Generate { connection, request, received_at } => {
                self.generate(connection, request, received_at)
            }
            EngineEvent::Cancel(caller) => self.cancel(caller),
            EngineEvent::AdapterLoaded { caller, loaded } => self.adapter_loaded(caller, loaded),
            EngineEvent::AdapterArrived(id) => self.adapter_arrived(id),
            EngineEvent::FileCopied(copy) => self.file_copied(&copy),
            EngineEvent::UnloadAdapter { connection, call } => self.unload_adapter(connection, &call),
            EngineEvent::GetStats(caller) => self.answer_stats(caller),
            EngineEvent::WatchBlocks(connection) => self.watch_blocks(connection),
            EngineEvent::Wake => {}
            EngineEvent::Drain { until } => {
                failpoint::pass("executor.drain_begun");
                self.draining_until = Some(until);
                if let Some(layers) = &self.computing.layers {
                    layers.dispatcher.drain();
                }
            }
        }
    }

    fn greet(&mut self, connection: ConnectionId) {
        failpoint::pass("executor.welcome");
        let adapters = self.tiers.host.ids().map(|id| id.0).collect();
        let welcome = Welcome { adapters, ..self.welcome.clone() };
        self.outboxes.answer(connection, ToGateway::Welcome(welcome));
    }

    /// Drops the requests of a disconnected gateway.
    fn forget(&mut self, connection: ConnectionId) {
        failpoint::pass("executor.gateway_gone");
        self.outboxes.close(connection);
        self.unwatch_blocks(connection);
        self.stats.cancelled += self.drop_where(|sequence| sequence.caller.connection == connection);
    }

    /// Retires the matching sequences without output; returns their number.
    fn drop_where(&mut self, is_meant: impl Fn(&Sequence<P::Adapter>) -> bool) -> u64 {
        let taken = self.queues.take_where(is_meant);
        let count = taken.len() as u64;
        taken.into_iter().for_each(|sequence| self.retire(sequence));
        count
    }

    /// Retires the matching sequences with an error.
    fn fail_where(&mut self, is_meant: impl Fn(&Sequence<P::Adapter>) -> bool, error: &WireError) {
        for sequence in self.queues.take_where(is_meant) {
            self.outboxes.output(sequence.caller, failure(sequence.caller.request, error.clone()));
            self.retire(sequence);
        }
    }

    /// Releases all that a sequence holds; every sequence leaves the engine here.
    fn retire(&mut self, mut sequence: Sequence<P::Adapter>) {
        sequence.prune(&mut self.kv);
        self.drafts.remember(&mut sequence);
        self.kv.release(&sequence.blocks);
        let adapter = sequence.adapter_id();
        if let Some(id) = sequence.held_adapter() {
            self.tiers.device.end_use(&mut self.kv, id);
        }
        failpoint::pass("executor.retire");
        // The sequence's use of the adapter ends before its unloading is reported.
        drop(sequence);
        if let Some(unloaded) = adapter.and_then(|id| self.tiers.host.release(id)) {
            self.report_unloaded(&unloaded);
        }
    }

    /// Fails the sequences whose deadline has passed.
    fn expire(&mut self) {
        let now = self.clock.now();
        if self.draining_until.is_some_and(|until| until <= now) {
            self.fail_where(|_| true, &AdmissionRefusal::ShuttingDown.into());
        }
        let message = "the request's deadline has passed; allow more time or request fewer tokens".to_owned();
        let error = WireError { code: ErrorCode::DeadlineExceeded, message };
        self.fail_where(|sequence| sequence.task.deadline.is_some_and(|deadline| deadline <= now), &error);
    }

    fn flush(&mut self) {
        self.publish_blocks();
        for connection in self.outboxes.flush() {
            tracing::warn!(?connection, "a gateway does not read its messages; its requests are cancelled");
            self.forget(connection);
        }
    }
}

fn count(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}
