//! Who gets a trainer when, and what comes of it.
//!
//! The trainer service says how many trainers there may be, by refusing more. So jobs are tried one after the other: that
//! of the tenant who has the fewest trainers, of these the oldest. A trainer that dies is replaced by one that goes on from
//! the checkpoint; one that says why it failed is believed.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    sync::{oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use training_protocol::{Event, Step};

use super::{
    Training, TrainingError,
    job::{Live, fail},
    order::ADAPTER,
    records::{EventRecord, JobRecord, Level, Mark, Method, Metrics, Status},
    table::Page,
};
use crate::{
    adapters::{AdapterError, LoadRequest, Replace},
    clock::seconds_since_1970,
};

/// How long nobody is asked for a trainer after one was refused.
const WAIT_FOR_PLACE: Duration = Duration::from_secs(2);
/// How long a trainer is waited for that has been told to stop: it ends its step first.
const WAIT_FOR_END: Duration = Duration::from_secs(120);
/// A trainer that says nothing for so long has a place: a refusal comes at once.
const WAIT_FOR_REFUSAL: Duration = Duration::from_millis(500);
/// Trainers in a row that may die without a step.
const MAX_FAILURES: u32 = 5;
/// Longest line of a trainer, in bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Most steps of a job that are kept as events; of longer jobs every second is, or every third ...
const MAX_STEP_EVENTS: u64 = 1000;
/// The word for data that only preferences are learned from.
const PREFERENCES: &str = "preferences";
/// Most faults of data that a message names.
const MAX_PROBLEMS: usize = 20;

/// How work on a job ended.
enum Ending {
    /// The adapter is there.
    Done,
    /// There is no place for a trainer.
    NoPlace(String),
    /// The trainer said why there will be no adapter.
    Failed { message: String, exit: String },
    /// It was told to stop.
    Stopped,
    /// It ended without a word, or never began.
    Lost(String),
}

impl Training {
    /// Gives jobs their trainers, until the task is dropped: trainers end with it, at a checkpoint.
    pub async fn run(self: Arc<Self>) {
        let mut attended = JoinSet::new();
        loop {
            while attended.try_join_next().is_some() {}
            let Some(id) = self.next() else {
                // Some wait for a time and not for an event.
                let _ = timeout(WAIT_FOR_PLACE, self.due.notified()).await;
                continue;
            };
            let (begun, has_place) = oneshot::channel();
            let training = Arc::clone(&self);
            attended.spawn(async move { training.attend(&id, begun).await });
            if has_place.await == Ok(false) {
                sleep(WAIT_FOR_PLACE).await;
            }
        }
    }

    /// The job that gets the next trainer, which is now attended to.
    fn next(&self) -> Option<String> {
        if self.trainers.check().is_err() || self.status.borrow().serving().is_err() {
            return None;
        }
        let now = Instant::now();
        let mut live = self.live();
        let mut trainers: HashMap<&str, usize> = HashMap::new();
        for live in live.values().filter(|live| live.is_attended) {
            *trainers.entry(&live.job.tenant).or_default() += 1;
        }
        let is_waiting = |live: &&Live| {
            live.job.status == Status::Queued
                && !live.is_attended
                && live.not_before.is_none_or(|time| time <= now)
        };
        let order = |live: &&Live| {
            let others = trainers.get(live.job.tenant.as_str()).copied().unwrap_or_default();
            (others, live.job.created_at, live.job.id.clone())
        };
        let id = live.values().filter(is_waiting).min_by_key(order)?.job.id.clone();
        live.get_mut(&id)?.is_attended = true;
        Some(id)
    }

    /// Works on a job to its end, or as far as it gets.
    async fn attend(&self, id: &str, begun: oneshot::Sender<bool>) {
        let ending = self.work(id, begun).await.unwrap_or_else(|error| Ending::Lost(error.to_string()));
        if let Err(error) = self.conclude(id, ending).await {
            tracing::error!(job = id, %error, "what became of a fine-tuning job could not be kept");
            self.put_off(id);
        }
        let directory = {
            let mut live = self.live();
            let Some(found) = live.get_mut(id) else { return };
            found.is_attended = false;
            let is_over = found.job.status.is_final();
            if is_over {
                live.remove(id);
            }
            is_over.then(|| self.job_directory(id))
        };
        if let Some(directory) = directory {
            super::files::remove(directory).await;
        }
        self.due.notify_one();
    }

