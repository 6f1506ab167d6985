//! Worker of one model: runs its commands in the order of their numbers.

use std::{collections::VecDeque, fmt::Display, io, sync::Arc, time::Instant};

use control_protocol::training::session::{CommandDone, CommandRefusal, TrainingCommand};
use serde_json::json;
use tokio::sync::watch;

use super::{
    checkpoint_store::{CheckpointBase, CheckpointStore},
    expiry,
    future_result::FutureResult,
    request_futures::RequestFuture,
    stage::TrainerStage,
    trainer::Trainer,
    transfer_directories::TransferDirectories,
    work_queue::{ModelCommand, WorkQueue, session_ended},
};
use crate::{
    adapters::Registry, clock::seconds_since_1970, lifecycle::GatewayReadiness, thread,
    trainer_client::TrainerClient,
};

/// Services and directories that workers use.
#[derive(Debug, Clone)]
pub struct WorkerContext {
    /// Client of the trainer service.
    pub trainers: TrainerClient,
    /// Registry that serves adapters.
    pub registry: Arc<Registry>,
    /// Readiness of the gateway, with its base.
    pub status: watch::Receiver<GatewayReadiness>,
    pub states: CheckpointStore,
    /// Directories in which trainers leave states for the next trainer.
    pub passages: TransferDirectories,
}

/// Worker that runs the commands of one model.
#[derive(Debug)]
pub(crate) struct ModelWorker {
    /// Queue of the model's commands.
    pub work_queue: Arc<WorkQueue>,
    pub tenant: Arc<str>,
    /// Id of the model for clients.
    pub model_id: String,
    /// Name of the model in checkpoint paths.
    pub run: String,
    pub means: WorkerContext,
    /// Future of the current command.
    pub running: Option<Arc<RequestFuture>>,
    /// Names of the served snapshots, the oldest first.
    pub snapshots: VecDeque<String>,
}

impl ModelWorker {
    /// Runs commands until the worker is dropped.
    pub(crate) async fn work(mut self) {
        let mut stage = TrainerStage::new();
        loop {
            let (work, promise) = self.next(&mut stage).await;
            self.running = Some(promise);
            let carried = match self.opened(&mut stage, &work).await {
                Err(failure) => Ok(Err(failure)),
                Ok(open) => {
                    let carried = self.carry_out(&mut open.trainer, work).await;
                    open.used = Instant::now();
                    carried
                }
            };
            let outcome = carried.unwrap_or_else(|error| {
                stage = TrainerStage::Without(ended(&error));
                self.note(&stage);
                Err(ended(&error))
            });
            self.keep(outcome.into());
        }
    }

    fn keep(&mut self, outcome: FutureResult) {
        if let Some(promise) = self.running.take() {
            promise.keep(outcome);
        }
    }

    /// Runs a command. The outer error means that the trainer has ended.
    async fn carry_out(
        &mut self,
        trainer: &mut Trainer,
        work: ModelCommand,
    ) -> io::Result<Result<FutureResult, CommandRefusal>> {
        Ok(match work {
            ModelCommand::Refused(failure) => Err(failure),
            ModelCommand::Create { lora, seed } => {
                let done = trainer.order(&TrainingCommand::Create { lora, seed }, &[]).await?;
                let answer = json!({ "type": "create_model", "model_id": self.model_id });
                self.begun(done).map(|()| FutureResult::Json(answer))
            }
            ModelCommand::Load { run, name, optimizer } => self.load(trainer, &run, &name, optimizer).await?,
            ModelCommand::ForwardBackward(batch) => {
                let done = trainer.order(&batch.order, &batch.numbers).await?;
                if let Ok((done, _)) = &done {
                    self.work_queue.note(|progress| progress.loss = done.metrics.get("loss:sum").copied());
                }
                done.map(|(done, logprobs)| batch.answer(done, logprobs))
            }
            ModelCommand::Step(adam) => {
                let done = trainer.order(&TrainingCommand::OptimStep(adam), &[]).await?;
                self.work_queue.note(|progress| progress.steps += u64::from(done.is_ok()));
                done.map(|(done, _)| {
                    FutureResult::Json(json!({ "type": "optim_step", "metrics": done.metrics }))
                })
            }
            ModelCommand::SaveState { name, overwrite, ttl_s } => {
                self.save(trainer, &name, overwrite, ttl_s).await?
            }
            ModelCommand::Publish { adapter, answer, ttl_s } => {
                self.publish(trainer, adapter, answer, ttl_s).await?
            }
        })
    }

