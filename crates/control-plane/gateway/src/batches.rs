//! Batches: files of requests that are answered when executors have capacity that online requests do not
//! need.
//!
//! A batch and each of its changes are durable before they are acknowledged. A line counts as done once its
//! result is synced, so a crash repeats only lines that were under way. A line without a seed gets one that
//! follows from its id, so a repeated line gets the same answer.
//!
//! # Modules
//!
//! - [`records`]: the row of a batch; `table`: its storage in this host's database.
//! - `input`: lines of an input file, and their checks; `results`: the durable results.
//! - [`line`]: one line until its final answer; `line_slots`: how many lines run, and whose is next.
//! - `runner`: the life of a batch; [`stats`]: counters.
//!
//! In the state directory, `batches/ID` has the input and the results of an unfinished batch. In the end the
//! results become files of the tenant ([`crate::training::files`]). A batch belongs to its host, also in a
//! fleet; its input and result files belong to the fleet.

mod input;
pub(crate) mod line;
mod line_slots;
pub(crate) mod records;
mod results;
mod runner;
pub(crate) mod stats;
mod table;

use std::{
    collections::{BTreeMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use tokio::sync::{Notify, Semaphore, watch};

use self::{
    line_slots::LineSlots,
    records::{BatchRecord, BatchRole, BatchSpec, BatchStatus},
    stats::BatchCounters,
    table::BatchAdded,
};
use crate::{
    adapters::database::{Database, DatabaseError},
    config::BatchLimits,
    lock::{KeyedLocks, lock},
    tenant_memory::TenantMemory,
    tenant_slots::TenantSlots,
    thread::{self, ThreadError},
    training::{
        Training, TrainingError,
        records::Purpose,
        table::{ListedPage, Page},
    },
};

/// Failpoints of batches, in the order of a batch's life.
pub const FAILPOINTS: &[&str] =
    &["gateway.batch_committed", "gateway.batch_line_written", "gateway.batch_files_kept"];

const ID_PREFIX: &str = "batch_";
/// Name of the input file in a batch's directory.
const INPUT: &str = "input.jsonl";
/// Maximum number of batches whose lines run, and of one tenant's. Each reads ahead one line per slot.
const MAX_RUNNING: usize = 64;
const TENANT_RUNNING: usize = 4;
/// Maximum number of input files that are checked at once, each on a thread of its own.
const MAX_VALIDATIONS: usize = 2;
/// Maximum number of batches in creation, one per tenant, since each may download a file.
const MAX_CREATIONS: usize = 4;
/// Number of ended batches of a tenant that are listed.
const KEPT_BATCHES: u32 = 1000;

#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The input file is missing or has another purpose, or files cannot be stored.
    #[error(transparent)]
    Files(#[from] TrainingError),
    #[error("{attempt} '{}' failed: {source}; check that the state directory is writable and has free \
             space", path.display())]
    Io { attempt: &'static str, path: PathBuf, source: io::Error },
    /// No such batch exists, or it belongs to another tenant.
    #[error("there is no batch '{0}'; GET /v1/batches lists your batches")]
    NoBatch(String),
    /// The batch has ended, or is about to end.
    #[error("the batch is {0}, so it cannot be cancelled")]
    Ended(&'static str),
    /// The tenant has reached its limit of unfinished batches.
    #[error(
        "you have {0} waiting or running batches, which is the limit (--tenant-batches); cancel one or wait \
         for one"
    )]
    TooMany(usize),
    /// A thread or task of the batch failed.
    #[error("the work on the batch failed: {0}; see the log")]
    Stopped(String),
}

impl From<ThreadError> for BatchError {
    fn from(error: ThreadError) -> Self {
        Self::Stopped(error.to_string())
    }
}

/// An unfinished batch.
#[derive(Debug)]
struct LiveBatch {
    record: watch::Sender<BatchRecord>,
    /// Whether a task works on the batch.
    is_attended: bool,
}

/// All batches of this host.
#[derive(Debug)]
pub struct Batches {
    database: Arc<Database>,
    /// Input and result files.
    training: Arc<Training>,
    memory: Arc<TenantMemory>,
    limits: BatchLimits,
    /// Maximum length of a line's body, as for online requests.
    max_body_bytes: usize,
    directory: PathBuf,
    /// Every unfinished batch, by id.
    live: Mutex<BTreeMap<String, LiveBatch>>,
    /// Lock per batch for its changes, so that its row and its entry in `live` agree.
    changing: KeyedLocks<String>,
    creations: Arc<TenantSlots>,
    validations: Semaphore,
    running: Arc<TenantSlots>,
    slots: Arc<LineSlots>,
    counters: Arc<BatchCounters>,
    /// Signal that a batch was created.
    due: Notify,
}

impl Batches {
    /// Opens the batches of the state directory. `background_slots` says how many lines may run at once.
    ///
    /// # Errors
    /// If the directory or the database cannot be used.
    pub(crate) async fn open(
        (database, training): (Arc<Database>, Arc<Training>),
        memory: Arc<TenantMemory>,
        background_slots: watch::Receiver<usize>,
        (limits, max_body_bytes): (BatchLimits, usize),
        state: &Path,
    ) -> Result<Arc<Self>, BatchError> {
        let directory = state.join("batches");
        let unfinished = database.unfinished_batches().await?;
        let ids: HashSet<String> = unfinished.iter().map(|batch| batch.id.clone()).collect();
        let place = directory.clone();
        thread::run("batch-sweep", move || crate::training::files::sweep(&place, &ids)).await??;
        let live = unfinished.into_iter().map(|batch| (batch.id.clone(), LiveBatch::new(batch))).collect();
        Ok(Arc::new(Self {
            database,
            training,
            memory,
            limits,
            max_body_bytes,
            directory,
            live: Mutex::new(live),
            changing: KeyedLocks::default(),
            creations: TenantSlots::new(MAX_CREATIONS, 1),
            validations: Semaphore::new(MAX_VALIDATIONS),
            running: TenantSlots::new(MAX_RUNNING, TENANT_RUNNING),
            slots: LineSlots::new(background_slots),
            counters: Arc::default(),
            due: Notify::new(),
        }))
    }

    /// Creation slots; a caller takes one before it creates a batch, and keeps it until the batch is created.
    #[must_use]
    pub(crate) fn creation_slots(&self) -> &Arc<TenantSlots> {
        &self.creations
    }

    /// Creates a batch in the name of `tenant`. The batch is durable when this returns.
    ///
    /// # Errors
    /// If the input file is missing or has another purpose, or the tenant has too many batches.
    pub(crate) async fn create(
        &self,
        spec: BatchSpec,
        (tenant, role): (&str, BatchRole),
    ) -> Result<BatchRecord, BatchError> {
        let file = self.training.file_for(Purpose::Batch, &spec.input_file, tenant).await?;
        let id =
            format!("{ID_PREFIX}{:016x}{:016x}", crate::random::random_u64(), crate::random::random_u64());
        let batch = BatchRecord::new(id, (tenant, role), spec, self.limits.window.as_secs());
        let directory = self.batch_directory(&batch.id);
        tokio::fs::create_dir(&directory).await.map_err(failed("creating", &directory))?;
        let added = match self.training.link(&file, &directory.join(INPUT)).await {
            Ok(()) => self.add(&batch, &directory).await,
            Err(error) => Err(error.into()),
        };
        if added.is_err() {
            // The sweep at the next start removes what is left.
            let _ = tokio::fs::remove_dir_all(&directory).await;
        }
        added.map(|()| batch)
    }

    /// Adds a batch whose directory is complete.
    async fn add(&self, batch: &BatchRecord, directory: &Path) -> Result<(), BatchError> {
        let (own, all) = (directory.to_owned(), self.directory.clone());
        let sync = move || {
            [own.join(INPUT), own, all].iter().try_for_each(|path| {
                std::fs::File::open(path)
                    .and_then(|opened| opened.sync_all())
                    .map_err(failed("syncing", path))
            })
        };
        thread::run("batch-files", sync).await??;
        let limit = self.limits.tenant_batches;
        if self.database.add_batch(batch, limit).await? == BatchAdded::TooMany {
            return Err(BatchError::TooMany(limit));
        }
        failpoint::pass("gateway.batch_committed");
        lock(&self.live).insert(batch.id.clone(), LiveBatch::new(batch.clone()));
        self.due.notify_one();
        Ok(())
    }

    /// Returns the batch `id` of `tenant`.
    ///
    /// # Errors
    /// If the tenant has no such batch.
    pub(crate) async fn batch(&self, id: &str, tenant: &str) -> Result<BatchRecord, BatchError> {
        let found = self.database.batch(id, tenant).await?;
        let found = found.ok_or_else(|| BatchError::NoBatch(id.chars().take(64).collect()))?;
        Ok(self.with_progress(found))
    }

    /// Lists the batches of `tenant`.
    ///
    /// # Errors
    /// If the database fails.
    pub(crate) async fn list(
        &self,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<BatchRecord>, BatchError> {
        let ListedPage { items, has_more } = self.database.batches(tenant, page).await?;
        let items = items.into_iter().map(|batch| self.with_progress(batch)).collect();
        Ok(ListedPage { items, has_more })
    }

    /// Cancels the batch `id` of `tenant`; results so far are kept.
    ///
    /// # Errors
    /// If the tenant has no such batch, or the batch has ended.
    pub(crate) async fn cancel(&self, id: &str, tenant: &str) -> Result<BatchRecord, BatchError> {
        let batch = self.batch(id, tenant).await?;
        if batch.status == BatchStatus::Cancelling {
            return Ok(batch);
        }
        let cancelled = self.change(id, |batch| match batch.status {
            BatchStatus::Validating | BatchStatus::InProgress => {
                batch.enter(BatchStatus::Cancelling);
                Ok(())
            }
            status => Err(BatchError::Ended(status.as_str())),
        });
        match cancelled.await {
            // The batch has ended meanwhile.
            Err(BatchError::NoBatch(_)) => {
                Err(BatchError::Ended(self.batch(id, tenant).await?.status.as_str()))
            }
            cancelled => cancelled,
        }
    }

    /// Changes an unfinished batch durably, and announces the change to the batch's task.
    async fn change(
        &self,
        id: &str,
        change: impl FnOnce(&mut BatchRecord) -> Result<(), BatchError>,
    ) -> Result<BatchRecord, BatchError> {
        let _changing = self.changing.lock(id.to_owned()).await;
        let known = lock(&self.live).get(id).map(|live| live.record.borrow().clone());
        let mut batch = known.ok_or_else(|| BatchError::NoBatch(id.to_owned()))?;
        change(&mut batch)?;
        self.database.update_batch(&batch).await?;
        if let Some(live) = lock(&self.live).get(id) {
            live.record.send_replace(batch.clone());
        }
        Ok(batch)
    }

    /// Returns the newest state of a batch that was read from the database, with the progress of its lines.
    fn with_progress(&self, batch: BatchRecord) -> BatchRecord {
        let live = lock(&self.live).get(&batch.id).map(|live| live.record.borrow().clone());
        live.unwrap_or(batch)
    }

    fn statuses(&self) -> Vec<BatchStatus> {
        lock(&self.live).values().map(|live| live.record.borrow().status).collect()
    }

    fn batch_directory(&self, id: &str) -> PathBuf {
        self.directory.join(id)
    }
}

impl LiveBatch {
    fn new(batch: BatchRecord) -> Self {
        Self { record: watch::Sender::new(batch), is_attended: false }
    }
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BatchError + use<> {
    let path = path.to_owned();
    move |source| BatchError::Io { attempt, path, source }
}
