//! Assignment of trainers to jobs, and processing of the trainers' output.
//!
//! The trainer service limits the number of trainers by refusing more. So jobs request a trainer one at a
//! time, in the order of [`trainer_slots`](crate::trainer_client::trainer_slots), which session models share.
//! A trainer that crashes is replaced by one that resumes from the checkpoint. A trainer that reports why it
//! failed ends the job.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use control_protocol::training::TrainingEvent;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    sync::{oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    Training, TrainingError,
    checkpoint_upload::CheckpointSender,
    completion::JobOutcome,
    event_log,
    job::{ActiveJob, JobActor},
    records::{JobRecord, TrainingMethod},
    trainer_args::ADAPTER,
};
use crate::trainer_client::trainer_slots::TrainerSlot;

/// Time without requests after the service refused a trainer.
const WAIT_FOR_PLACE: Duration = Duration::from_secs(2);
/// Time for a trainer to end its step and stop.
const WAIT_FOR_END: Duration = Duration::from_secs(120);
/// A trainer without output for this time is accepted, since a refusal arrives at once.
const WAIT_FOR_REFUSAL: Duration = Duration::from_millis(500);
/// Maximum length of a line of trainer output in bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Name of preference data in a training plan.
const PREFERENCES: &str = "preferences";

/// Name of the kind of data that KTO learns from.
const RATINGS: &str = "single ratings";

impl Training {
    /// Assigns trainers to jobs until the task is dropped. Trainers then stop at a checkpoint.
    pub async fn run(self: Arc<Self>) {
        let Some(fleet) = &self.fleet else { return self.assign().await };
        tokio::join!(
            self.assign(),
            self.renew_leases(fleet),
            self.write(fleet),
            self.follow(fleet),
            self.sweep_bucket(fleet)
        );
    }

    async fn assign(self: &Arc<Self>) {
        let mut attended = JoinSet::new();
        loop {
            while attended.try_join_next().is_some() {}
            let Some(id) = self.next() else {
                // Some jobs wait for a time and not for an event.
                let _ = timeout(WAIT_FOR_PLACE, self.due.notified()).await;
                continue;
            };
            let (begun, has_place) = oneshot::channel();
            let training = Arc::clone(self);
            attended.spawn(async move { training.run_job(&id, begun).await });
            if has_place.await == Ok(false) {
                sleep(WAIT_FOR_PLACE).await;
            }
        }
    }

    /// Returns the next job for a trainer, marked as attended.
    fn next(&self) -> Option<String> {
        if self.trainers.check().is_err() || self.status.borrow().serving().is_err() {
            return None;
        }
        let (now, places) = (Instant::now(), self.trainers.places());
        let mut live = self.active_jobs();
        let mut idle: Vec<&mut ActiveJob> = live.values_mut().filter(|live| !live.is_attended).collect();
        idle.sort_by(|one, other| {
            (one.job.created_at, &one.job.id).cmp(&(other.job.created_at, &other.job.id))
        });
        idle.iter_mut().for_each(|live| live.queue(places, now));
        let first = places.first()?;
        let is_first =
            |live: &&mut ActiveJob| live.place.as_ref().is_some_and(|place| place.ticket() == first);
        let found = idle.into_iter().find(is_first)?;
        found.is_attended = found.place.as_mut()?.ask();
        found.is_attended.then(|| found.job.id.clone())
    }

