//! Fine-tuning: training files, jobs, and the trainers that run them.
//!
//! A job and each of its changes are durable before they are acknowledged. The trainer of a job is a separate
//! process. Trainer and gateway may stop at any moment: the job then resumes from its checkpoint with
//! bit-identical results. A finished adapter is registered under its name by the registry's compare-and-swap.
//!
//! # Modules
//!
//! - [`records`]: rows of files and jobs; [`table`]: their storage in this host's database or in a fleet's
//!   PostgreSQL.
//! - [`files`]: uploaded files.
//! - [`trainer_args`]: arguments of a job's trainer; `event_log`: event records made from a trainer's
//!   reports.
//! - `creating`: creation of a job; [`job`]: its later changes and their events.
//! - [`stats`]: counters of jobs and trainers.
//! - [`runner`]: assignment of trainers to jobs, and their output; `completion`: results of the work on a
//!   job.
//!
//! Modules for jobs of a fleet:
//!
//! - `fleet`: files and jobs that the hosts share, and transfers to and from the bucket.
//! - `leases`: jobs that this host holds for a limited time; `checkpoint_upload`: upload of their checkpoints
//!   to the bucket.
//! - `change_feed`: changes of jobs by other hosts.
//!
//! In the state directory, `training/files` has the files by id, and `training/jobs` a directory per
//! unfinished job with links to its data, its checkpoint and its adapter. In a fleet the files lie in the
//! bucket, and a host has directories only of jobs that it has worked on. Other hosts can download or
//! compute again all files of a lost host.

mod change_feed;
mod checkpoint_upload;
mod completion;
mod creating;
mod event_log;
pub mod files;
mod fleet;
pub mod job;
mod leases;
pub mod records;
pub mod runner;
pub mod stats;
pub mod table;
pub mod trainer_args;

use std::{
    collections::{HashMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, watch};

use self::{
    fleet::TrainingFleet,
    job::ActiveJob,
    records::{FileRecord, JobRecord},
    stats::TrainingCounters,
    table::TrainingTable,
};
use crate::{
    adapters::{LeaseError, Registry, ResidencyError, database::DatabaseError, store::bucket::BucketError},
    config::TrainingLimits,
    lifecycle::GatewayReadiness,
    lock::KeyedLocks,
    tenant_slots::TenantSlots,
    thread::{self, ThreadError},
    trainer_client::{TrainerClient, TrainerUnavailable},
};

/// Failpoints of fine-tuning, in the order of a job's life.
pub const FAILPOINTS: &[&str] = &["gateway.job_committed", "gateway.job_publishing", "gateway.job_published"];

/// Maximum number of concurrent uploads, and of concurrent downloads.
pub(crate) const MAX_TRANSFERS: usize = 32;
/// Maximum number of concurrent uploads or downloads per tenant.
pub(crate) const TENANT_TRANSFERS: usize = 2;
/// Maximum number of jobs in creation, one per tenant, since each may copy an adapter.
const MAX_CREATIONS: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    NoTrainer(#[from] TrainerUnavailable),
    #[error("{attempt} '{}' failed: {source}; check that the state directory is writable and has free \
             space", path.display())]
    Io { attempt: &'static str, path: PathBuf, source: io::Error },
    /// No such file exists, or it belongs to another tenant.
    #[error("there is no file '{0}'; GET /v1/files lists your files")]
    NoFile(String),
    /// No such job exists, or it belongs to another tenant.
    #[error("there is no fine-tuning job '{0}'; GET /v1/fine_tuning/jobs lists your jobs")]
    NoJob(String),
    /// The job's status does not allow the change.
    #[error("the job is {status}, so it cannot be {wanted}")]
    WrongState {
        status: &'static str,
        /// Status that was requested.
        wanted: &'static str,
    },
    /// The file was uploaded for another purpose.
    #[error("'{id}' was not uploaded with purpose '{wanted}'")]
    WrongPurpose { id: String, wanted: &'static str },
    /// The tenant's files would exceed their limit in bytes.
    #[error(
        "your files would have {bytes} bytes in total, and the limit is {limit} \
         (--tenant-training-bytes); delete some"
    )]
    TooManyBytes {
        /// Bytes of all files of the tenant, with the new one.
        bytes: u64,
        limit: u64,
    },
    /// The tenant has reached its limit of unfinished jobs.
    #[error(
        "you have {0} waiting or running fine-tuning jobs, which is the limit (--tenant-jobs); cancel \
         one or wait for one"
    )]
    TooManyJobs(usize),
    #[error("the job was paused {0} times, which is the limit; let it run, or cancel it")]
    TooManyPauses(u32),
    /// The idempotency key was used before with a different request.
    #[error(
        "the 'Idempotency-Key' was used by a different request, which created the job '{0}'; choose \
         another key"
    )]
    KeyReused(String),
    /// The name belongs to no base and no adapter.
    #[error("the model '{0}' does not exist; GET /v1/models lists what is served")]
    NoModel(String),
    /// The adapter to train further cannot be leased.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// Files of the adapter to train further cannot be downloaded.
    #[error(transparent)]
    Files(#[from] ResidencyError),
    /// The name of the new adapter belongs to another tenant.
    #[error("the name '{0}' belongs to another tenant's adapter; choose another suffix")]
    NameTaken(String),
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The bucket's copy of a file is missing or differs from the uploaded file.
    #[error("'{0}' was removed from the fleet's object store or changed there; upload the file again")]
    Damaged(String),
    /// The thread for work on files failed.
    #[error("the work on files failed: {0}; see the log")]
    Stopped(String),
}

