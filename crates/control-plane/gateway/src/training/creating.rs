//! Creating a job: what it needs is put where its trainer finds it, and the job is kept. Both happen or neither.

use std::{path::PathBuf, sync::Arc};

use super::{
    Training, TrainingError, files, fresh_id,
    job::ActiveJob,
    records::{EventLevel, EventRecord, FileRecord, JobRecord, JobSpec, ObjectRecord, Purpose, file_of},
    table::{JobAdded, NewJob},
    trainer_args,
};
use crate::{caller::Caller, lifecycle::ServingState, tenant_slots::TenantSlots};

impl Training {
    /// Who may create a job takes a slot here first, and has it until the job is created.
    #[must_use]
    pub fn creation_slots(&self) -> &Arc<TenantSlots> {
        &self.creations
    }

    /// Creates a job for `caller`, unless a request with this key has. It is durable when this returns, and waits for a trainer.
    ///
    /// # Errors
    /// What it names is not there, the caller has enough to do, or the key was another request's.
    pub async fn create(
        &self,
        order: JobSpec,
        key: Option<&[u8]>,
        caller: &Caller,
        serving: &ServingState,
    ) -> Result<JobRecord, TrainingError> {
        // Of a fleet, another host may train.
        if self.fleet.is_none() {
            self.trainers.check()?;
        }
        let tenant = &*caller.tenant;
        if let Some(job) = self.created_before(&order, key, tenant).await? {
            return Ok(job);
        }
        // Before anything is copied for it; `keep` looks again, together with what other hosts create.
        let limit = self.limits.tenant_jobs;
        if self.table.unfinished_of(tenant).await? >= limit {
            return Err(TrainingError::TooManyJobs(limit));
        }
        let mut data = vec![(self.data(&order.training_file, tenant).await?, trainer_args::DATA)];
        if let Some(file) = &order.validation_file {
            data.push((self.data(file, tenant).await?, trainer_args::VALIDATION));
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
        let mut job = JobRecord::new(id, tenant, order, name, replaces);
        job.objects = self.provide(&job, data, from.as_ref().map(|(path, _)| path.clone())).await?;
        let kept = self.keep(&job, key).await;
        match &kept {
            Ok(kept) if kept.id == job.id => {}
            // It may turn out to be kept: what nobody needs is swept at the next start.
            Err(TrainingError::Database(_)) if self.fleet.is_none() => {}
            _ => self.forget(&job).await,
        }
        kept
    }

    /// Keeps a job that has all it needs, unless the same request has created one.
    async fn keep(&self, job: &JobRecord, key: Option<&[u8]>) -> Result<JobRecord, TrainingError> {
        let event = EventRecord::now(EventLevel::Info, format!("created fine-tuning job {}", job.id));
        let limit = self.limits.tenant_jobs;
        let _changing = self.changing.lock(job.id.clone()).await;
        match self.table.add_job(NewJob { job, key, event: &event, limit }).await? {
            JobAdded::Before(before) if before.order != job.order => Err(TrainingError::KeyReused(before.id)),
            JobAdded::Before(before) => Ok(*before),
            JobAdded::TooMany => Err(TrainingError::TooManyJobs(limit)),
            JobAdded::NoFile(id) => Err(TrainingError::NoFile(id)),
            JobAdded::Kept => {
                failpoint::pass("gateway.job_committed");
                // Whoever follows the fleet may have heard of it first, and it may be worked on already.
                self.active_jobs().entry(job.id.clone()).or_insert_with(|| ActiveJob::new(job.clone()));
                self.due.notify_one();
                Ok(job.clone())
            }
        }
    }

    /// Sees that a job has what it needs wherever it gets its trainer; returns what of it lies in a bucket.
    async fn provide(
        &self,
        job: &JobRecord,
        data: Vec<(FileRecord, &'static str)>,
        from: Option<PathBuf>,
    ) -> Result<Vec<ObjectRecord>, TrainingError> {
        let Some(fleet) = &self.fleet else {
            let links = data.into_iter().map(|(file, name)| (self.file_path(&file.id), name)).collect();
            return files::prepare(self.job_directory(&job.id), links, from).await.map(|()| Vec::new());
        };
        let mut objects: Vec<_> = data.into_iter().map(|(file, name)| file.object(name)).collect();
        if let Some(from) = from {
            objects.extend(fleet.send_all(job, trainer_args::FROM, &from).await?);
        }
        Ok(objects)
    }

    /// Removes what was provided for a job that is not kept.
    async fn forget(&self, job: &JobRecord) {
        match &self.fleet {
            None => files::remove(self.job_directory(&job.id)).await,
            Some(fleet) => {
                for object in job.objects.iter().filter(|object| file_of(&object.path).is_none()) {
                    fleet.discard(&object.path).await;
                }
            }
        }
    }

    /// The job that the same request with this key has created.
    async fn created_before(
        &self,
        order: &JobSpec,
        key: Option<&[u8]>,
        tenant: &str,
    ) -> Result<Option<JobRecord>, TrainingError> {
        let Some(key) = key else { return Ok(None) };
        match self.table.job_of_key(key, tenant).await? {
            Some(job) if job.order != *order => Err(TrainingError::KeyReused(job.id)),
            job => Ok(job),
        }
    }

    /// A file to learn from.
    async fn data(&self, id: &str, tenant: &str) -> Result<FileRecord, TrainingError> {
        let file = self.file(id, tenant).await?;
        match file.purpose {
            Purpose::FineTune => Ok(file),
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
}
