//! Leases of a fleet's jobs: a host holds a job for a limited time and renews the lease while it works. A
//! host that cannot renew in time stops its trainer at a checkpoint, and another host resumes from the
//! checkpoint in the bucket.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use tokio::time::{sleep, timeout};

use super::{
    Training, TrainingError,
    completion::JobOutcome,
    failed,
    fleet::{self, TrainingFleet},
    job::{JobActor, JobLease},
    records::{EventLevel, EventRecord, JobRecord, JobStatus, ObjectRecord},
    table::shared::leases::FencingToken,
    trainer_args::{CHECKPOINT, CHECKPOINT_NAME},
};

/// Duration of a lease.
const LEASE: Duration = Duration::from_secs(10);
/// Interval between renewals of a lease.
const RENEWAL: Duration = Duration::from_secs(2);
/// Pause after a failed write.
const PAUSE: Duration = Duration::from_millis(500);
/// Interval of sweeps of the bucket without a signal.
const SWEEP: Duration = Duration::from_secs(30);

impl Training {
    /// Takes the lease of a job. False if another host holds it, or the job does not wait any more.
    pub(super) async fn acquire_lease(&self, id: &str) -> Result<bool, TrainingError> {
        let Some(fleet) = &self.fleet else { return Ok(true) };
        let asked = Instant::now();
        let taken = fleet.table.acquire_lease(id, LEASE).await?;
        let mut live = self.active_jobs();
        let Some(found) = live.get_mut(id) else { return Ok(false) };
        found.is_elsewhere = taken.is_none();
        let Some((fence, job)) = taken else { return Ok(false) };
        (found.job, found.known) = (job, Instant::now());
        found.hold = Some(JobLease { fence, until: asked + LEASE });
        found.unwritten.clear();
        found.stop.send_replace(false);
        Ok(true)
    }

    /// Releases the lease of a job, after all reports of its trainer are written.
    pub(super) async fn release_lease(&self, id: &str) {
        let Some(fleet) = &self.fleet else { return };
        let written = self.change(id, JobActor::Worker, |_| Ok(Vec::new())).await;
        let hold = self.active_jobs().get_mut(id).and_then(|found| {
            found.unwritten.clear();
            found.hold.take()
        });
        let Some(JobLease { fence, .. }) = hold else { return };
        let given = fleet.table.give_back(id, fence).await.map_err(TrainingError::from);
        if let Err(error) = written.and(given) {
            tracing::warn!(job = id, %error, "cannot return the lease of a fine-tuning job; it expires \
                later");
        }
    }

    /// Releases all leases of this host, at its shutdown.
    pub(crate) async fn let_all_go(&self) {
        let Some(fleet) = &self.fleet else { return };
        if let Err(error) = fleet.table.give_all_back().await {
            tracing::warn!(%error, "cannot return the leases of fine-tuning jobs; they expire later");
        }
    }

    /// Drops a lost lease and stops the job's trainer.
    pub(super) fn lose(&self, id: &str, fence: FencingToken) {
        let mut live = self.active_jobs();
        let held = live.get_mut(id).filter(|found| found.hold.is_some_and(|hold| hold.fence == fence));
        if let Some(found) = held {
            // The lease of an ended job is lost as a matter of course.
            if !found.job.status.is_final() {
                tracing::warn!(job = id, "this host lost the lease of a fine-tuning job; its trainer stops");
            }
            found.hold = None;
            found.stop.send_replace(true);
        }
    }

    /// Renews the leases of this host, forever.
    pub(super) async fn renew_leases(&self, fleet: &TrainingFleet) {
        loop {
            sleep(RENEWAL).await;
            let held = self.held();
            if held.is_empty() {
                continue;
            }
            let (asked, ids) = (Instant::now(), held.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>());
            let stays = timeout(RENEWAL, fleet.table.renew_leases(&ids, LEASE)).await;
            match stays {
                Ok(Ok(kept)) => self.renew(&held, &kept, asked + LEASE),
                Ok(Err(error)) => tracing::debug!(%error, "cannot renew the leases of fine-tuning jobs"),
                Err(_) => tracing::debug!("cannot renew the leases of fine-tuning jobs: no answer"),
            }
            let now = Instant::now();
            let over = held.iter().filter(|(_, hold)| hold.until <= now);
            let over: Vec<_> = over.filter(|(id, _)| self.is_over(id, now)).collect();
            over.iter().for_each(|(id, hold)| self.lose(id, hold.fence));
        }
    }

