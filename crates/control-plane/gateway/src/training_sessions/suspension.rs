//! Trainers of a model: requesting one, giving it to others while the model is idle, and resuming with
//! another.

use std::{
    fs, io, mem,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use control_protocol::training::session::{CommandRefusal, TrainingCommand};
use tokio::time::timeout;

use super::{
    request_futures::RequestFuture,
    stage::{OpenTrainer, SuspendedTrainer, TrainerStage},
    trainer::Trainer,
    work_queue::ModelCommand,
    worker::{ModelWorker, ended, on_disk},
};

/// Maximum time that a model waits for a trainer.
const PLACE_WAIT: Duration = Duration::from_secs(30 * 60);
/// Interval between requests for a trainer.
const LOOK: Duration = Duration::from_millis(500);
/// Interval at which an idle model checks whether others wait for a trainer.
const IDLE_LOOK: Duration = Duration::from_secs(2);

impl ModelWorker {
    /// Returns the next command. While others wait for a trainer, the idle model may give up its own.
    pub(super) async fn next(&self, stage: &mut TrainerStage) -> (ModelCommand, Arc<RequestFuture>) {
        while let TrainerStage::Trains(open) = stage {
            if open.place.is_to_yield(open.used, open.since.elapsed()) {
                *stage = match mem::replace(stage, TrainerStage::new()) {
                    TrainerStage::Trains(open) => self.suspend(open).await,
                    other => other,
                };
                self.note(stage);
            } else if let Ok(piece) = timeout(IDLE_LOOK, self.work_queue.next()).await {
                open.place.works();
                return piece;
            }
        }
        self.work_queue.next().await
    }

    /// Returns the trainer for `work`, once there is one.
    pub(super) async fn opened<'a>(
        &self,
        stage: &'a mut TrainerStage,
        work: &ModelCommand,
    ) -> Result<&'a mut OpenTrainer, CommandRefusal> {
        *stage = match mem::replace(stage, TrainerStage::new()) {
            TrainerStage::Without(_) if work.begins() => {
                self.trainer().await.map_or_else(TrainerStage::Without, TrainerStage::Trains)
            }
            TrainerStage::Suspended(suspended) => {
                self.resume(suspended).await.unwrap_or_else(TrainerStage::Without)
            }
            other => other,
        };
        self.note(stage);
        match stage {
            TrainerStage::Trains(open) => Ok(open),
            TrainerStage::Without(why) => Err(why.clone()),
            TrainerStage::Suspended(_) => Err(CommandRefusal::server("this model has no trainer")),
        }
    }

    pub(super) fn note(&self, stage: &TrainerStage) {
        self.work_queue.note(|progress| progress.has_trainer = stage.has_trainer());
    }

    /// Waits for this model's turn and returns a free trainer.
    async fn trainer(&self) -> Result<OpenTrainer, CommandRefusal> {
        let until = Instant::now() + PLACE_WAIT;
        let mut place = self.means.trainers.places().wait(&self.tenant);
        loop {
            if place.ask() {
                let stream = self.means.trainers.start(&["session".to_owned()]).await;
                let stream = stream.map_err(|error| CommandRefusal::server(error.to_string()))?;
                match Trainer::ready(stream).await {
                    Ok(trainer) => {
                        let now = Instant::now();
                        return Ok(OpenTrainer { trainer, place, since: now, used: now });
                    }
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                        self.set_reason(error.to_string())
                    }
                    Err(error) => {
                        return Err(CommandRefusal::server(format!("cannot start a trainer: {error}")));
                    }
                }
                place.wait_on();
            } else {
                self.set_reason("other models or jobs are first in the queue for a trainer".to_owned());
            }
            if Instant::now() >= until {
                let minutes = PLACE_WAIT.as_secs() / 60;
                return Err(CommandRefusal::server(format!(
                    "no trainer was free for {minutes} minutes; try again when other models or jobs have ended"
                )));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn set_reason(&self, reason: String) {
        if let Some(promise) = &self.running {
            promise.set_reason(reason);
        }
    }

    /// Makes the trainer write weights and gathered gradients to disk, and releases it.
    async fn suspend(&self, mut open: OpenTrainer) -> TrainerStage {
        if open.place.suspended_bytes() >= self.means.states.tenant_bytes() {
            return TrainerStage::Without(ended(
                &"other models waited for its trainer, and your suspended models already use \
                  --tenant-state-bytes",
            ));
        }
        let passage = self.means.passages.open(&self.run);
        match open.trainer.order(&TrainingCommand::Suspend { directory: passage.path() }, &[]).await {
            Ok(Ok(_)) => {
                let path = passage.path();
                let bytes = on_disk(move || bytes_in(&path)).await.unwrap_or_default();
                open.place.suspend(bytes);
                tracing::debug!(
                    run = self.run,
                    bytes,
                    "suspended a model, because others wait for a trainer"
                );
                TrainerStage::Suspended(SuspendedTrainer { passage, _place: open.place })
            }
            // The model has no adapter, because its first command was refused.
            Ok(Err(_)) if self.work_queue.lora.get().is_none() => TrainerStage::new(),
            Ok(Err(refusal)) => {
                tracing::warn!(run = self.run, why = refusal.message, "cannot suspend a model");
                open.since = Instant::now();
                open.used = open.since;
                TrainerStage::Trains(open)
            }
            Err(error) => TrainerStage::Without(ended(&error)),
        }
    }

    /// Resumes on another trainer from the suspended state.
    async fn resume(&self, suspended: SuspendedTrainer) -> Result<TrainerStage, CommandRefusal> {
        let mut open = self.trainer().await.map_err(|refusal| ended(&refusal.message))?;
        let order = TrainingCommand::Load { directory: suspended.passage.path(), optimizer: true };
        match open.trainer.order(&order, &[]).await {
            Ok(Ok(_)) => Ok(TrainerStage::Trains(open)),
            Ok(Err(refusal)) => Err(ended(&refusal.message)),
            Err(error) => Err(ended(&error)),
        }
    }
}

/// Returns the total length of the files in a directory.
fn bytes_in(directory: &Path) -> u64 {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|found| found.len()).sum()
}
