//! The sequences of a job, with the promise that losing the executor does not lose them: another one goes on, or the same
//! when it is back.
//!
//! Tokens are drawn from a generator keyed by seed and position, so a sequence that was cut off goes on from
//! prompt and emitted tokens as if nothing had happened.
//!
//! A deadline counts from the start, whatever is lost in between. The executor keeps it; an executor that is gone or
//! stuck cannot, so the session ends what is late by more than [`DEADLINE_SLACK`] itself.

use std::{sync::Arc, time::Duration};

use shmproto::message::{ErrorCode, Generate, Output, WireError};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::{
    adapters::{Lease, Place, Registry},
    app::App,
    errors::ApiError,
    executor::{batch::Batch, link::Event},
    executors::{Executors, Member, books::Entry as Booked, member::Ready},
    lifecycle::{Serving, Status},
    metrics::Metrics,
    routing::Route,
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
struct Sequence {
    /// As it was first asked for.
    generate: Generate,
    emitted: Vec<u32>,
    /// True once the scores of the prompt and the count of cached tokens have come.
    begun: bool,
    redos: u32,
    /// The executor it runs on, and the connection.
    index: usize,
    epoch: u64,
    /// Keeps its adapter there.
    place: Option<Arc<Place>>,
    /// Where there are several to choose from, it is in the books of its executor as long as it runs.
    booked: Option<Booked>,
}

/// See the module's description.
#[derive(Debug)]
pub struct Session {
    route: Route,
    executors: Executors,
    registry: Arc<Registry>,
    batch: Batch,
    sequences: Vec<Sequence>,
    status: watch::Receiver<Status>,
    base_hash: [u8; 32],
    metrics: Arc<Metrics>,
    started: Instant,
    /// When the gateway gives up, if the request has a deadline.
    give_up: Option<Instant>,
    /// Read while looking for outputs that are ready, but to be acted on later.
    stashed: Option<(usize, Event)>,
    /// Until when the executor has to be back.
    redo_by: Option<Instant>,
}

impl Session {
    /// Starts `sequences` of what is `leased`, on an executor of those that `serving` describes or, if it has ended, of
    /// those that serve the same base now. One that has no room is left out.
    pub async fn start(
        app: &App,
        serving: &Serving,
        leased: Option<&Lease>,
        sequences: Vec<Generate>,
    ) -> Result<Self, ApiError> {
        let base_hash = serving.welcome.base_hash;
        let now = app.serving().ok().filter(|now| now.welcome.base_hash == base_hash);
        let ready = now.as_ref().map_or(&serving.ready, |now| &now.ready);
        let adapter = leased.map(Lease::entry);
        let mut route = Route::of(&app.executors, app.routing, serving, adapter, &sequences);
        let mut refused = None;
        loop {
            let Some(to) = route.choose(ready, None, &app.registry) else {
                return Err(refused.unwrap_or_else(|| nobody(app)));
            };
            let member = app.executors.member(to.index);
            match begin(app, member, to, leased, &sequences).await {
                Ok((batch, place)) => {
                    route.note(to.index);
                    member.count_request();
                    return Ok(Self::of(app, route, batch, (to, place), sequences, base_hash));
                }
                Err(error) => refused.get_or_insert(error),
            };
            route.avoid(to.index, to.epoch);
        }
    }

    fn of(
        app: &App,
        route: Route,
        batch: Batch,
        (on, place): (&Ready, Option<Arc<Place>>),
        sequences: Vec<Generate>,
        base_hash: [u8; 32],
    ) -> Self {
        let started = Instant::now();
        // All sequences of a request have the same deadline.
        let deadline_ms = sequences.first().map_or(0, |generate| generate.deadline_ms);
        let deadline = (deadline_ms > 0).then(|| Duration::from_millis(deadline_ms.into()));
        let kept = sequences.into_iter().map(|generate| Sequence {
            booked: book(&app.executors, &route, on.index, &generate),
            generate,
            emitted: Vec::new(),
            begun: false,
            redos: 0,
            index: on.index,
            epoch: on.epoch,
            place: place.clone(),
        });
        Self {
            sequences: kept.collect(),
            route,
            executors: app.executors.clone(),
            registry: Arc::clone(&app.registry),
            batch,
            status: app.status.clone(),
            base_hash,
            metrics: Arc::clone(&app.metrics),
            started,
            give_up: deadline.and_then(|deadline| started.checked_add(deadline + DEADLINE_SLACK)),
            stashed: None,
            redo_by: None,
        }
    }

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
                (index, Event::Output(output)) => return Some(self.note(index, output)),
                (index, Event::Lost { epoch }) => {
                    // Put back until it is done: the caller may stop waiting here and come again.
                    self.stashed = Some((index, Event::Lost { epoch }));
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
            (index, Event::Output(output)) => Some(self.note(index, output)),
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
    fn as_loss(&self, (index, event): (usize, Event)) -> (usize, Event) {
        let sequence = &self.sequences[index];
        let is_another = |error: &WireError| match error.code {
            ErrorCode::ShuttingDown => true,
            ErrorCode::AdapterNotFound => sequence.generate.adapter.is_some() && !sequence.begun,
            _ => false,
        };
        match event {
            Event::Output(output) if output.error.as_ref().is_some_and(is_another) => {
                (index, Event::Lost { epoch: sequence.epoch })
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
        sequence.begun = true;
        sequence.emitted.extend(output.tokens.iter().map(|token| token.token));
        if let Some(booked) = &mut sequence.booked {
            let queued = Duration::from_micros(output.queued_us);
            booked.output(output.tokens.len() as u64, output.cached_tokens.into(), queued);
            if output.finish.is_some() {
                sequence.booked = None;
                self.executors.answered(sequence.emitted.len() as u64);
            }
        }
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
            let place = match &self.sequences[index].place {
                Some(place) if to.index != home => match self.registry.bring_beside(place, to.index).await {
                    Ok(place) => Some(Arc::new(place)),
                    Err(error) => {
                        tracing::warn!(executor = member.name(), %error, "a lost sequence cannot go on there");
                        self.route.avoid(to.index, to.epoch);
                        continue;
                    }
                },
                place => place.clone(),
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
            self.sequences[index].booked = book(&self.executors, &self.route, to.index, &again);
            return Ok(());
        }
    }

    fn moved(&mut self, index: usize, to: &Ready, place: Option<Arc<Place>>) {
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
    async fn another(&mut self, home: usize, deadline: Instant) -> Result<Arc<Serving>, ApiError> {
        let (route, registry) = (&self.route, &self.registry);
        loop {
            let returned = self.status.wait_for(|status| match status {
                Status::Ready(serving) => route.choose(&serving.ready, Some(home), registry).is_some(),
                Status::Closing => true,
                Status::Starting { .. } | Status::Lost { .. } => false,
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

impl Sequence {
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
        if again.deadline_ms > 0 {
            let elapsed_ms = u32::try_from(elapsed.as_millis()).unwrap_or(u32::MAX);
            again.deadline_ms =
                again.deadline_ms.checked_sub(elapsed_ms).filter(|left| *left > 0).ok_or_else(late)?;
        }
        Ok(again)
    }
}

/// Brings the adapter to an executor and starts there.
async fn begin(
    app: &App,
    member: &Member,
    to: &Ready,
    leased: Option<&Lease>,
    sequences: &[Generate],
) -> Result<(Batch, Option<Arc<Place>>), ApiError> {
    let place = match leased {
        Some(lease) => Some(Arc::new(app.registry.bring(lease, to.index).await?)),
        None => None,
    };
    let batch = member.executor().generate(to.epoch, sequences.to_vec())?;
    Ok((batch, place))
}

fn book(executors: &Executors, route: &Route, index: usize, generate: &Generate) -> Option<Booked> {
    let tokens = generate.prompt.len() as u64;
    executors.are_several().then(|| executors.member(index).books().enter(route.rank(), tokens))
}

/// Why a request has no executor: there is no room, or nobody may take it.
fn nobody(app: &App) -> ApiError {
    if let Err(full) = app.executors.check_room() {
        return full.into();
    }
    ApiError::executor_unavailable("every executor is drained; take one back with 'holobiont undrain'")
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