    /// Works on a job to its end, or as far as possible.
    async fn run_job(&self, id: &str, begun: oneshot::Sender<bool>) {
        let mut waits_on = false;
        match self.acquire_lease(id).await {
            Ok(true) => {
                let ending =
                    self.work(id, begun).await.unwrap_or_else(|error| JobOutcome::Lost(error.to_string()));
                waits_on = matches!(ending, JobOutcome::Busy(_));
                if let Err(error) = self.complete(id, ending).await {
                    tracing::error!(job = id, %error, "cannot save the result of a fine-tuning job");
                    self.back_off(id);
                }
                self.release_lease(id).await;
            }
            Ok(false) => {}
            Err(error) => {
                tracing::debug!(job = id, %error, "cannot work on a fine-tuning job now");
                let _ = begun.send(false);
            }
        }
        let directory = {
            let mut live = self.active_jobs();
            let Some(found) = live.get_mut(id) else { return };
            (found.is_attended, found.tokens_per_s) = (false, None);
            found.place = found.place.take().filter(|_| waits_on);
            found.place.iter_mut().for_each(TrainerSlot::wait_on);
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

    /// Runs a trainer on a job, if a trainer is available and work is left.
    async fn work(&self, id: &str, begun: oneshot::Sender<bool>) -> Result<JobOutcome, TrainingError> {
        let Some((job, stop)) =
            self.active_jobs().get(id).map(|live| (live.job.clone(), live.stop.subscribe()))
        else {
            return Ok(JobOutcome::Stopped);
        };
        let directory = self.job_directory(id);
        if directory.join(ADAPTER).exists() || job.generation.is_some() {
            // The adapter is complete; the job only has to register it and end.
            let _ = begun.send(true);
            return Ok(JobOutcome::Done);
        }
        let started = match self.prepare_inputs(&job, &directory).await? {
            Some(ending) => Err(ending),
            None => {
                let connection =
                    self.trainers.start(&job.arguments(&directory, self.limits.checkpoint_steps)).await;
                connection.map_err(|error| JobOutcome::Unavailable(error.to_string()))
            }
        };
        let connection = match started {
            Ok(connection) => connection,
            Err(ending) => {
                let _ = begun.send(!matches!(ending, JobOutcome::Unavailable(_)));
                return Ok(ending);
            }
        };
        let (outgoing, steps) = CheckpointSender::new(directory);
        let heard = self.listen(&job, connection, stop, begun, outgoing);
        let (ending, ()) = tokio::join!(heard, self.upload_checkpoints(&job, steps));
        ending
    }

    /// Reads a trainer's output to its end and records its reports.
    async fn listen(
        &self,
        job: &JobRecord,
        connection: UnixStream,
        mut stop: watch::Receiver<bool>,
        begun: oneshot::Sender<bool>,
        outgoing: CheckpointSender,
    ) -> Result<JobOutcome, TrainingError> {
        let (id, method) = (job.id.as_str(), job.order.method);
        let (read, mut write) = connection.into_split();
        let mut lines = TrainerLines::new(read);
        let (mut begun, mut problems, mut has_plan) = (Some(begun), Vec::new(), false);
        loop {
            let next = tokio::select! {
                line = lines.next() => line,
                () = wait_for_stop(&mut stop) => {
                    // The end of its stdin makes the trainer write a checkpoint and stop.
                    let _ = write.shutdown().await;
                    let _ = timeout(WAIT_FOR_END, self.drain_events(id, &mut lines, &outgoing)).await;
                    return Ok(JobOutcome::Stopped);
                }
                () = sleep(WAIT_FOR_REFUSAL), if begun.is_some() => {
                    begun.take().map(|begun| begun.send(true));
                    continue;
                }
            };
            let Ok(Some(text)) = next else {
                return Ok(JobOutcome::Lost("the trainer ended without an error message".to_owned()));
            };
            let event = control_protocol::training::parse(&text);
            let is_refused = matches!(&event, TrainingEvent::Failed { exit, .. } if exit == "unavailable");
            if let Some(begun) = begun.take() {
                let _ = begun.send(!is_refused);
            }
            match event {
                TrainingEvent::Failed { message, .. } if is_refused && !has_plan => {
                    return Ok(JobOutcome::Busy(message));
                }
                // The trainer lost its executor, so the job is retried.
                TrainingEvent::Failed { message, .. } if is_refused => return Ok(JobOutcome::Lost(message)),
                TrainingEvent::Failed { message, exit } => {
                    return Ok(JobOutcome::Failed {
                        message: event_log::with_problems(message, &problems),
                        exit,
                    });
                }
                TrainingEvent::Problem { line, message, .. } => problems.push((line, message)),
                TrainingEvent::Done(_) => {
                    outgoing.is_not_needed();
                    return Ok(JobOutcome::Done);
                }
                TrainingEvent::Plan(plan) if method_of(&plan.kind) != method => {
                    let message = wrong_data(&plan.kind, method);
                    return Ok(JobOutcome::Failed { message, exit: "usage".to_owned() });
                }
                event => {
                    has_plan |= matches!(event, TrainingEvent::Plan(_));
                    self.note(id, event, &outgoing).await?;
                }
            }
        }
    }

    /// Records the checkpoint that a trainer writes when it is told to stop.
    async fn drain_events(
        &self,
        id: &str,
        lines: &mut TrainerLines<impl AsyncRead + Unpin>,
        outgoing: &CheckpointSender,
    ) {
        while let Ok(Some(text)) = lines.next().await {
            let event = control_protocol::training::parse(&text);
            if matches!(event, TrainingEvent::Checkpoint { .. } | TrainingEvent::Step(_))
                && let Err(error) = self.note(id, event, outgoing).await
            {
                tracing::warn!(job = id, %error, "cannot save a trainer's last checkpoint");
            }
        }
    }

    /// Records a trainer's report; in a fleet, queues it for the writer.
    async fn note(
        &self,
        id: &str,
        event: TrainingEvent,
        outgoing: &CheckpointSender,
    ) -> Result<(), TrainingError> {
        self.counters.said(&event);
        if let TrainingEvent::Step(step) = &event
            && let Some(live) = self.active_jobs().get_mut(id)
        {
            (live.failures, live.tokens_per_s) = (0, step.tokens_per_second);
        }
        let kept = if let TrainingEvent::Checkpoint { step } = event { Some(step) } else { None };
        if let Some(fleet) = &self.fleet {
            if let Some(found) = self.active_jobs().get_mut(id) {
                found.unwritten.push(event);
            }
            fleet.notes.notify_one();
            return kept.map_or(Ok(()), |step| outgoing.hand_over(step));
        }
        let change = |job: &mut JobRecord| {
            let events = event_log::noted(job, event);
            if let Some(step) = kept {
                event_log::confirmed(job, step);
            }
            Ok(events)
        };
        self.change(id, JobActor::Worker, change).await.map(drop)
    }
}

/// Returns the method that learns from data of a kind.
fn method_of(kind: &str) -> TrainingMethod {
    match kind {
        PREFERENCES => TrainingMethod::Dpo,
        RATINGS => TrainingMethod::Kto,
        _ => TrainingMethod::Supervised,
    }
}

/// Says why a job of `method` does not learn from data of a kind.
fn wrong_data(kind: &str, method: TrainingMethod) -> String {
    let learns = match method {
        TrainingMethod::Supervised => "what should be said",
        TrainingMethod::Dpo => PREFERENCES,
        TrainingMethod::Kto => RATINGS,
    };
    let right = method_of(kind).as_str();
    format!("the method learns from {learns}, and the data are {kind}; use the method '{right}'")
}

async fn wait_for_stop(stop: &mut watch::Receiver<bool>) {
    // The result of `wait_for` locks the value and is dropped here.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Line reader for the output of a trainer.
struct TrainerLines<R> {
    read: BufReader<R>,
    /// Received bytes of an incomplete line. The bytes stay here when `next` is cancelled.
    begun: Vec<u8>,
}

impl<R: AsyncRead + Unpin> TrainerLines<R> {
    fn new(read: R) -> Self {
        Self { read: BufReader::new(read), begun: Vec::new() }
    }

    /// Returns the next line; `None` at the end. The call is cancel safe.
    async fn next(&mut self) -> io::Result<Option<String>> {
        let left = MAX_LINE_BYTES - self.begun.len() as u64;
        (&mut self.read).take(left).read_until(b'\n', &mut self.begun).await?;
        let line = std::mem::take(&mut self.begun);
        match line.last() {
            None => Ok(None),
            Some(b'\n') => String::from_utf8(line).map(Some).map_err(|_| io::ErrorKind::InvalidData.into()),
            Some(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn a_line_that_comes_in_pieces_is_whole_although_the_wait_for_it_was_given_up() {
        let (near, mut far) = duplex(64);
        let mut lines = TrainerLines::new(near);
        for piece in ["{\"event\":", "\"check", "point\"}"] {
            far.write_all(piece.as_bytes()).await.unwrap();
            // The call reads the available bytes, and is dropped while it waits for more.
            let next = timeout(Duration::from_millis(20), lines.next()).await;
            assert!(next.is_err(), "the line has not ended");
        }
        far.write_all(b"\nnext\n").await.unwrap();
        drop(far);
        assert_eq!(lines.next().await.unwrap().as_deref(), Some("{\"event\":\"checkpoint\"}\n"));
        assert_eq!(lines.next().await.unwrap().as_deref(), Some("next\n"));
        assert_eq!(lines.next().await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_line_that_is_too_long_or_breaks_off_is_none() {
        for text in ["x".repeat(usize::try_from(MAX_LINE_BYTES).unwrap() + 1), "x".to_owned()] {
            assert!(TrainerLines::new(text.as_bytes()).next().await.is_err());
        }
    }
}
