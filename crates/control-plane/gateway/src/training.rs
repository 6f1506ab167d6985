//! Fine-tuning: files to learn from, jobs, and the trainers that do them.
//!
//! A job is durable before it is acknowledged, and everything that changes it is. Its trainer is a process of its own, which
//! may die at any moment, as this one may: the job goes on from its checkpoint, to the same bits. An adapter that is done is
//! put under its name by the registry's compare-and-swap.
//!
//! # Where things are
//!
//! - [`records`]: what is kept, [`table`]: in this host's database, or in the PostgreSQL of a fleet.
//! - [`files`]: what people send.
//! - [`trainer_args`]: what the trainer of a job is told; `event_log`: what is written of what it says.
//! - `creating`: how a job begins; [`job`]: what may happen to it then, and what is written of it.
//! - [`stats`]: what is counted.
//! - [`runner`]: who gets a trainer when, and what it says; `completion`: what comes of it.
//!
//! And where jobs belong to a fleet:
//!
//! - `fleet`: what its hosts share of them, and bytes brought to the bucket and back.
//! - `leases`: jobs that are this host's to work on, for a time; `checkpoint_upload`: their checkpoints on the way to the bucket.
//! - `change_feed`: what other hosts do to jobs.
//!
//! Within the state directory, `training/files` has the files by id, and `training/jobs` a directory for each job that has
//! not ended: links to its data, its checkpoint, its adapter. In a fleet the files are in the bucket, and a host has the
//! directories of those jobs that it has worked on: what can be lost with it can be brought again, or made.

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

/// Places where a test may make the gateway die, in the order of a job's life.
pub const FAILPOINTS: &[&str] = &["gateway.job_committed", "gateway.job_publishing", "gateway.job_published"];

/// Files that are taken in at once, and files that are read at once.
pub const MAX_TRANSFERS: usize = 32;
/// Those of one tenant among them.
pub const TENANT_TRANSFERS: usize = 2;
/// Jobs that are created at once, one of a tenant: each may copy an adapter.
const MAX_CREATIONS: usize = 4;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// The database.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// There is nobody who trains.
    #[error(transparent)]
    NoTrainer(#[from] TrainerUnavailable),
    /// A file could not be kept.
    #[error("{attempt} '{}' failed: {source}; check that the state directory is writable and has room", path.display())]
    Io {
        /// What was tried.
        attempt: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No such file, or another tenant's.
    #[error("no file is called '{0}'; GET /v1/files lists yours")]
    NoFile(String),
    /// No such job, or another tenant's.
    #[error("no fine-tuning job is called '{0}'; GET /v1/fine_tuning/jobs lists yours")]
    NoJob(String),
    /// It is not in a state for that.
    #[error("the job is {status}, so it cannot be {wanted}")]
    WrongState {
        /// How far it is.
        status: &'static str,
        /// What was asked.
        wanted: &'static str,
    },
    /// The file is needed for something else than that.
    #[error("'{0}' was not uploaded with purpose 'fine-tune'")]
    WrongPurpose(String),
    /// The tenant's files take too much.
    #[error(
        "your files would take {bytes} bytes together, and may take {limit} (--tenant-training-bytes); delete some"
    )]
    TooManyBytes {
        /// All of them.
        bytes: u64,
        /// What they may take.
        limit: u64,
    },
    /// The tenant has enough to do.
    #[error(
        "you have {0} fine-tuning jobs that wait or run, which is the limit (--tenant-jobs); cancel one or wait for one"
    )]
    TooManyJobs(usize),
    /// Somebody has paused the job too often.
    #[error("the job was paused {0} times, which is the limit; let it run, or cancel it")]
    TooManyPauses(u32),
    /// The key came with another request before.
    #[error(
        "the header 'Idempotency-Key' came before with another request, which created the job '{0}'; choose another key"
    )]
    KeyReused(String),
    /// No base and no adapter of that name.
    #[error("the model '{0}' does not exist; GET /v1/models lists what is served")]
    NoModel(String),
    /// The adapter to go on from cannot be used.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// Its files do not come.
    #[error(transparent)]
    Files(#[from] ResidencyError),
    /// The name that the adapter would get is another's.
    #[error("an adapter that is not yours is called '{0}'; choose another suffix")]
    NameTaken(String),
    /// The bucket of the fleet.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// What the bucket of the fleet gives is not what was sent there.
    #[error("'{0}' is gone from the fleet's bucket, or was changed there; send the file again")]
    Damaged(String),
    /// The thread that worked on it is gone.
    #[error("working on files stopped: {0}; the log says why")]
    Stopped(String),
}

impl From<ThreadError> for TrainingError {
    fn from(error: ThreadError) -> Self {
        Self::Stopped(error.to_string())
    }
}

/// Files, jobs and trainers.
#[derive(Debug)]
pub struct Training {
    registry: Arc<Registry>,
    table: TrainingTable,
    /// What is shared with other hosts, if anything is.
    fleet: Option<TrainingFleet>,
    status: watch::Receiver<GatewayReadiness>,
    trainers: TrainerClient,
    limits: TrainingLimits,
    directory: PathBuf,
    /// Every job that has not ended, by id.
    live: Mutex<HashMap<String, ActiveJob>>,
    /// Held by job while the job changes, so that its row and its entry in `live` stay in step.
    changing: KeyedLocks<String>,
    uploads: Arc<TenantSlots>,
    downloads: Arc<TenantSlots>,
    creations: Arc<TenantSlots>,
    counters: TrainingCounters,
    /// A job may have become due.
    due: Notify,
}

impl Training {
    /// Opens what there is in the state directory, or in the fleet's PostgreSQL. Jobs that had a trainer wait for one again.
    ///
    /// # Errors
    /// The directory cannot be used, or the database.
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
            // What jobs there are is read as soon as it can be, and their directories are swept then.
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

    /// The file `id` of `tenant`.
    ///
    /// # Errors
    /// There is none.
    pub async fn file(&self, id: &str, tenant: &str) -> Result<FileRecord, TrainingError> {
        let file = self.table.file(id, tenant).await?;
        file.ok_or_else(|| TrainingError::NoFile(shown(id)))
    }

    /// The job `id` of `tenant`, as it is now.
    ///
    /// # Errors
    /// There is none.
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

/// Removes what is in a folder of the directory of training, but for `keep`.
async fn sweep(directory: &Path, folder: &str, keep: HashSet<String>) -> Result<(), TrainingError> {
    let place = directory.join(folder);
    thread::run("training-sweep", move || files::sweep(&place, &keep)).await?
}

/// An id as it is said back: what somebody sent may be anything.
fn shown(id: &str) -> String {
    id.chars().take(64).collect()
}

/// A new id: nobody can foresee it, and there is no other like it.
fn fresh_id(kind: &str) -> String {
    let [a, b] = [crate::random::random_u64(), crate::random::random_u64()];
    format!("{kind}-{a:016x}{:08x}", b & 0xffff_ffff)
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TrainingError + use<> {
    let path = path.to_owned();
    move |source| TrainingError::Io { attempt, path, source }
}
