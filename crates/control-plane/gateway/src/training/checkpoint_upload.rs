//! Checkpoints of a job on their way to a fleet's bucket: the newest, one at a time, while its trainer goes on. The job's row
//! names it once it is there whole, and no longer the one before.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, error::TryRecvError, unbounded_channel},
    time::sleep,
};

use super::{
    Training, TrainingError, event_log, failed, fleet::TrainingFleet, job::JobActor, records::JobRecord,
    trainer_args::CHECKPOINT_NAME,
};

/// Between two tries to bring a checkpoint.
const PAUSE: Duration = Duration::from_secs(1);
/// Tries after the end of the trainer.
const LAST_TRIES: u32 = 10;

/// Where a trainer's checkpoints are handed over.
#[derive(Debug)]
pub(super) struct CheckpointSender {
    directory: PathBuf,
    /// After which step; none if no checkpoint is needed any more.
    steps: UnboundedSender<Option<u64>>,
}

/// The other end of it.
#[derive(Debug)]
pub(super) struct CheckpointUploader {
    directory: PathBuf,
    steps: UnboundedReceiver<Option<u64>>,
}

impl CheckpointSender {
    /// Both ends, for a job in `directory`.
    pub(super) fn new(directory: PathBuf) -> (Self, CheckpointUploader) {
        let (to, from) = unbounded_channel();
        (Self { directory: directory.clone(), steps: to }, CheckpointUploader { directory, steps: from })
    }

    /// Hands over the checkpoint that is there now, before the trainer puts another in its place.
    pub(super) fn hand_over(&self, step: u64) -> Result<(), TrainingError> {
        let path = link(&self.directory, step);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &path)(error));
            }
            _ => {}
        }
        fs::hard_link(self.directory.join(CHECKPOINT_NAME), &path).map_err(failed("linking", &path))?;
        // Where nobody takes it, it goes with the directory.
        let _ = self.steps.send(Some(step));
        Ok(())
    }

    /// The adapter is there: nobody will go on from a checkpoint.
    pub(super) fn is_not_needed(&self) {
        let _ = self.steps.send(None);
    }
}

/// What the checkpoint after `step` is called until it is in the bucket.
fn link(directory: &Path, step: u64) -> PathBuf {
    directory.join(format!("outgoing-{step}"))
}

impl Training {
    /// Brings checkpoints to the bucket until the trainer has ended, and the last one too.
    pub(super) async fn upload_checkpoints(&self, job: &JobRecord, mut from: CheckpointUploader) {
        let Some(fleet) = &self.fleet else { return };
        let mut tries = LAST_TRIES;
        let Some(mut step) = from.steps.recv().await.flatten() else { return };
        loop {
            let done = self.carry_one(fleet, job, &link(&from.directory, step), step).await;
            let is_done = done.is_ok();
            if let Err(error) = done {
                tracing::warn!(job = job.id, step, %error, "a checkpoint is not in the bucket yet");
                sleep(PAUSE).await;
            }
            match from.steps.try_recv() {
                Ok(Some(newer)) => step = newer,
                Ok(None) => return,
                Err(TryRecvError::Disconnected) if is_done || tries == 0 => return,
                Err(TryRecvError::Disconnected) => tries -= 1,
                Err(TryRecvError::Empty) if is_done => match from.steps.recv().await.flatten() {
                    Some(newer) => step = newer,
                    None => return,
                },
                Err(TryRecvError::Empty) => {}
            }
        }
    }

    async fn carry_one(
        &self,
        fleet: &TrainingFleet,
        job: &JobRecord,
        from: &Path,
        step: u64,
    ) -> Result<(), TrainingError> {
        if self.active_jobs().get(&job.id).is_none_or(|found| found.hold.is_none()) {
            return Ok(());
        }
        let object = fleet.send_as(job, CHECKPOINT_NAME.to_owned(), from).await?;
        let path = object.path.clone();
        let named = |job: &mut JobRecord| {
            event_log::confirmed(job, step);
            job.objects.retain(|object| object.name != CHECKPOINT_NAME);
            job.objects.push(object);
            Ok(Vec::new())
        };
        let named = self.change(&job.id, JobActor::Worker, named).await;
        if !matches!(named, Ok(Some(_))) {
            fleet.discard(&path).await;
        }
        named?;
        fleet.litter.notify_one();
        let _ = fs::remove_file(from);
        Ok(())
    }
}