    /// Has a trainer work on a job, if there is one to be had and something left to do.
    async fn work(&self, id: &str, begun: oneshot::Sender<bool>) -> Result<Ending, TrainingError> {
        let Some((job, stop)) = self.live().get(id).map(|live| (live.job.clone(), live.stop.subscribe()))
        else {
            return Ok(Ending::Stopped);
        };
        let directory = self.job_directory(id);
        if directory.join(ADAPTER).exists() {
            // What is left is to put it under its name.
            let _ = begun.send(true);
            return Ok(Ending::Done);
        }
        let connection = self.trainers.start(&job.arguments(&directory)).await;
        let connection = match connection {
            Ok(connection) => connection,
            Err(error) => {
                let _ = begun.send(false);
                return Ok(Ending::NoPlace(error.to_string()));
            }
        };
        self.listen(&job, connection, stop, begun).await
    }

    /// Hears a trainer to its end, and writes down what it says.
    async fn listen(
        &self,
        job: &JobRecord,
        connection: UnixStream,
        mut stop: watch::Receiver<bool>,
        begun: oneshot::Sender<bool>,
    ) -> Result<Ending, TrainingError> {
        let (id, method) = (job.id.as_str(), job.order.method);
        let (read, mut write) = connection.into_split();
        let mut lines = BufReader::new(read);
        let (mut begun, mut problems, mut has_plan) = (Some(begun), Vec::new(), false);
        loop {
            let next = tokio::select! {
                line = line(&mut lines) => line,
                () = told(&mut stop) => {
                    // The end of its stdin tells the trainer to keep a checkpoint and end.
                    let _ = write.shutdown().await;
                    let rest = async { while matches!(line(&mut lines).await, Ok(Some(_))) {} };
                    let _ = timeout(WAIT_FOR_END, rest).await;
                    return Ok(Ending::Stopped);
                }
                () = sleep(WAIT_FOR_REFUSAL), if begun.is_some() => {
                    begun.take().map(|begun| begun.send(true));
                    continue;
                }
            };
            let Ok(Some(text)) = next else {
                return Ok(Ending::Lost("the trainer ended without a word".to_owned()));
            };
            let event = training_protocol::parse(&text);
            let is_refused = matches!(&event, Event::Failed { exit, .. } if exit == "unavailable");
            if let Some(begun) = begun.take() {
                let _ = begun.send(!is_refused);
            }
            match event {
                Event::Failed { message, .. } if is_refused && !has_plan => {
                    return Ok(Ending::NoPlace(message));
                }
                // Its executor went away: that is nobody's fault.
                Event::Failed { message, .. } if is_refused => return Ok(Ending::Lost(message)),
                Event::Failed { message, exit } => {
                    return Ok(Ending::Failed { message: with_problems(message, &problems), exit });
                }
                Event::Problem { line, message } => problems.push((line, message)),
                Event::Done(_) => return Ok(Ending::Done),
                Event::Plan(plan) if (plan.kind == PREFERENCES) != (method == Method::Dpo) => {
                    let learns = if method == Method::Dpo { PREFERENCES } else { "what should be said" };
                    let message = format!("the method learns from {learns}, and the data are {}", plan.kind);
                    return Ok(Ending::Failed { message, exit: "usage".to_owned() });
                }
                event => {
                    has_plan |= matches!(event, Event::Plan(_));
                    self.note(id, event).await?;
                }
            }
        }
    }

    /// Writes down what a trainer says.
    async fn note(&self, id: &str, event: Event) -> Result<(), TrainingError> {
        if let Event::Step(_) = event
            && let Some(live) = self.live().get_mut(id)
        {
            live.failures = 0;
        }
        self.change(id, |job| Ok(noted(job, event))).await.map(drop)
    }

    /// Writes down how it ended, and puts the adapter under its name if there is one.
    async fn conclude(&self, id: &str, ending: Ending) -> Result<(), TrainingError> {
        match ending {
            Ending::Stopped => {}
            Ending::NoPlace(why) => {
                tracing::debug!(job = id, why, "no trainer for a fine-tuning job");
                self.requeue(id, None).await?;
            }
            Ending::Done => self.publish(id).await?,
            Ending::Failed { message, exit } => {
                let (code, param) = match exit.as_str() {
                    "usage" | "not_found" => ("invalid_training_file", Some("training_file")),
                    _ => ("training_failed", None),
                };
                self.change(id, fail(code, message, param)).await?;
            }
            Ending::Lost(why) => {
                if self.put_off(id) < MAX_FAILURES {
                    self.requeue(id, Some(why)).await?;
                } else {
                    let message =
                        format!("{MAX_FAILURES} trainers in a row ended without a step; the last: {why}");
                    self.change(id, fail("trainer_lost", message, None)).await?;
                }
            }
        }
        Ok(())
    }