    fn held(&self) -> Vec<(String, JobLease)> {
        self.active_jobs().iter().filter_map(|(id, found)| Some((id.clone(), found.hold?))).collect()
    }

    fn is_over(&self, id: &str, now: Instant) -> bool {
        self.active_jobs().get(id).and_then(|found| found.hold).is_some_and(|hold| hold.until <= now)
    }

    fn renew(&self, held: &[(String, JobLease)], kept: &[String], until: Instant) {
        for (id, was) in held {
            if !kept.contains(id) {
                self.lose(id, was.fence);
            } else if let Some(hold) = self.active_jobs().get_mut(id).and_then(|found| found.hold.as_mut()) {
                hold.until = until;
            }
        }
    }

    /// Writes the reports of trainers as they arrive; a failed write is repeated.
    pub(super) async fn write(&self, fleet: &TrainingFleet) {
        loop {
            fleet.notes.notified().await;
            let unwritten: Vec<_> = {
                let live = self.active_jobs();
                let is_to_write = |id: &&String| live[*id].hold.is_some() && !live[*id].unwritten.is_empty();
                live.keys().filter(is_to_write).cloned().collect()
            };
            for id in unwritten {
                if let Err(error) = self.change(&id, JobActor::Worker, |_| Ok(Vec::new())).await {
                    tracing::debug!(job = id, %error, "cannot write a trainer's events; trying again later");
                    sleep(PAUSE).await;
                    fleet.notes.notify_one();
                }
            }
        }
    }

    /// Removes objects that no row names from the bucket, forever.
    pub(super) async fn sweep_bucket(&self, fleet: &TrainingFleet) {
        loop {
            let _ = timeout(SWEEP, fleet.litter.notified()).await;
            if let Err(error) = fleet.sweep().await {
                tracing::debug!(%error, "cannot remove unneeded files from the bucket for now");
            }
        }
    }

    /// Downloads the inputs of a job; returns the job's outcome if one is not available.
    pub(super) async fn prepare_inputs(
        &self,
        job: &JobRecord,
        directory: &Path,
    ) -> Result<Option<JobOutcome>, TrainingError> {
        let Some(fleet) = &self.fleet else { return Ok(None) };
        if job.status != JobStatus::Queued {
            self.requeue(&job.id, Some("the host that worked on the job has stopped".to_owned())).await?;
        }
        fs::create_dir_all(directory.join(CHECKPOINT)).map_err(failed("creating", directory))?;
        if !job.objects.iter().any(|object| object.name == CHECKPOINT_NAME) {
            // A checkpoint that no row names would not be counted.
            let _ = fs::remove_file(directory.join(CHECKPOINT_NAME));
        }
        for object in &job.objects {
            match download_object(fleet, object, &directory.join(&object.name)).await {
                Ok(()) => {}
                Err(TrainingError::Damaged(_)) if object.name == CHECKPOINT_NAME => {
                    self.begin_anew(&job.id).await?;
                    let _ = fs::remove_file(directory.join(CHECKPOINT_NAME));
                }
                Err(TrainingError::Damaged(path)) => {
                    let message = TrainingError::Damaged(path).to_string();
                    return Ok(Some(JobOutcome::Failed { message, exit: "not_found".to_owned() }));
                }
                Err(error) => return Ok(Some(JobOutcome::Unavailable(error.to_string()))),
            }
        }
        Ok(None)
    }

    /// Removes a lost checkpoint from the record, so that the job starts from its beginning.
    async fn begin_anew(&self, id: &str) -> Result<(), TrainingError> {
        let anew = |job: &mut JobRecord| {
            job.objects.retain(|object| object.name != CHECKPOINT_NAME);
            job.mark = None;
            Ok(vec![EventRecord::now(EventLevel::Warn, "the checkpoint is missing; the job starts over")])
        };
        self.change(id, JobActor::Worker, anew).await.map(drop)
    }
}

/// Downloads an object to `to`, unless the file is there.
async fn download_object(
    fleet: &TrainingFleet,
    object: &ObjectRecord,
    to: &Path,
) -> Result<(), TrainingError> {
    if let Ok(about) = fs::metadata(to) {
        // Complete data files alone have their name, so the length suffices; checkpoints need the hash, since
        // there are many.
        let is_it =
            about.len() == object.bytes && (object.name != CHECKPOINT_NAME || fleet::is(object, to).await?);
        if is_it {
            return Ok(());
        }
    }
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(failed("creating", parent))?;
    }
    fleet.download(object, to).await
}
