//! What may happen to a job: paused, resumed, cancelled; and what is written of it. Each change is durable before it is
//! answered.

use std::time::Instant;

use control_protocol::training::TrainingEvent;
use tokio::sync::watch;

use super::{
    Training, TrainingError, event_log, files,
    records::{EventLevel, EventRecord, Failure, JobRecord, JobStatus},
    table::{ListedPage, Page, UpdatedBy, shared::leases::Fence},
};
use crate::{
    clock::seconds_since_1970,
    trainer_client::trainer_slots::{TrainerSlot, TrainerSlots},
};

/// How often a job may be paused: each time is an event that is kept.
const MAX_PAUSES: u32 = 1000;
/// Jobs that have ended of which a tenant's newest are kept, with their events and results.
const KEPT_JOBS: u32 = 1000;

/// A job that has not ended.
#[derive(Debug)]
pub(super) struct ActiveJob {
    pub(super) job: JobRecord,
    /// Its trainer, if it has one, ends when this says so.
    pub(super) stop: watch::Sender<bool>,
    /// Whether somebody works on it: has a trainer for it, or puts its adapter under its name.
    pub(super) is_attended: bool,
    /// What it has of trainers: it waits for one, or has one here or on another host.
    pub(super) place: Option<TrainerSlot>,
    /// Trainers in a row that got nowhere.
    pub(super) failures: u32,
    /// Whether its events say that its adapter is made and waits to be published.
    pub(super) is_unpublished: bool,
    /// When the next trainer may be asked for.
    pub(super) not_before: Option<Instant>,
    /// What its trainer learns from in a second, as it said last.
    pub(super) tokens_per_s: Option<f64>,
    /// In a fleet, as long as it is this host that works on it.
    pub(super) hold: Option<JobLease>,
    /// In a fleet, whether another host works on it.
    pub(super) is_elsewhere: bool,
    /// In a fleet, what its trainer has said and nobody has written yet.
    pub(super) unwritten: Vec<TrainingEvent>,
    /// When this was so: what was read before says nothing of it.
    pub(super) known: Instant,
}

/// That it is this host that works on a job.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobLease {
    pub(super) fence: Fence,
    /// Until it is no longer sure of that.
    pub(super) until: Instant,
}

/// Who changes a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JobActor {
    /// Whoever asks for it.
    Caller,
    /// Who works on it, here.
    Worker,
}

impl ActiveJob {
    /// One that waits.
    pub(super) fn new(job: JobRecord) -> Self {
        Self::known_at(Instant::now(), job)
    }

    /// One that waited at a time.
    pub(super) fn known_at(known: Instant, mut job: JobRecord) -> Self {
        if job.status.is_due() {
            job.status = JobStatus::Queued;
        }
        let stop = watch::Sender::new(false);
        Self {
            job,
            stop,
            is_attended: false,
            place: None,
            failures: 0,
            is_unpublished: false,
            not_before: None,
            tokens_per_s: None,
            hold: None,
            is_elsewhere: false,
            unwritten: Vec::new(),
            known,
        }
    }

    /// Brings the place of a job that nobody attends to here up to date: it waits for a trainer, has one elsewhere, or neither.
    pub(super) fn queue(&mut self, places: &TrainerSlots, now: Instant) {
        let waits = self.job.status.is_due() && self.not_before.is_none_or(|time| time <= now);
        let (found, tenant) = (self.place.take(), &self.job.tenant);
        self.place = match (self.is_elsewhere, waits) {
            (true, _) => found.filter(|place| !place.waits()).or_else(|| Some(places.elsewhere(tenant))),
            (false, true) => found.filter(TrainerSlot::waits).or_else(|| Some(places.wait(tenant))),
            (false, false) => None,
        };
        self.place.iter().filter(|place| place.waits()).for_each(TrainerSlot::renew);
    }
}

impl JobStatus {
    /// As people say it.
    fn said(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::ValidatingFiles => "reading its data",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Succeeded => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

impl Training {
    /// Jobs of `tenant`.
    ///
    /// # Errors
    /// The database's.
    pub async fn jobs(&self, tenant: &str, page: &Page) -> Result<ListedPage<JobRecord>, TrainingError> {
        Ok(self.table.jobs(tenant, page).await?)
    }

    /// What happened to a job.
    ///
    /// # Errors
    /// There is no such job.
    pub async fn events(
        &self,
        id: &str,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<(i64, EventRecord)>, TrainingError> {
        let job = self.job(id, tenant).await?;
        Ok(self.table.events(&job.id, page).await?)
    }

    /// Ends a job without an adapter.
    ///
    /// # Errors
    /// It has ended already.
    pub async fn cancel(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, JobStatus::Cancelled, "cancelled", |status| !status.is_final()).await
    }

    /// Lets a job wait, at its last checkpoint.
    ///
    /// # Errors
    /// It neither runs nor waits for its turn.
    pub async fn pause(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, JobStatus::Paused, "paused", JobStatus::is_due).await
    }

    /// Lets a job go on that was paused.
    ///
    /// # Errors
    /// It is not paused.
    pub async fn resume(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, JobStatus::Queued, "resumed", |status| status == JobStatus::Paused).await
    }

