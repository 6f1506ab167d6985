//! What may happen to a job: created, paused, resumed, cancelled; and what is written of it. Each change is on disk before
//! it is answered.

use std::time::Instant;

use tokio::sync::{MutexGuard, watch};

use super::{
    Training, TrainingError, files, fresh_id, order,
    records::{EventRecord, Failure, JobRecord, Level, Order, Purpose, Status},
    table::{Listed, Page},
};
use crate::{caller::Caller, clock::seconds_since_1970, lifecycle::Serving};

/// A job that has not ended.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) job: JobRecord,
    /// Its trainer, if it has one, ends when this says so.
    pub(super) stop: watch::Sender<bool>,
    /// Whether somebody works on it: has a trainer for it, or puts its adapter under its name.
    pub(super) is_attended: bool,
    /// Trainers in a row that got nowhere.
    pub(super) failures: u32,
    /// When the next trainer may be asked for.
    pub(super) not_before: Option<Instant>,
    /// What its trainer learns from in a second, as it said last.
    pub(super) tokens_per_s: Option<f64>,
}

impl Live {
    /// One that waits.
    pub(super) fn new(mut job: JobRecord) -> Self {
        if job.status.is_due() {
            job.status = Status::Queued;
        }
        let stop = watch::Sender::new(false);
        Self { job, stop, is_attended: false, failures: 0, not_before: None, tokens_per_s: None }
    }
}

impl Status {
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
    /// Creates a job for `caller`, unless a request with this key has. It is durable when this returns, and waits for a trainer.
    ///
    /// # Errors
    /// What it names is not there, the caller has enough to do, or the key was another request's.
    pub async fn create(
        &self,
        order: Order,
        key: Option<&[u8]>,
        caller: &Caller,
        serving: &Serving,
    ) -> Result<JobRecord, TrainingError> {
        self.trainers.check()?;
        let tenant = &*caller.tenant;
        if let Some(job) = self.created_before(&order, key, tenant).await? {
            return Ok(job);
        }
        let mut links = vec![(self.data(&order.training_file, tenant).await?, order::DATA)];
        if let Some(file) = &order.validation_file {
            links.push((self.data(file, tenant).await?, order::VALIDATION));
        }
        let id = fresh_id("ftjob");
        let short = &id[id.len() - 8..];
        let name = format!("{tenant}/{}", order.suffix.as_deref().unwrap_or(short));
        // Held until the job goes on from its own copy: what is leased is not removed.
        let lease = match order.model == serving.base_name {
            true => None,
            false => {
                let lease = self.registry.lease(&order.model, caller)?;
                Some(lease.ok_or_else(|| TrainingError::NoModel(order.model.clone()))?)
            }
        };
        let from = match &lease {
            Some(lease) => Some(self.registry.files_of(lease.entry()).await?),
            None => None,
        };
        let replaces = self.stands_for(&name, tenant)?;
        let _changing = self.changing.lock().await;
        // The same request may have come twice at once.
        if let Some(job) = self.created_before(&order, key, tenant).await? {
            return Ok(job);
        }
        self.check_quota(tenant)?;
        files::prepare(self.job_directory(&id), links, from.as_ref().map(|(path, _)| path.clone())).await?;
        let job = JobRecord {
            id,
            tenant: tenant.to_owned(),
            order,
            name,
            replaces,
            status: Status::Queued,
            created_at: seconds_since_1970(),
            started_at: None,
            finished_at: None,
            estimated_finish: None,
            plan: None,
            step: 0,
            trained_tokens: 0,
            loss: None,
            mark: None,
            generation: None,
            result_file: None,
            error: None,
        };
        let created = EventRecord::now(Level::Info, format!("created fine-tuning job {}", job.id));
        self.registry.database().add_job(&job, key, created).await?;
        failpoint::pass("gateway.job_committed");
        self.live().insert(job.id.clone(), Live::new(job.clone()));
        self.due.notify_one();
        Ok(job)
    }

    /// The job that the same request with this key has created.
    async fn created_before(
        &self,
        order: &Order,
        key: Option<&[u8]>,
        tenant: &str,
    ) -> Result<Option<JobRecord>, TrainingError> {
        let Some(key) = key else { return Ok(None) };
        match self.registry.database().job_of_key(key, tenant).await? {
            Some(job) if job.order != *order => Err(TrainingError::KeyReused(job.id)),
            job => Ok(job),
        }
    }

