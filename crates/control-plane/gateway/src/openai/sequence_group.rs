//! The sequences of a request. If an executor is lost, its sequences resume on another executor, or on the
//! same one after a restart.
//!
//! Sampling draws from a generator keyed by seed and position. A resumed sequence therefore continues from
//! its prompt and emitted tokens as if nothing had happened.
//!
//! A deadline counts from the start, including time lost with an executor. The executor enforces the
//! deadline. An executor that is gone or stuck cannot, so the group ends a request that is late by more than
//! [`DEADLINE_SLACK`].
//!
//! # Layout
//!
//! - here: running sequences and their outputs.
//! - `start`: the start of a request's sequences.
//! - `switch`: the next stage of a sequence, under another adapter.
//! - `sequence`: one sequence, and the parts of its request that remain.

mod sequence;
mod start;
mod switch;

use std::{sync::Arc, time::Duration};

use shmproto::message::{ErrorCode, Finish, Generate, Output, WireError};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use self::sequence::ActiveSequence;
use super::{adapter_switches::AdapterSwitch, generation_request::RequiredNumbers};
use crate::{
    adapters::{ExecutorPin, Registry, ResidencyError},
    admission_queue::AdmissionPermit,
    errors::ApiError,
    executor::{CallError, batch::SequenceBatch, link_messages::SequenceEvent},
    executors::{Executors, executor_handle::ReadyExecutor, load_tracker::TrackedSequence as Booked},
    lifecycle::{GatewayReadiness, ServingState},
    metrics::GatewayMetrics,
    routing::RoutingRequest,
};

/// Time that a lost sequence waits for an executor.
const REDO_WAIT: Duration = Duration::from_secs(20);
/// Interval of checks whether another executor has capacity.
const ROOM_PAUSE: Duration = Duration::from_millis(50);
/// Maximum number of resumptions per sequence.
const MAX_REDOS: u32 = 10;
/// Time after the deadline at which the gateway ends a request that the executor should have ended.
const DEADLINE_SLACK: Duration = Duration::from_millis(250);

/// An output of one of the sequences.
#[derive(Debug)]
pub(crate) struct StageOutput {
    /// Index of the sequence.
    pub index: usize,
    /// Stage that generated the output: 0 until the first switch of the adapter.
    pub stage: usize,
    pub output: Output,
}

/// The sequences of one HTTP request; dropping the group cancels them.
#[derive(Debug)]
pub(crate) struct SequenceGroup {
    route: RoutingRequest,
    permit: AdmissionPermit,
    /// Time spent in the admission queue.
    waited: Duration,
    executors: Executors,
    registry: Arc<Registry>,
    batch: SequenceBatch,
    sequences: Vec<ActiveSequence>,
    /// Later stages of each sequence.
    switches: Arc<[AdapterSwitch]>,
    status: watch::Receiver<GatewayReadiness>,
    /// State of the gateway when the request arrived.
    serving: Arc<ServingState>,
    /// Numeric settings of every executor that may resume a sequence, if the request requires any.
    numbers: Option<RequiredNumbers>,
    metrics: Arc<GatewayMetrics>,
    started: Instant,
    /// Time at which the gateway gives up, if the request has a deadline.
    give_up: Option<Instant>,
    /// Event that `ready` received but that only `next` may handle.
    stashed: Option<(usize, SequenceEvent)>,
    /// Sequence whose next stage is to be started.
    switching: Option<usize>,
    /// Time by which an executor must resume the lost sequences, or take the next stage of one.
    redo_by: Option<Instant>,
}

impl SequenceGroup {
    /// Returns the next output; `None` when all sequences have ended.
    pub(crate) async fn next(&mut self) -> Option<Result<StageOutput, ApiError>> {
        match self.give_up {
            None => self.wait().await,
            Some(give_up) => timeout_at(give_up, self.wait()).await.unwrap_or_else(|_| Some(Err(late()))),
        }
    }

    #[must_use]
    pub(crate) fn redone(&self) -> u32 {
        self.sequences.iter().map(|sequence| sequence.redos).sum()
    }

