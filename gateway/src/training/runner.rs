//! Who gets a trainer when, and what comes of it.
//!
//! The trainer service says how many trainers there may be, by refusing more. So jobs are tried one after the other: that
//! of the tenant who has the fewest trainers, of these the oldest. A trainer that dies is replaced by one that goes on from
//! the checkpoint; one that says why it failed is believed.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    sync::{oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use training_protocol::Event;

use super::{
    Training, TrainingError,
    job::{Live, fail},
    notes,
    order::ADAPTER,
    records::{EventRecord, JobRecord, Level, Method, Status},
    table::Page,
};
use crate::adapters::{AdapterError, LoadRequest, Replace};

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
/// The word for data that only preferences are learned from.
const PREFERENCES: &str = "preferences";

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
            (found.is_attended, found.tokens_per_s) = (false, None);
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
                    return Ok(Ending::Failed { message: notes::with_problems(message, &problems), exit });
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
        self.counters.said(&event);
        if let Event::Step(step) = &event
            && let Some(live) = self.live().get_mut(id)
        {
            (live.failures, live.tokens_per_s) = (0, step.tokens_per_second);
        }
        self.change(id, |job| Ok(notes::noted(job, event))).await.map(drop)
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
                self.counters.trainers_lost.fetch_add(1, Relaxed);
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
        let page = Page { after: None, limit: u32::MAX - 1 };
        let events = self.registry.database().events(&job.id, &page).await?;
        let results = notes::table(events.items.iter().rev().filter_map(|(_, event)| event.metrics));
        let results = self.keep_results(&job.tenant, format!("{}.csv", job.id), &results).await?;
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