    /// Where the bytes of a file to learn from are.
    async fn data(&self, id: &str, tenant: &str) -> Result<std::path::PathBuf, TrainingError> {
        let file = self.file(id, tenant).await?;
        match file.purpose {
            Purpose::FineTune => Ok(self.file_path(&file.id)),
            Purpose::FineTuneResults => Err(TrainingError::WrongPurpose(file.id)),
        }
    }

    /// The generation that `name` stands for, if it is the tenant's.
    fn stands_for(&self, name: &str, tenant: &str) -> Result<Option<String>, TrainingError> {
        match self.registry.entries().get(name) {
            None => Ok(None),
            Some(entry) if entry.record.tenant.as_deref() == Some(tenant) => {
                Ok(Some(entry.record.generation.to_string()))
            }
            Some(_) => Err(TrainingError::NameTaken(name.to_owned())),
        }
    }

    fn check_quota(&self, tenant: &str) -> Result<(), TrainingError> {
        let jobs = self.live().values().filter(|live| live.job.tenant == tenant).count();
        let limit = self.limits.tenant_jobs;
        if jobs < limit { Ok(()) } else { Err(TrainingError::TooManyJobs(limit)) }
    }

    /// Jobs of `tenant`.
    ///
    /// # Errors
    /// The database's.
    pub async fn jobs(&self, tenant: &str, page: &Page) -> Result<Listed<JobRecord>, TrainingError> {
        Ok(self.registry.database().jobs(tenant, page).await?)
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
    ) -> Result<Listed<(i64, EventRecord)>, TrainingError> {
        let job = self.job(id, tenant).await?;
        Ok(self.registry.database().events(&job.id, page).await?)
    }

    /// Ends a job without an adapter.
    ///
    /// # Errors
    /// It has ended already.
    pub async fn cancel(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, Status::Cancelled, "cancelled", |status| !status.is_final()).await
    }

    /// Lets a job wait, at its last checkpoint.
    ///
    /// # Errors
    /// It neither runs nor waits for its turn.
    pub async fn pause(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, Status::Paused, "paused", Status::is_due).await
    }

    /// Lets a job go on that was paused.
    ///
    /// # Errors
    /// It is not paused.
    pub async fn resume(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        self.turn_to(id, tenant, Status::Queued, "resumed", |status| status == Status::Paused).await
    }

    async fn turn_to(
        &self,
        id: &str,
        tenant: &str,
        status: Status,
        wanted: &'static str,
        is_possible: fn(Status) -> bool,
    ) -> Result<JobRecord, TrainingError> {
        let job = self.job(id, tenant).await?;
        let turn = |job: &mut JobRecord| {
            let found = job.status;
            if !is_possible(found) {
                return Err(TrainingError::WrongState { status: found.said(), wanted });
            }
            job.status = status;
            Ok(vec![EventRecord::now(Level::Info, format!("the job was {wanted}"))])
        };
        let changed = self.change(&job.id, turn).await?;
        changed.ok_or(TrainingError::WrongState { status: job.status.said(), wanted })
    }

    /// Changes a job that has not ended, on disk and in memory; `None` if it has. A trainer that works on what is no longer
    /// wanted is stopped.
    pub(super) async fn change(
        &self,
        id: &str,
        change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
    ) -> Result<Option<JobRecord>, TrainingError> {
        let turn = self.changing.lock().await;
        self.change_in(&turn, id, change).await
    }

    /// The same, for whoever has the turn.
    pub(super) async fn change_in(
        &self,
        _turn: &MutexGuard<'_, ()>,
        id: &str,
        change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
    ) -> Result<Option<JobRecord>, TrainingError> {
        let Some(mut job) = self.live().get(id).map(|live| live.job.clone()) else { return Ok(None) };
        let events = change(&mut job)?;
        if job.status.is_final() {
            job.finished_at = Some(seconds_since_1970());
            job.estimated_finish = None;
        }
        self.registry.database().put_job(&job, &events).await?;
        self.counters.changed(&job);
        let mut live = self.live();
        if let Some(found) = live.get_mut(id) {
            found.job = job.clone();
            found.stop.send_if_modified(|stop| {
                let is_unwanted = !job.status.is_due();
                std::mem::replace(stop, is_unwanted) != is_unwanted
            });
            // Whoever works on it lets go of it first.
            if job.status.is_final() && !found.is_attended {
                live.remove(id);
                tokio::spawn(files::remove(self.job_directory(id)));
            }
        }
        drop(live);
        self.due.notify_one();
        Ok(Some(job))
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
        let event = EventRecord::now(Level::Error, format!("the job failed: {message}"));
        (job.status, job.error) = (Status::Failed, Some(Failure { code, message, param }));
        Ok(vec![event])
    }
}