    async fn wait(&mut self) -> Option<Result<StageOutput, ApiError>> {
        loop {
            if let Some(index) = self.switching {
                // Kept until the stage is started, because the caller may drop this future.
                if let Err(error) = self.switch(index).await {
                    return Some(Err(error));
                }
                self.switching = None;
            }
            let event = match self.stashed.take() {
                Some(event) => event,
                None => self.batch.next().await?,
            };
            match self.as_loss(event) {
                (index, SequenceEvent::Output(output)) => return Some(self.note(index, output)),
                (index, SequenceEvent::Full(full)) => {
                    self.sequences[index].booked = None;
                    return Some(Err(full.into()));
                }
                (index, SequenceEvent::Lost { epoch }) => {
                    // Stashed until the sequence is resumed, because the caller may drop this future.
                    self.stashed = Some((index, SequenceEvent::Lost { epoch }));
                    if std::mem::take(&mut self.sequences[index].foretold) {
                        // Retracts the provisional text at once, because resuming may take long.
                        let stage = self.sequences[index].stage;
                        return Some(Ok(StageOutput { index, stage, output: Output::default() }));
                    }
                    let redone = self.redo(index, epoch).await;
                    self.stashed = None;
                    if let Err(error) = redone {
                        return Some(Err(error));
                    }
                }
            }
        }
    }

    /// Returns an output that has already arrived.
    pub(crate) fn ready(&mut self) -> Option<Result<StageOutput, ApiError>> {
        if self.stashed.is_some() || self.switching.is_some() {
            return None;
        }
        let event = self.batch.ready()?;
        match self.as_loss(event) {
            (index, SequenceEvent::Output(output)) => Some(self.note(index, output)),
            lost => {
                self.stashed = Some(lost);
                None
            }
        }
    }

    pub(crate) fn cancel(&mut self, index: usize) {
        self.batch.cancel(index);
        self.switching = self.switching.filter(|switching| *switching != index);
        self.sequences[index].booked = None;
    }

    /// Turns errors into a loss if another executor can serve the sequence. An executor that shuts down is
    /// lost. An executor that does not know a leased adapter has replaced the one that knew it.
    fn as_loss(&self, (index, event): (usize, SequenceEvent)) -> (usize, SequenceEvent) {
        let sequence = &self.sequences[index];
        let is_another = |error: &WireError| match error.code {
            ErrorCode::ShuttingDown => true,
            ErrorCode::AdapterNotFound => sequence.generate.adapter.is_some(),
            _ => false,
        };
        match event {
            SequenceEvent::Output(output) if output.error.as_ref().is_some_and(is_another) => {
                (index, SequenceEvent::Lost { epoch: sequence.epoch })
            }
            event => (index, event),
        }
    }

    fn note(&mut self, index: usize, mut output: Output) -> Result<StageOutput, ApiError> {
        let sequence = &mut self.sequences[index];
        let stage = sequence.stage;
        if let Some(error) = output.error.take() {
            sequence.booked = None;
            if sequence.is_unfit(&error) {
                return Ok(StageOutput {
                    index,
                    stage,
                    output: Output { finish: Some(Finish::Length), ..output },
                });
            }
            return Err(error.into());
        }
        sequence.foretold = !output.provisional.is_empty();
        if sequence.foretold {
            // Provisional tokens are not computed tokens.
            return Ok(StageOutput { index, stage, output });
        }
        let mut computed = output.tokens.len() as u64;
        if let Some(booked) = &mut sequence.booked {
            booked.output(computed, output.cached_tokens.into(), Duration::from_micros(output.queued_us));
        }
        sequence.emitted.extend(output.tokens.iter().map(|token| token.token));
        if !std::mem::replace(&mut sequence.begun, true) {
            computed += (sequence.generate.prompt.len() as u64).saturating_sub(output.cached_tokens.into());
            if stage == 0 {
                self.permit.begin(1);
                output.queued_us += u64::try_from(self.waited.as_micros()).unwrap_or(u64::MAX);
            }
        }
        self.permit.serve(computed);
        output.finish = output.finish.and_then(|finish| self.end_stage(index, finish));
        Ok(StageOutput { index, stage, output })
    }