impl From<ThreadError> for TrainingError {
    fn from(error: ThreadError) -> Self {
        Self::Stopped(error.to_string())
    }
}

/// State of fine-tuning: files, jobs and trainers.
#[derive(Debug)]
pub struct Training {
    registry: Arc<Registry>,
    table: TrainingTable,
    /// State that is shared with other hosts; `None` outside a fleet.
    fleet: Option<TrainingFleet>,
    status: watch::Receiver<GatewayReadiness>,
    trainers: TrainerClient,
    limits: TrainingLimits,
    directory: PathBuf,
    /// Every unfinished job, by id.
    live: Mutex<HashMap<String, ActiveJob>>,
    /// Lock per job for its changes, so that its row and its entry in `live` agree.
    changing: KeyedLocks<String>,
    uploads: Arc<TenantSlots>,
    downloads: Arc<TenantSlots>,
    creations: Arc<TenantSlots>,
    counters: TrainingCounters,
    /// Signal that a job may be ready for a trainer.
    due: Notify,
}

impl Training {
    /// Opens the files and jobs of the state directory, or of the fleet's PostgreSQL. Jobs that had a trainer
    /// wait for one again.
    ///
    /// # Errors
    /// If the directory or the database cannot be used.
    pub async fn open(
        registry: Arc<Registry>,
        status: watch::Receiver<GatewayReadiness>,
        trainers: TrainerClient,
        limits: TrainingLimits,
        state: &Path,
    ) -> Result<Arc<Self>, TrainingError> {
        let directory = state.join("training");
        let table = TrainingTable::of(&registry);
        let (files, live) = match &table {
            TrainingTable::Host(database) => {
                let jobs = table.unfinished_jobs().await?;
                let ids = jobs.iter().map(|job| job.id.clone()).collect();
                sweep(&directory, "jobs", ids).await?;
                let live = jobs.into_iter().map(|job| (job.id.clone(), ActiveJob::new(job))).collect();
                (database.file_ids().await?.into_iter().collect(), live)
            }
            // The change feed reads the jobs when PostgreSQL is reachable, and sweeps their directories then.
            TrainingTable::Shared(_) => (HashSet::new(), HashMap::new()),
        };
        sweep(&directory, "files", files).await?;
        let fleet = match (&table, registry.shared()) {
            (TrainingTable::Shared(table), Some((_, bucket))) => {
                Some(TrainingFleet::new(Arc::clone(table), Arc::clone(bucket)))
            }
            _ => None,
        };
        Ok(Arc::new(Self {
            registry,
            table,
            fleet,
            status,
            trainers,
            limits,
            directory,
            live: Mutex::new(live),
            changing: KeyedLocks::default(),
            uploads: TenantSlots::new(MAX_TRANSFERS, TENANT_TRANSFERS),
            downloads: TenantSlots::new(MAX_TRANSFERS, TENANT_TRANSFERS),
            creations: TenantSlots::new(MAX_CREATIONS, 1),
            counters: TrainingCounters::default(),
            due: Notify::new(),
        }))
    }

    /// Returns the file `id` of `tenant`.
    ///
    /// # Errors
    /// If the tenant has no such file.
    pub async fn file(&self, id: &str, tenant: &str) -> Result<FileRecord, TrainingError> {
        let file = self.table.file(id, tenant).await?;
        file.ok_or_else(|| TrainingError::NoFile(shown(id)))
    }

    /// Returns the current record of the job `id` of `tenant`.
    ///
    /// # Errors
    /// If the tenant has no such job.
    pub async fn job(&self, id: &str, tenant: &str) -> Result<JobRecord, TrainingError> {
        let job = self.table.job(id, tenant).await?;
        job.ok_or_else(|| TrainingError::NoJob(shown(id)))
    }

    fn active_jobs(&self) -> MutexGuard<'_, HashMap<String, ActiveJob>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn job_directory(&self, id: &str) -> PathBuf {
        self.directory.join("jobs").join(id)
    }
}

/// Removes all entries of a folder in the training directory except `keep`.
async fn sweep(directory: &Path, folder: &str, keep: HashSet<String>) -> Result<(), TrainingError> {
    let place = directory.join(folder);
    thread::run("training-sweep", move || files::sweep(&place, &keep)).await?
}

/// Shortens an id for an error message, since callers may send any text.
fn shown(id: &str) -> String {
    id.chars().take(64).collect()
}

/// Returns a new unpredictable and unique id.
fn fresh_id(kind: &str) -> String {
    let [a, b] = [crate::random::random_u64(), crate::random::random_u64()];
    format!("{kind}-{a:016x}{:08x}", b & 0xffff_ffff)
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TrainingError + use<> {
    let path = path.to_owned();
    move |source| TrainingError::Io { attempt, path, source }
}
