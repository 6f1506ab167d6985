//! Starts the sequences of a request: admission, choice of an executor, adapter load.

use std::{sync::Arc, time::Duration};

use shmproto::message::Generate;
use tokio::time::Instant;

use super::{
    DEADLINE_SLACK, SequenceGroup, book,
    sequence::{ActiveSequence, left_ms},
};
use crate::{
    adapters::{ExecutorPin, Lease},
    admission_queue::{AdmissionPermit, AdmissionRequest},
    app::App,
    errors::ApiError,
    executor::{backlog::Backlog, batch::SequenceBatch, link_messages::EndedSlots},
    executors::executor_handle::ReadyExecutor,
    lifecycle::ServingState,
    openai::generation_request::{GenerationRequest, PromptInput},
    routing::RoutingRequest,
};

/// Copies of a sequence's prompt in memory: the parsed request, the running sequence, and the message to the
/// executor.
const PROMPT_COPIES: usize = 3;

struct StartingGroup<'a> {
    app: &'a App,
    job: &'a GenerationRequest,
    sequences: Vec<Generate>,
    backlog: Arc<Backlog>,
    route: RoutingRequest,
    permit: AdmissionPermit,
    started: Instant,
    waited: Duration,
}

impl SequenceGroup {
    /// Starts the sequences of `job` after admission. Candidates are the executors that now serve the
    /// request's base; an executor that refuses is skipped.
    pub(crate) async fn start(app: &App, job: &GenerationRequest) -> Result<Self, ApiError> {
        let (started, principal) = (Instant::now(), job.principal(&app.classes));
        let backlog = Backlog::new(app.memory.reserve(&principal.tenant, prompt_bytes(job))?);
        let sequences = job.sequences();
        let slo = app.classes.get(principal.class).slo;
        let adapter = job.target.lease.as_ref().map(Lease::entry);
        let route = RoutingRequest::of(&app.executors, app.routing, &job.serving, (adapter, &sequences), slo);
        let permit = app.admission.wait(AdmissionRequest {
            principal,
            sequences: sequences.len(),
            cost_tokens: cost_tokens(app, job, &sequences),
            deadline: deadline(&sequences, started),
            forecast: route.forecast(&now_serving(app, job).ready, &app.registry),
        });
        let permit = permit.await?;
        let waited = started.elapsed();
        StartingGroup { app, job, sequences, backlog, route, permit, started, waited }.begin().await
    }
}

impl StartingGroup<'_> {
    async fn begin(mut self) -> Result<SequenceGroup, ApiError> {
        let serving = now_serving(self.app, self.job);
        let mut refused = None;
        loop {
            let Some(to) = self.route.choose(&serving.ready, None, &self.app.registry) else {
                return Err(refused.unwrap_or_else(nobody));
            };
            if self.job.required_numbers().is_some_and(|numbers| !numbers.are_of(to)) {
                self.route.avoid(to.index, to.epoch);
                continue;
            }
            match self.begin_at(to).await {
                Ok((batch, place)) => {
                    self.route.note(to.index);
                    self.app.executors.member(to.index).count_request();
                    return Ok(self.session(batch, to, place.as_ref()));
                }
                Err(error) => refused.get_or_insert(error),
            };
            self.route.avoid(to.index, to.epoch);
        }
    }

    /// Loads the adapter on an executor and starts the sequences there.
    async fn begin_at(
        &mut self,
        to: &ReadyExecutor,
    ) -> Result<(SequenceBatch, Option<Arc<ExecutorPin>>), ApiError> {
        let place = match &self.job.target.lease {
            None => None,
            Some(lease) => {
                if !self.app.registry.is_at(lease.id, to.index) {
                    // Releases capacity before the load, because the request now waits only for its adapter.
                    self.permit.release();
                }
                Some(Arc::new(self.app.registry.load_on(lease, to.index).await?))
            }
        };
        let mut sequences = self.sequences.clone();
        for sequence in &mut sequences {
            sequence.deadline_ms = left_ms(sequence.deadline_ms, self.started.elapsed())?;
            if let Some(next) = self.job.switches.first() {
                next.bound(sequence, 0);
            }
        }
        let executor = self.app.executors.member(to.index).executor();
        let slots = if self.job.switches.is_empty() { EndedSlots::Release } else { EndedSlots::Keep };
        let (waiting, backlog) = (&mut self.permit.waiting, Arc::clone(&self.backlog));
        let batch = executor.generate(to.epoch, sequences, slots, waiting, backlog)?;
        self.permit.release();
        Ok((batch, place))
    }

    fn session(
        self,
        batch: SequenceBatch,
        on: &ReadyExecutor,
        place: Option<&Arc<ExecutorPin>>,
    ) -> SequenceGroup {
        let Self { app, job, sequences, route, permit, started, waited, .. } = self;
        let give_up = deadline(&sequences, started).and_then(|deadline| deadline.checked_add(DEADLINE_SLACK));
        let kept = sequences.into_iter().map(|generate| ActiveSequence {
            booked: Some(book(&app.executors, &route, on.index, &generate)),
            stage: 0,
            done: 0,
            generate,
            emitted: Vec::new(),
            begun: false,
            foretold: false,
            redos: 0,
            index: on.index,
            epoch: on.epoch,
            place: place.cloned(),
        });
        SequenceGroup {
            sequences: kept.collect(),
            route,
            permit,
            waited,
            executors: app.executors.clone(),
            registry: Arc::clone(&app.registry),
            batch,
            status: app.status.clone(),
            switches: Arc::clone(&job.switches),
            numbers: job.required_numbers(),
            serving: Arc::clone(&job.serving),
            metrics: Arc::clone(&app.metrics),
            started,
            give_up,
            stashed: None,
            switching: None,
            redo_by: None,
        }
    }
}

/// Returns the memory of the prompts and the expected tokens while their sequences run, in bytes.
fn prompt_bytes(job: &GenerationRequest) -> usize {
    let longest = |prompt: &PromptInput| job.longest_prompt(prompt.tokens.len());
    let tokens = job.prompts.iter().map(longest).fold(job.params.expected.len(), usize::saturating_add);
    tokens.saturating_mul(job.params.choices as usize).saturating_mul(PROMPT_COPIES * size_of::<u32>())
}

/// Estimates the cost in tokens: prompts, and per answer the lesser of usual length and `max_tokens`.
fn cost_tokens(app: &App, job: &GenerationRequest, sequences: &[Generate]) -> u64 {
    let prompts: usize = job.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let usual = app.executors.answer_tokens() as u64;
    let answers = sequences.iter().map(|sequence| u64::from(sequence.max_tokens).min(usual));
    answers.fold(prompts as u64, u64::saturating_add)
}

/// Returns the deadline, which all sequences of a request share.
fn deadline(sequences: &[Generate], started: Instant) -> Option<Instant> {
    let deadline_ms = sequences.first().map_or(0, |generate| generate.deadline_ms);
    let deadline = (deadline_ms > 0).then(|| Duration::from_millis(deadline_ms.into()))?;
    started.checked_add(deadline)
}

/// Returns the current serving state if its base is unchanged, otherwise that of `job`.
fn now_serving(app: &App, job: &GenerationRequest) -> Arc<ServingState> {
    let base_hash = job.serving.welcome.base_hash;
    let now = app.serving().ok().filter(|now| now.welcome.base_hash == base_hash);
    now.unwrap_or_else(|| Arc::clone(&job.serving))
}

fn nobody() -> ApiError {
    ApiError::executor_unavailable("all executors are drained; use one again with 'holobiont undrain'")
}
