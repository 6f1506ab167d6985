//! Creation of a job: provides its inputs to its future trainer and stores the job, both or neither.

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
    /// Creation slots; a caller takes one before it creates a job, and keeps it until the job is created.
    #[must_use]
    pub(crate) fn creation_slots(&self) -> &Arc<TenantSlots> {
        &self.creations
    }

    /// Creates a job for `caller`, unless a request with the same `key` has created it. The job is durable
    /// when this returns, and waits for a trainer.
    ///
    /// # Errors
    /// If an input is missing, the caller has too many jobs, or the key belongs to a different request.
    pub async fn create(
        &self,
        order: JobSpec,
        key: Option<&[u8]>,
        caller: &Caller,
        serving: &ServingState,
    ) -> Result<JobRecord, TrainingError> {
        // In a fleet, another host may train.
        if self.fleet.is_none() {
            self.trainers.check()?;
        }
        let tenant = &*caller.tenant;
        if let Some(job) = self.created_before(&order, key, tenant).await? {
            return Ok(job);
        }
        // This early check avoids needless copies. `keep` checks again, in a transaction that also counts
        // jobs of other hosts.
        let limit = self.limits.tenant_jobs;
        if self.table.unfinished_of(tenant).await? >= limit {
            return Err(TrainingError::TooManyJobs(limit));
        }
        let mut data =
            vec![(self.file_for(Purpose::FineTune, &order.training_file, tenant).await?, trainer_args::DATA)];
        if let Some(file) = &order.validation_file {
            data.push((self.file_for(Purpose::FineTune, file, tenant).await?, trainer_args::VALIDATION));
        }
        let id = fresh_id("ftjob");
        let short = &id[id.len() - 8..];
        let name = format!("{tenant}/{}", order.suffix.as_deref().unwrap_or(short));
        // The lease keeps the adapter's files until the job has its own copy.
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
            // The database may have stored the job nevertheless; the sweep at the next start removes unused
            // files.
            Err(TrainingError::Database(_)) if self.fleet.is_none() => {}
            _ => self.forget(&job).await,
        }
        kept
    }

    /// Stores a job with all its inputs, unless the same request has created one.
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
                // The change feed of the fleet may have added the job already, and a worker may run it.
                self.active_jobs().entry(job.id.clone()).or_insert_with(|| ActiveJob::new(job.clone()));
                self.due.notify_one();
                Ok(job.clone())
            }
        }
    }

    /// Provides the inputs of a job to any host that may train it; returns the objects in the bucket.
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

    /// Removes the inputs of a job that was not stored.
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

    /// Returns the job that the same request with this key has created.
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

    /// Returns the adapter version that `name` stands for, if the adapter belongs to the tenant.
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
