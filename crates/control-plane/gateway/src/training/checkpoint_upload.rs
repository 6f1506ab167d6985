//! Upload of a job's checkpoints to a fleet's bucket: always the newest, one at a time, while the trainer
//! continues. After a complete upload the job's row names the new checkpoint instead of the previous one.

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

/// Pause before another attempt to upload a checkpoint.
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of attempts after the end of the trainer.
const LAST_TRIES: u32 = 10;

/// Sending end for a trainer's checkpoints.
#[derive(Debug)]
pub(super) struct CheckpointSender {
    directory: PathBuf,
    /// Last step of each checkpoint; `None` if no checkpoint is needed any more.
    steps: UnboundedSender<Option<u64>>,
}

/// Receiving end for a trainer's checkpoints.
#[derive(Debug)]
pub(super) struct CheckpointUploader {
    directory: PathBuf,
    steps: UnboundedReceiver<Option<u64>>,
}

impl CheckpointSender {
    /// Creates both ends for a job in `directory`.
    pub(super) fn new(directory: PathBuf) -> (Self, CheckpointUploader) {
        let (to, from) = unbounded_channel();
        (Self { directory: directory.clone(), steps: to }, CheckpointUploader { directory, steps: from })
    }

    /// Hands over the current checkpoint, by a hard link made before the trainer replaces the file.
    pub(super) fn hand_over(&self, step: u64) -> Result<(), TrainingError> {
        let path = link(&self.directory, step);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &path)(error));
            }
            _ => {}
        }
        fs::hard_link(self.directory.join(CHECKPOINT_NAME), &path).map_err(failed("linking", &path))?;
        // Without a receiver, the link is removed with the directory.
        let _ = self.steps.send(Some(step));
        Ok(())
    }

    /// Ends the upload, because the adapter is complete and no job will resume from a checkpoint.
    pub(super) fn is_not_needed(&self) {
        let _ = self.steps.send(None);
    }
}

/// Returns the path of the checkpoint after `step` until its upload is complete.
fn link(directory: &Path, step: u64) -> PathBuf {
    directory.join(format!("outgoing-{step}"))
}

impl Training {
    /// Uploads checkpoints until the trainer has ended and its last one is uploaded.
    pub(super) async fn upload_checkpoints(&self, job: &JobRecord, mut from: CheckpointUploader) {
        let Some(fleet) = &self.fleet else { return };
        let mut tries = LAST_TRIES;
        let Some(mut step) = from.steps.recv().await.flatten() else { return };
        loop {
            let done = self.carry_one(fleet, job, &link(&from.directory, step), step).await;
            let is_done = done.is_ok();
            if let Err(error) = done {
                tracing::warn!(job = job.id, step, %error, "cannot upload a checkpoint yet");
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