    /// Counts a trainer that got nowhere, and lets the next one wait the longer for it.
    fn put_off(&self, id: &str) -> u32 {
        let mut live = self.live();
        let Some(found) = live.get_mut(id) else { return 0 };
        found.failures += 1;
        found.not_before =
            Some(Instant::now() + Duration::from_secs(1) * 2u32.pow(found.failures.min(5) - 1));
        found.failures
    }

    /// Lets a job wait for another trainer, unless it is no longer wanted.
    async fn requeue(&self, id: &str, why: Option<String>) -> Result<(), TrainingError> {
        let requeued = |job: &mut JobRecord| {
            if job.status.is_due() {
                job.status = Status::Queued;
            }
            let event =
                why.map(|why| EventRecord::now(Level::Warn, format!("{why}; another trainer goes on")));
            Ok(event.into_iter().collect())
        };
        self.change(id, requeued).await.map(drop)
    }

    /// Puts the adapter of a job under its name. Nobody can cancel it meanwhile.
    async fn publish(&self, id: &str) -> Result<(), TrainingError> {
        let Ok(serving) = self.status.borrow().serving() else {
            self.put_off(id);
            return self.requeue(id, None).await;
        };
        let turn = self.changing.lock().await;
        let job = self.live().get(id).map(|live| live.job.clone());
        let Some(job) = job.filter(|job| job.status.is_due()) else { return Ok(()) };
        let path = self.job_directory(id).join(ADAPTER);
        let is_published = |entry: &Arc<crate::adapters::Entry>| entry.record.source == path;
        let published = self.registry.entries().get(&job.name).cloned().filter(is_published);
        let request = LoadRequest {
            name: job.name.clone(),
            path: path.clone(),
            replace: job.replaces.clone().map_or(Replace::Never, Replace::Only),
            tenant: Some(job.tenant.clone()),
            pinned: None,
        };
        let loaded = match published {
            Some(entry) => Ok(entry),
            None => self.registry.load_made(request, &serving.base_name).await,
        };
        failpoint::pass("gateway.job_published");
        let entry = match loaded {
            Ok(entry) => entry,
            Err(AdapterError::Busy(_) | AdapterError::Residency(_) | AdapterError::Database(_)) => {
                drop(turn);
                self.put_off(id);
                return self.requeue(id, Some("the adapter could not be loaded yet".to_owned())).await;
            }
            Err(error) => {
                let done = fail("publishing_failed", error.to_string(), None);
                return self.change_in(&turn, id, done).await.map(drop);
            }
        };
        drop(turn);
        let results = self.results(&job).await?;
        let generation = entry.record.generation.to_string();
        let succeeded = |job: &mut JobRecord| {
            (job.status, job.generation, job.result_file) =
                (Status::Succeeded, Some(generation), Some(results));
            Ok(vec![
                EventRecord::now(Level::Info, format!("new fine-tuned model created: {}", job.name)),
                EventRecord::now(Level::Info, "the job has successfully completed"),
            ])
        };
        self.change(id, succeeded).await.map(drop)
    }

    /// The losses of a job, as a file of its tenant.
    async fn results(&self, job: &JobRecord) -> Result<String, TrainingError> {
        let page = Page { after: None, limit: u32::MAX - 1 };
        let events = self.registry.database().events(&job.id, &page).await?;
        let mut steps: BTreeMap<u64, Metrics> = BTreeMap::new();
        for metrics in events.items.iter().rev().filter_map(|(_, event)| event.metrics) {
            // A step that was made again has the same figures.
            let of_step = steps.entry(metrics.step).or_insert(metrics);
            of_step.valid_loss = of_step.valid_loss.or(metrics.valid_loss);
            if metrics.train_loss.is_some() {
                *of_step = Metrics { valid_loss: of_step.valid_loss, ..metrics };
            }
        }
        let mut text = "step,train_loss,valid_loss,grad_norm,learning_rate\n".to_owned();
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        for (step, Metrics { train_loss, valid_loss, grad_norm, learning_rate, .. }) in steps {
            let [train, valid, norm, rate] = [train_loss, valid_loss, grad_norm, learning_rate].map(number);
            // Into memory: it cannot fail.
            let _ = writeln!(text, "{step},{train},{valid},{norm},{rate}");
        }
        self.keep_results(&job.tenant, format!("{}.csv", job.id), &text).await
    }
}

