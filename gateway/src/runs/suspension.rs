//! How a model gets a trainer, gives it to others while it is asked nothing, and goes on with another.

use std::{
    fs, io, mem,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::timeout;
use training_protocol::session::{Order, Refusal};

use super::{
    desk::Work,
    promises::Promise,
    stage::{Open, Stage, Suspended},
    trainer::Trainer,
    worker::{Worker, ended, on_disk},
};

/// How long a model waits for a trainer.
const PLACE_WAIT: Duration = Duration::from_secs(30 * 60);
/// How often it asks.
const LOOK: Duration = Duration::from_millis(500);
/// How often an idle model looks whether somebody waits for a trainer.
const IDLE_LOOK: Duration = Duration::from_secs(2);

impl Worker {
    /// The next piece of work. While others wait for a trainer, the model may give its own to them.
    pub(super) async fn next(&self, stage: &mut Stage) -> (Work, Arc<Promise>) {
        while let Stage::Trains(open) = stage {
            if open.place.is_to_yield(open.used, open.since.elapsed()) {
                *stage = match mem::replace(stage, Stage::new()) {
                    Stage::Trains(open) => self.suspend(open).await,
                    other => other,
                };
                self.note(stage);
            } else if let Ok(piece) = timeout(IDLE_LOOK, self.desk.next()).await {
                open.place.works();
                return piece;
            }
        }
        self.desk.next().await
    }

    /// The trainer that `work` is for, once there is one.
    pub(super) async fn opened<'a>(
        &self,
        stage: &'a mut Stage,
        work: &Work,
    ) -> Result<&'a mut Open, Refusal> {
        *stage = match mem::replace(stage, Stage::new()) {
            Stage::Without(_) if work.begins() => {
                self.trainer().await.map_or_else(Stage::Without, Stage::Trains)
            }
            Stage::Suspended(suspended) => self.resume(suspended).await.unwrap_or_else(Stage::Without),
            other => other,
        };
        self.note(stage);
        match stage {
            Stage::Trains(open) => Ok(open),
            Stage::Without(why) => Err(why.clone()),
            Stage::Suspended(_) => Err(Refusal::server("this model has no trainer")),
        }
    }

    pub(super) fn note(&self, stage: &Stage) {
        self.desk.note(|progress| progress.has_trainer = stage.has_trainer());
    }

    /// A trainer, once it is this model's turn and there is one.
    async fn trainer(&self) -> Result<Open, Refusal> {
        let until = Instant::now() + PLACE_WAIT;
        let mut place = self.means.trainers.places().wait(&self.tenant);
        loop {
            if place.ask() {
                let stream = self.means.trainers.start(&["session".to_owned()]).await;
                let stream = stream.map_err(|error| Refusal::server(error.to_string()))?;
                match Trainer::ready(stream).await {
                    Ok(trainer) => {
                        let now = Instant::now();
                        return Ok(Open { trainer, place, since: now, used: now });
                    }
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy => self.say(error.to_string()),
                    Err(error) => {
                        return Err(Refusal::server(format!("there is no trainer for it: {error}")));
                    }
                }
                place.wait_on();
            } else {
                self.say("another model or job is to have the next trainer".to_owned());
            }
            if Instant::now() >= until {
                let minutes = PLACE_WAIT.as_secs() / 60;
                return Err(Refusal::server(format!(
                    "no trainer was free for {minutes} minutes; try again when other models or jobs have ended"
                )));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn say(&self, reason: String) {
        if let Some(promise) = &self.running {
            promise.say(reason);
        }
    }

    /// Has what was learned, and gathered, written to the disk, and lets the trainer go.
    async fn suspend(&self, mut open: Open) -> Stage {
        if open.place.suspended_bytes() >= self.means.states.tenant_bytes() {
            return Stage::Without(ended(
                &"others waited for it, and your suspended models take --tenant-state-bytes",
            ));
        }
        let passage = self.means.passages.open(&self.run);
        match open.trainer.order(&Order::Suspend { directory: passage.path() }, &[]).await {
            Ok(Ok(_)) => {
                let path = passage.path();
                let bytes = on_disk(move || bytes_in(&path)).await.unwrap_or_default();
                open.place.suspend(bytes);
                tracing::debug!(run = self.run, bytes, "a model gave its trainer to others who wait");
                Stage::Suspended(Suspended { passage, _place: open.place })
            }
            // What was to begin was refused.
            Ok(Err(_)) if self.desk.lora.get().is_none() => Stage::new(),
            Ok(Err(refusal)) => {
                tracing::warn!(run = self.run, why = refusal.message, "a model cannot be suspended");
                open.since = Instant::now();
                open.used = open.since;
                Stage::Trains(open)
            }
            Err(error) => Stage::Without(ended(&error)),
        }
    }

    /// Goes on with another trainer as if it were the one before.
    async fn resume(&self, suspended: Suspended) -> Result<Stage, Refusal> {
        let mut open = self.trainer().await.map_err(|refusal| ended(&refusal.message))?;
        let order = Order::Load { directory: suspended.passage.path(), optimizer: true };
        match open.trainer.order(&order, &[]).await {
            Ok(Ok(_)) => Ok(Stage::Trains(open)),
            Ok(Err(refusal)) => Err(ended(&refusal.message)),
            Err(error) => Err(ended(&error)),
        }
    }
}

/// Bytes of the files in a directory.
fn bytes_in(directory: &Path) -> u64 {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|found| found.len()).sum()
}