    async fn turn_to(
        &self,
        id: &str,
        tenant: &str,
        status: JobStatus,
        wanted: &'static str,
        is_possible: fn(JobStatus) -> bool,
    ) -> Result<JobRecord, TrainingError> {
        let job = self.job(id, tenant).await?;
        let turn = |job: &mut JobRecord| {
            let found = job.status;
            if job.is_all_but_done() {
                return Err(TrainingError::WrongState { status: "all but done", wanted });
            }
            if !is_possible(found) {
                return Err(TrainingError::WrongState { status: found.said(), wanted });
            }
            if status == JobStatus::Paused {
                job.pauses += 1;
                if job.pauses > MAX_PAUSES {
                    return Err(TrainingError::TooManyPauses(MAX_PAUSES));
                }
            }
            job.status = status;
            Ok(vec![EventRecord::now(EventLevel::Info, format!("the job was {wanted}"))])
        };
        let changed = self.change(&job.id, JobActor::Caller, turn).await?;
        changed.ok_or(TrainingError::WrongState { status: job.status.said(), wanted })
    }

    /// Changes a job that has not ended, on disk and in memory; `None` if it has, or if the worker is here no longer. A trainer
    /// that works on what is no longer wanted is stopped.
    pub(super) async fn change(
        &self,
        id: &str,
        author: JobActor,
        change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
    ) -> Result<Option<JobRecord>, TrainingError> {
        let _changing = self.changing.lock(id.to_owned()).await;
        let Some((by, unwritten)) = self.change_authority(id, author) else { return Ok(None) };
        let written = unwritten.len();
        let change = |job: &mut JobRecord| {
            let mut events: Vec<_> =
                unwritten.into_iter().flat_map(|event| event_log::noted(job, event)).collect();
            events.extend(change(job)?);
            if job.status.is_final() {
                job.finished_at = Some(seconds_since_1970());
                job.estimated_finish = None;
            }
            Ok(events)
        };
        let Some(job) = self.table.change(id, by, change).await? else {
            if let UpdatedBy::Holder(fence) = by {
                self.lose(id, fence);
            }
            return Ok(None);
        };
        self.counters.changed(&job);
        self.changed(&job, written);
        if job.status.is_final()
            && let Err(error) = self.remove_ended(&job.tenant, KEPT_JOBS).await
        {
            // The next job of the tenant that ends does it.
            tracing::debug!(%error, "jobs that ended long ago could not be removed");
        }
        Ok(Some(job))
    }

    /// Removes jobs of `tenant` that have ended, with their events and results, but for the `keep` newest.
    async fn remove_ended(&self, tenant: &str, keep: u32) -> Result<(), TrainingError> {
        for job in self.table.remove_ended(tenant, keep).await? {
            let Some(results) = job.result_file else { continue };
            match self.remove_file(&results, tenant).await {
                // The tenant has removed it before.
                Ok(_) | Err(TrainingError::NoFile(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// In whose name a job is changed, and what is to be written of it before; `None` if it is somebody else's to change.
    fn change_authority(&self, id: &str, author: JobActor) -> Option<(UpdatedBy, Vec<TrainingEvent>)> {
        if author == JobActor::Caller || self.fleet.is_none() {
            return Some((UpdatedBy::Anyone, Vec::new()));
        }
        let live = self.active_jobs();
        let found = live.get(id)?;
        Some((UpdatedBy::Holder(found.hold?.fence), found.unwritten.clone()))
    }

    /// Takes over a job as it was written, with the first `written` of what its trainer has said.
    fn changed(&self, job: &JobRecord, written: usize) {
        let mut live = self.active_jobs();
        if let Some(found) = live.get_mut(&job.id) {
            (found.job, found.known) = (job.clone(), Instant::now());
            found.unwritten.drain(..written.min(found.unwritten.len()));
            found.stop.send_if_modified(|stop| {
                let is_unwanted = !job.status.is_due();
                std::mem::replace(stop, is_unwanted) != is_unwanted
            });
            // Whoever works on it lets go of it first.
            if job.status.is_final() && !found.is_attended {
                live.remove(&job.id);
                tokio::spawn(files::remove(self.job_directory(&job.id)));
            }
        }
        drop(live);
        self.due.notify_one();
        if let Some(fleet) = self.fleet.as_ref().filter(|_| job.status.is_final()) {
            fleet.litter.notify_one();
        }
    }
}

/// A job that failed for this reason.
pub(super) fn fail(
    code: &str,
    message: String,
    param: Option<&str>,
) -> impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError> {
    let (code, param) = (code.to_owned(), param.map(ToOwned::to_owned));
    move |job| {
        let event = EventRecord::now(EventLevel::Error, format!("the job failed: {message}"));
        (job.status, job.error) = (JobStatus::Failed, Some(Failure { code, message, param }));
        Ok(vec![event])
    }
}
