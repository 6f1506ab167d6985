//! The sequences of a job, with the promise that losing the executor does not lose them: another one goes on, or the same
//! when it is back.
//!
//! Tokens are drawn from a generator keyed by seed and position, so a sequence that was cut off goes on from
//! prompt and emitted tokens as if nothing had happened.
//!
//! A deadline counts from the start, whatever is lost in between. The executor keeps it; an executor that is gone or
//! stuck cannot, so the session ends what is late by more than [`DEADLINE_SLACK`] itself.
//!
//! # Layout
//!
//! - here: what comes of sequences that are under way.
//! - `start`: how a job's sequences come to be.

mod start;

use std::{sync::Arc, time::Duration};

use shmproto::message::{ErrorCode, Generate, Output, WireError};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

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

/// How long a lost sequence waits for the executor to come back.
const REDO_WAIT: Duration = Duration::from_secs(20);
/// How often it looks whether another executor has room for it.
const ROOM_PAUSE: Duration = Duration::from_millis(50);
/// How often a sequence is redone.
const MAX_REDOS: u32 = 10;
/// How much later than the executor the gateway ends what missed its deadline.
const DEADLINE_SLACK: Duration = Duration::from_millis(250);

#[derive(Debug)]
struct ActiveSequence {
    /// As it was first asked for.
    generate: Generate,
    emitted: Vec<u32>,
    /// True once the scores of the prompt and the count of cached tokens have come.
    begun: bool,
    /// Tokens were told that are not verified yet.
    foretold: bool,
    redos: u32,
    /// The executor it runs on, and the connection.
    index: usize,
    epoch: u64,
    /// Keeps its adapter there.
    place: Option<Arc<ExecutorPin>>,
    /// It is in the books of its executor as long as it runs.
    booked: Option<Booked>,
}

/// See the module's description.
#[derive(Debug)]
pub struct SequenceGroup {
    route: RoutingRequest,
    turn: AdmissionPermit,
    /// How long it waited for its turn.
    waited: Duration,
    executors: Executors,
    registry: Arc<Registry>,
    batch: SequenceBatch,
    sequences: Vec<ActiveSequence>,
    status: watch::Receiver<GatewayReadiness>,
    base_hash: [u8; 32],
    metrics: Arc<GatewayMetrics>,
    started: Instant,
    /// When the gateway gives up, if the request has a deadline.
    give_up: Option<Instant>,
    /// Read while looking for outputs that are ready, but to be acted on later.
    stashed: Option<(usize, SequenceEvent)>,
    /// Until when the executor has to be back.
    redo_by: Option<Instant>,
}

impl SequenceGroup {
    /// The next output with the index of its sequence; `None` when all have ended.
    pub async fn next(&mut self) -> Option<Result<(usize, Output), ApiError>> {
        match self.give_up {
            None => self.wait().await,
            Some(give_up) => timeout_at(give_up, self.wait()).await.unwrap_or_else(|_| Some(Err(late()))),
        }
    }

    /// How often a sequence was redone.
    #[must_use]
    pub fn redone(&self) -> u32 {
        self.sequences.iter().map(|sequence| sequence.redos).sum()
    }