/// Waits until the trainer is to stop.
async fn told(stop: &mut watch::Receiver<bool>) {
    // What `wait_for` returns locks the value.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// A line of a trainer; `None` at the end.
async fn line(lines: &mut (impl tokio::io::AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let mut text = String::new();
    match lines.take(MAX_LINE_BYTES).read_line(&mut text).await? {
        0 => Ok(None),
        _ if !text.ends_with('\n') => Err(io::ErrorKind::InvalidData.into()),
        _ => Ok(Some(text)),
    }
}

/// What is wrong with the data, line by line.
fn with_problems(message: String, problems: &[(u64, String)]) -> String {
    let named = problems.iter().take(MAX_PROBLEMS).map(|(line, what)| format!("line {line}: {what}"));
    let more = problems.len().saturating_sub(MAX_PROBLEMS);
    let more = (more > 0).then(|| format!("and {more} more"));
    let all: Vec<String> = named.chain(more).collect();
    if all.is_empty() { message } else { all.join("; ") }
}

/// A job to which this happened, and what is said of it.
fn noted(job: &mut JobRecord, event: Event) -> Vec<EventRecord> {
    if !job.status.is_due() {
        return Vec::new();
    }
    match event {
        Event::Plan(plan) => {
            let message = match job.plan.is_some() {
                true => format!("going on after step {}", plan.resumed_step.unwrap_or(0)),
                false => format!("fine-tuning started: {} examples, {} steps", plan.examples, plan.steps),
            };
            job.step = plan.resumed_step.unwrap_or(0);
            // What was made behind the checkpoint is made again.
            let mark = job.mark.filter(|mark| mark.step == job.step);
            job.trained_tokens = mark.map_or(0, |mark| mark.trained_tokens);
            job.started_at.get_or_insert_with(seconds_since_1970);
            (job.status, job.plan) = (Status::Running, Some(plan));
            vec![EventRecord::now(Level::Info, message)]
        }
        Event::Step(step) => of_step(job, &step),
        Event::Evaluation { step, loss } => {
            if let Some(mark) = job.mark.as_mut().filter(|mark| mark.step == step) {
                mark.held_out_loss = Some(loss);
            }
            let total_steps = job.plan.as_ref().map_or(0, |plan| plan.steps);
            let metrics = Metrics { step, total_steps, valid_loss: Some(loss), ..Metrics::default() };
            let message = format!("step {step}/{total_steps}: validation loss={loss:.4}");
            vec![EventRecord { metrics: Some(metrics), ..EventRecord::now(Level::Info, message) }]
        }
        Event::Checkpoint { step } => {
            let JobRecord { loss, trained_tokens, .. } = *job;
            job.mark =
                Some(Mark { step, loss, held_out_loss: None, trained_tokens, at: seconds_since_1970() });
            vec![EventRecord::now(Level::Info, format!("checkpoint after step {step}"))]
        }
        _ => Vec::new(),
    }
}

fn of_step(job: &mut JobRecord, step: &Step) -> Vec<EventRecord> {
    let now = seconds_since_1970();
    job.step = step.step;
    job.trained_tokens += step.tokens;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number of seconds")]
    let left = step.seconds_left.map(|left| left.clamp(0.0, 1e9) as u64);
    job.estimated_finish = left.map(|left| now + left);
    job.loss = Some(step.loss);
    let stride = step.steps.div_ceil(MAX_STEP_EVENTS).max(1);
    if !step.step.is_multiple_of(stride) && step.step != step.steps {
        return Vec::new();
    }
    let message = format!("step {}/{}: training loss={:.4}", step.step, step.steps, step.loss);
    let metrics = Metrics {
        step: step.step,
        total_steps: step.steps,
        train_loss: Some(step.loss),
        grad_norm: Some(step.grad_norm),
        learning_rate: Some(step.learning_rate),
        valid_loss: None,
    };
    vec![EventRecord { metrics: Some(metrics), ..EventRecord::now(Level::Info, message) }]
}