    async fn redo(&mut self, index: usize, lost_epoch: u64) -> Result<(), ApiError> {
        if self.sequences[index].redos == MAX_REDOS {
            return Err(lost(&format!("this request was resumed {MAX_REDOS} times already")));
        }
        let again = self.sequences[index].again(&self.switches, self.started.elapsed())?;
        let deadline = *self.redo_by.get_or_insert_with(|| Instant::now() + REDO_WAIT);
        let home = self.sequences[index].index;
        self.sequences[index].booked = None;
        self.route.avoid(home, lost_epoch);
        loop {
            let serving = self.another(home, deadline).await?;
            if serving.welcome.base_hash != self.serving.welcome.base_hash {
                return Err(lost("it restarted with another base model"));
            }
            let executors = self.executors.clone();
            let chosen = self.route.choose(&serving.ready, Some(home), &self.registry);
            let Some(to) = chosen else { continue };
            if self.numbers.as_ref().is_some_and(|numbers| !numbers.are_of(to)) {
                self.route.avoid(to.index, to.epoch);
                continue;
            }
            let member = executors.member(to.index);
            failpoint::pass("gateway.redo");
            let place = match self.place_at(index, to.index).await {
                Ok(place) => place,
                Err(error) if to.index != home => {
                    tracing::warn!(executor = member.name(), %error, "cannot resume a sequence on this \
                        executor");
                    self.route.avoid(to.index, to.epoch);
                    continue;
                }
                Err(ResidencyError::Busy(_) | ResidencyError::Call(CallError::Unavailable(_)))
                    if Instant::now() < deadline =>
                {
                    tokio::time::sleep(ROOM_PAUSE).await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            match member.executor().restart(&mut self.batch, index, to.epoch, again.clone()) {
                Ok(()) => {}
                Err(_) if to.index != home && Instant::now() < deadline => {
                    tokio::time::sleep(ROOM_PAUSE).await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            self.moved(index, to, place);
            self.book(index, &again);
            return Ok(());
        }
    }

    /// Reloads the sequence's adapter on the executor at `to`, if the sequence has one. The home executor
    /// needs the reload too: after a restart it has only adapters whose files lie on this host.
    async fn place_at(&self, index: usize, to: usize) -> Result<Option<Arc<ExecutorPin>>, ResidencyError> {
        match &self.sequences[index].place {
            Some(place) => Ok(Some(Arc::new(self.registry.reload_on(place, to).await?))),
            None => Ok(None),
        }
    }

    fn moved(&mut self, index: usize, to: &ReadyExecutor, place: Option<Arc<ExecutorPin>>) {
        let sequence = &mut self.sequences[index];
        if to.index != sequence.index {
            self.executors.member(to.index).count_taken_over();
        }
        tracing::info!(
            index,
            lost_epoch = sequence.epoch,
            to = to.index,
            "resuming a sequence of a lost executor"
        );
        self.metrics.redone();
        self.redo_by = None;
        sequence.redos += 1;
        (sequence.index, sequence.epoch, sequence.place) = (to.index, to.epoch, place);
        self.route.note(to.index);
    }

    /// Counts a sequence that runs as `sent` in the load of its executor.
    fn book(&mut self, index: usize, sent: &Generate) {
        let sequence = &mut self.sequences[index];
        sequence.booked = Some(book(&self.executors, &self.route, sequence.index, sent));
    }

    /// Waits until an executor can resume a sequence that the one at `home` lost; returns the serving state.
    async fn another(&mut self, home: usize, deadline: Instant) -> Result<Arc<ServingState>, ApiError> {
        let (route, registry) = (&self.route, &self.registry);
        loop {
            let returned = self.status.wait_for(|status| match status {
                GatewayReadiness::Ready(serving) => {
                    route.choose(&serving.ready, Some(home), registry).is_some()
                }
                GatewayReadiness::Closing => true,
                GatewayReadiness::Starting { .. }
                | GatewayReadiness::Lost { .. }
                | GatewayReadiness::Asleep(_) => false,
            });
            // With several executors, no status change reports that one has capacity again.
            let look = match self.executors.are_several() {
                true => deadline.min(Instant::now() + ROOM_PAUSE),
                false => deadline,
            };
            match timeout_at(look, returned).await {
                Ok(Ok(status)) => return Ok(status.serving()?),
                Ok(Err(_)) => return Err(lost("the gateway is shutting down")),
                Err(_) if Instant::now() < deadline => {}
                Err(_) => {
                    return Err(lost(&format!("it did not restart within {} s", REDO_WAIT.as_secs())));
                }
            }
        }
    }
}

fn book(executors: &Executors, route: &RoutingRequest, index: usize, generate: &Generate) -> Booked {
    let tokens = generate.prompt.len() as u64;
    executors.member(index).books().track(route.rank(), route.promised_tpot_us(), tokens)
}

fn late() -> ApiError {
    let message = "the deadline passed while the base-executor was lost or stuck; send it again".to_owned();
    WireError { code: ErrorCode::DeadlineExceeded, message }.into()
}

fn lost(why: &str) -> ApiError {
    ApiError::executor_unavailable(format!(
        "the connection to the base-executor was lost while it worked on this request, and {why}; send it again"
    ))
}