    async fn wait(&mut self) -> Option<Result<(usize, Output), ApiError>> {
        loop {
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
                    // Put back until it is done: the caller may stop waiting here and come again.
                    self.stashed = Some((index, SequenceEvent::Lost { epoch }));
                    if std::mem::take(&mut self.sequences[index].foretold) {
                        // Whoever goes on with it may draft something else, and not soon.
                        return Some(Ok((index, Output::default())));
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

    /// An output that has already arrived, if there is one.
    pub fn ready(&mut self) -> Option<Result<(usize, Output), ApiError>> {
        if self.stashed.is_some() {
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

    /// Ends a sequence early.
    pub fn cancel(&mut self, index: usize) {
        self.batch.cancel(index);
        self.sequences[index].booked = None;
    }

    /// An executor that shuts down is one that is lost: another takes its place. So is one that does not know an adapter
    /// which is leased: it took the place of the one that did while the request was on its way.
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

    fn note(&mut self, index: usize, mut output: Output) -> Result<(usize, Output), ApiError> {
        let sequence = &mut self.sequences[index];
        if let Some(error) = output.error.take() {
            sequence.booked = None;
            return Err(error.into());
        }
        sequence.foretold = !output.provisional.is_empty();
        if sequence.foretold {
            // Nothing has been computed yet.
            return Ok((index, output));
        }
        let mut computed = output.tokens.len() as u64;
        if let Some(booked) = &mut sequence.booked {
            let queued = Duration::from_micros(output.queued_us);
            booked.output(computed, output.cached_tokens.into(), queued);
            if output.finish.is_some() {
                sequence.booked = None;
                self.executors.answered(sequence.emitted.len() as u64 + computed);
            }
        }
        sequence.emitted.extend(output.tokens.iter().map(|token| token.token));
        if !std::mem::replace(&mut sequence.begun, true) {
            self.turn.begin(1);
            computed += (sequence.generate.prompt.len() as u64).saturating_sub(output.cached_tokens.into());
            output.queued_us += u64::try_from(self.waited.as_micros()).unwrap_or(u64::MAX);
        }
        self.turn.serve(computed);
        Ok((index, output))
    }

    async fn redo(&mut self, index: usize, lost_epoch: u64) -> Result<(), ApiError> {
        let again = self.sequences[index].again(self.started.elapsed())?;
        let deadline = *self.redo_by.get_or_insert_with(|| Instant::now() + REDO_WAIT);
        let home = self.sequences[index].index;
        self.sequences[index].booked = None;
        self.route.avoid(home, lost_epoch);
        loop {
            let serving = self.another(home, deadline).await?;
            if serving.welcome.base_hash != self.base_hash {
                return Err(lost("it came back with another base model"));
            }
            let executors = self.executors.clone();
            let chosen = self.route.choose(&serving.ready, Some(home), &self.registry);
            let Some(to) = chosen else { continue };
            let member = executors.member(to.index);
            failpoint::pass("gateway.redo");
            let place = match self.place_at(index, to.index).await {
                Ok(place) => place,
                Err(error) if to.index != home => {
                    tracing::warn!(executor = member.name(), %error, "a lost sequence cannot go on there");
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
            self.sequences[index].booked = Some(book(&self.executors, &self.route, to.index, &again));
            return Ok(());
        }
    }

    /// A place for a sequence's adapter in the executor at `to`. At home as well: what came back there has those whose files lie on
    /// this host, and no more.
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
            "going on with a sequence the executor lost"
        );
        self.metrics.redone();
        self.redo_by = None;
        sequence.redos += 1;
        (sequence.index, sequence.epoch, sequence.place) = (to.index, to.epoch, place);
        self.route.note(to.index);
    }

    /// What is served as soon as an executor can go on with a sequence that the one at `home` lost.
    async fn another(&mut self, home: usize, deadline: Instant) -> Result<Arc<ServingState>, ApiError> {
        let (route, registry) = (&self.route, &self.registry);
        loop {
            let returned = self.status.wait_for(|status| match status {
                GatewayReadiness::Ready(serving) => {
                    route.choose(&serving.ready, Some(home), registry).is_some()
                }
                GatewayReadiness::Closing => true,
                GatewayReadiness::Starting { .. } | GatewayReadiness::Lost { .. } => false,
            });
            // No status tells that one of several has room again.
            let look = match self.executors.are_several() {
                true => deadline.min(Instant::now() + ROOM_PAUSE),
                false => deadline,
            };
            match timeout_at(look, returned).await {
                Ok(Ok(status)) => return Ok(status.serving()?),
                Ok(Err(_)) => return Err(lost("the gateway is shutting down")),
                Err(_) if Instant::now() < deadline => {}
                Err(_) => {
                    return Err(lost(&format!("it did not come back within {} s", REDO_WAIT.as_secs())));
                }
            }
        }
    }
}

impl ActiveSequence {
    /// What is left to do `elapsed` after the start.
    fn again(&self, elapsed: Duration) -> Result<Generate, ApiError> {
        if self.redos == MAX_REDOS {
            return Err(lost(&format!("this request was redone {MAX_REDOS} times already")));
        }
        let mut again = self.generate.clone();
        let done = u32::try_from(self.emitted.len()).unwrap_or(u32::MAX);
        again.prompt.extend_from_slice(&self.emitted);
        again.generated = done;
        again.max_tokens = again.max_tokens.saturating_sub(done);
        again.min_tokens = again.min_tokens.saturating_sub(done);
        if self.begun {
            again.prompt_logprobs = None;
        }
        again.deadline_ms = left_ms(again.deadline_ms, elapsed)?;
        Ok(again)
    }
}

fn book(executors: &Executors, route: &RoutingRequest, index: usize, generate: &Generate) -> Booked {
    let tokens = generate.prompt.len() as u64;
    executors.member(index).books().track(route.rank(), route.promised_tpot_us(), tokens)
}

/// What is left of a deadline after so long; 0 is none.
fn left_ms(deadline_ms: u32, elapsed: Duration) -> Result<u32, ApiError> {
    if deadline_ms == 0 {
        return Ok(0);
    }
    let elapsed_ms = u32::try_from(elapsed.as_millis()).unwrap_or(u32::MAX);
    deadline_ms.checked_sub(elapsed_ms).filter(|left| *left > 0).ok_or_else(late)
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
