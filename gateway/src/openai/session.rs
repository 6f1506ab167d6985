//! The sequences of a job, with the promise that losing the executor does not lose them.
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
    app::App,
    errors::ApiError,
    executor::{batch::Batch, link::Event},
    lifecycle::{Serving, Status},
    metrics::Metrics,
};

/// How long a lost sequence waits for the executor to come back.
const REDO_WAIT: Duration = Duration::from_secs(20);
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
    /// The connection it runs over.
    epoch: u64,
}

/// See the module's description.
#[derive(Debug)]
pub struct Session {
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
    /// Starts `sequences` on what `serving` describes.
    pub fn start(app: &App, serving: &Serving, sequences: Vec<Generate>) -> Result<Self, ApiError> {
        let started = Instant::now();
        // All sequences of a request have the same deadline.
        let deadline_ms = sequences.first().map_or(0, |generate| generate.deadline_ms);
        let deadline = (deadline_ms > 0).then(|| Duration::from_millis(deadline_ms.into()));
        let kept = sequences.iter().map(|generate| Sequence {
            generate: generate.clone(),
            emitted: Vec::new(),
            begun: false,
            redos: 0,
            epoch: serving.epoch,
        });
        let kept = kept.collect();
        let batch = app.executor.generate(serving.epoch, sequences)?;
        Ok(Self {
            batch,
            sequences: kept,
            status: app.status.clone(),
            base_hash: serving.welcome.base_hash,
            metrics: Arc::clone(&app.metrics),
            started,
            give_up: deadline.and_then(|deadline| started.checked_add(deadline + DEADLINE_SLACK)),
            stashed: None,
            redo_by: None,
        })
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
        if let Some(error) = output.error.take() {
            return Err(error.into());
        }
        let sequence = &mut self.sequences[index];
        sequence.begun = true;
        sequence.emitted.extend(output.tokens.iter().map(|token| token.token));
        Ok((index, output))
    }

    async fn redo(&mut self, index: usize, lost_epoch: u64) -> Result<(), ApiError> {
        let again = self.sequences[index].again(self.started.elapsed())?;
        let deadline = *self.redo_by.get_or_insert_with(|| Instant::now() + REDO_WAIT);
        let returned = self.status.wait_for(|status| match status {
            Status::Ready(serving) => serving.epoch > lost_epoch,
            Status::Closing => true,
            Status::Starting { .. } | Status::Lost { .. } => false,
        });
        let serving: Arc<Serving> = match timeout_at(deadline, returned).await {
            Ok(Ok(status)) => status.serving()?,
            Ok(Err(_)) => return Err(lost("the gateway is shutting down")),
            Err(_) => {
                return Err(lost(&format!("it did not come back within {} s", REDO_WAIT.as_secs())));
            }
        };
        if serving.welcome.base_hash != self.base_hash {
            return Err(lost("it came back with another base model"));
        }
        failpoint::pass("gateway.redo");
        tracing::info!(index, lost_epoch, "going on with a sequence the executor lost");
        self.metrics.redone();
        self.redo_by = None;
        self.sequences[index].epoch = serving.epoch;
        self.sequences[index].redos += 1;
        Ok(self.batch.restart(index, serving.epoch, again)?)
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

fn late() -> ApiError {
    let message = "the deadline passed while the base-executor was lost or stuck; send it again".to_owned();
    WireError { code: ErrorCode::DeadlineExceeded, message }.into()
}

fn lost(why: &str) -> ApiError {
    ApiError::executor_unavailable(format!(
        "the connection to the base-executor was lost while it worked on this request, and {why}; send it again"
    ))
}
