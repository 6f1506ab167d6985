//! Changes of a job: pausing, resuming, cancelling, and their events. Each change is durable before it is
//! acknowledged.

use std::time::Instant;

use control_protocol::training::TrainingEvent;
use tokio::sync::watch;

use super::{
    Training, TrainingError, event_log, files,
    records::{EventLevel, EventRecord, Failure, JobRecord, JobStatus},
    table::{ListedPage, Page, UpdatedBy, shared::leases::FencingToken},
};
use crate::{
    clock::seconds_since_1970,
    trainer_client::trainer_slots::{TrainerSlot, TrainerSlots},
};

/// Maximum number of pauses per job, since each adds an event that is kept.
const MAX_PAUSES: u32 = 1000;
/// Number of a tenant's newest ended jobs that are kept, with their events and results.
const KEPT_JOBS: u32 = 1000;

/// An unfinished job in memory.
#[derive(Debug)]
pub(super) struct ActiveJob {
    pub(super) job: JobRecord,
    /// Signal that stops the job's trainer.
    pub(super) stop: watch::Sender<bool>,
    /// Whether a worker here trains the job or registers its adapter.
    pub(super) is_attended: bool,
    /// Place in the queue for trainers, or the trainer that the job has here or on another host.
    pub(super) place: Option<TrainerSlot>,
    /// Number of consecutive trainers without progress.
    pub(super) failures: u32,
    /// Whether an event reports that the finished adapter waits to be published.
    pub(super) is_unpublished: bool,
    /// Earliest time for the next request for a trainer.
    pub(super) not_before: Option<Instant>,
    /// Training speed in tokens per second, as the trainer last reported.
    pub(super) tokens_per_s: Option<f64>,
    /// In a fleet, the lease that this host has on the job.
    pub(super) hold: Option<JobLease>,
    /// In a fleet, whether another host works on the job.
    pub(super) is_elsewhere: bool,
    /// In a fleet, the trainer's reports that are not written yet.
    pub(super) unwritten: Vec<TrainingEvent>,
    /// Time of this state; rows that were read earlier are ignored.
    pub(super) known: Instant,
}

/// Lease of this host on a job.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobLease {
    pub(super) fence: FencingToken,
    /// Time until which this host can rely on the lease.
    pub(super) until: Instant,
}

/// Author of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JobActor {
    /// The tenant, over the API.
    Caller,
    /// The worker on this host.
    Worker,
}

impl ActiveJob {
    /// Creates the entry of a queued job.
    pub(super) fn new(job: JobRecord) -> Self {
        Self::known_at(Instant::now(), job)
    }

    /// Creates the entry of a job as it was at the time `known`.
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

    /// Updates the queue place of a job without a worker here: it waits, has a trainer on another host, or
    /// neither.
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
    /// Status as error messages name it.
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
    /// Lists the jobs of `tenant`.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn jobs(&self, tenant: &str, page: &Page) -> Result<ListedPage<JobRecord>, TrainingError> {
        Ok(self.table.jobs(tenant, page).await?)
    }

    /// Lists the events of a job.
    ///
    /// # Errors
    /// If there is no such job.
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
    /// If the job has ended already.
    pub(crate) async fn cancel(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, JobStatus::Cancelled, "cancelled", |status| !status.is_final()).await
    }

    /// Pauses a job at its last checkpoint.
    ///
    /// # Errors
    /// If the job neither runs nor waits for a trainer.
    pub async fn pause(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, JobStatus::Paused, "paused", JobStatus::is_due).await
    }

    /// Resumes a paused job.
    ///
    /// # Errors
    /// If the job is not paused.
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
                return Err(TrainingError::WrongState { status: "almost done", wanted });
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

    /// Changes an unfinished job on disk and in memory. Returns `None` if the job has ended, or if its lease
    /// is lost. A trainer whose job is no longer due is stopped.
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
            // The removal is repeated when the tenant's next job ends.
            tracing::debug!(%error, "cannot remove old jobs");
        }
        Ok(Some(job))
    }

    /// Removes ended jobs of `tenant` with their events and results, except the `keep` newest.
    async fn remove_ended(&self, tenant: &str, keep: u32) -> Result<(), TrainingError> {
        for job in self.table.remove_ended(tenant, keep).await? {
            let Some(results) = job.result_file else { continue };
            match self.remove_file(&results, tenant).await {
                // The tenant has removed the file before.
                Ok(_) | Err(TrainingError::NoFile(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the author to record, and the reports to write first; `None` if this host does not hold the
    /// job.
    fn change_authority(&self, id: &str, author: JobActor) -> Option<(UpdatedBy, Vec<TrainingEvent>)> {
        if author == JobActor::Caller || self.fleet.is_none() {
            return Some((UpdatedBy::Anyone, Vec::new()));
        }
        let live = self.active_jobs();
        let found = live.get(id)?;
        Some((UpdatedBy::Holder(found.hold?.fence), found.unwritten.clone()))
    }

    /// Updates the entry of a job whose row and first `written` reports were stored.
    fn changed(&self, job: &JobRecord, written: usize) {
        let mut live = self.active_jobs();
        if let Some(found) = live.get_mut(&job.id) {
            (found.job, found.known) = (job.clone(), Instant::now());
            found.unwritten.drain(..written.min(found.unwritten.len()));
            found.stop.send_if_modified(|stop| {
                let is_unwanted = !job.status.is_due();
                std::mem::replace(stop, is_unwanted) != is_unwanted
            });
            // A running worker removes the entry itself when it ends.
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

/// Returns a change that fails a job.
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