    fn begun(&self, done: Result<(CommandDone, Vec<u8>), CommandRefusal>) -> Result<(), CommandRefusal> {
        if let Some(lora) = done?.0.lora {
            // A model keeps the adapter size of its first command.
            let _ = self.work_queue.lora.set(lora);
        }
        Ok(())
    }

    async fn load(
        &self,
        trainer: &mut Trainer,
        run: &str,
        name: &str,
        optimizer: bool,
    ) -> io::Result<Result<FutureResult, CommandRefusal>> {
        let directory = self.means.states.directory(&self.tenant, run, name);
        let path = format!("tinker://{run}/weights/{name}");
        let (states, tenant) = (self.means.states.clone(), Arc::clone(&self.tenant));
        let kept = (run.to_owned(), name.to_owned());
        match on_disk(move || states.has(&tenant, &kept.0, &kept.1)).await {
            Ok(true) => {}
            Ok(false) => {
                let message = format!("there is no state {path}; use a path that save_state returned");
                return Ok(Err(CommandRefusal::user(message)));
            }
            Err(failure) => return Ok(Err(failure)),
        }
        let order = TrainingCommand::Load { directory, optimizer };
        let begun = self.begun(trainer.order(&order, &[]).await?);
        Ok(begun.map(|()| {
            FutureResult::Json(json!({ "type": "load_weights", "path": path, "model_id": self.model_id }))
        }))
    }

    async fn save(
        &self,
        trainer: &mut Trainer,
        name: &str,
        overwrite: bool,
        ttl_s: Option<u64>,
    ) -> io::Result<Result<FutureResult, CommandRefusal>> {
        let (states, tenant) = (self.means.states.clone(), Arc::clone(&self.tenant));
        let (run, kept) = (self.run.clone(), name.to_owned());
        let directory = on_disk(move || states.make_room(&tenant, &run, &kept, overwrite)).await;
        let directory = match directory.and_then(|made| made) {
            Ok(directory) => directory,
            Err(failure) => return Ok(Err(failure)),
        };
        let order = TrainingCommand::SaveState { directory: directory.clone() };
        if let Err(failure) = trainer.order(&order, &[]).await? {
            return Ok(Err(failure));
        }
        let base = self.means.status.borrow().serving().map(|serving| serving.base_name.clone());
        let about =
            CheckpointBase { base: base.unwrap_or_default(), lora: self.work_queue.lora.get().cloned() };
        let (states, path) = (self.means.states.clone(), format!("tinker://{}/weights/{name}", self.run));
        let describe = move || {
            states.describe(&directory, &about)?;
            expiry::set(&directory, ttl_s.map(from_now))
        };
        Ok(on_disk(describe).await.and_then(|described| match described {
            Ok(()) => Ok(FutureResult::Json(json!({ "type": "save_weights", "path": path }))),
            Err(error) => Err(CommandRefusal::server(format!("cannot save the state: {error}"))),
        }))
    }
}

impl Drop for ModelWorker {
    fn drop(&mut self) {
        self.keep(session_ended());
        self.work_queue.close();
    }
}

/// Returns the result of `work` on files, which may block.
pub(super) async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, CommandRefusal> {
    let done = thread::run("tinker-states", work).await;
    done.map_err(|error| CommandRefusal::server(format!("cannot read the disk usage: {error}")))
}

/// Returns the time `ttl_s` seconds from now, in seconds since 1970.
pub(super) fn from_now(ttl_s: u64) -> u64 {
    seconds_since_1970().saturating_add(ttl_s)
}

/// Returns the refusal of commands after the end of the trainer.
pub(super) fn ended(why: &dyn Display) -> CommandRefusal {
    CommandRefusal::server(format!(
        "the trainer of this model has ended ({why}); continue from the last saved state with \
         create_training_client_from_state_with_optimizer"
    ))
}
