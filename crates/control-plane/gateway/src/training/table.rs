//! Files, jobs and events, durable when a change returns: in the database of this host, or in the PostgreSQL
//! of a fleet.
//!
//! - `host`: rows in this host's SQLite.
//! - [`shared`]: rows in PostgreSQL, leases on jobs, and objects to remove from the bucket.
//!
//! A limit is checked in the transaction that could exceed it, so it holds for concurrent requests.
//!
//! Ids come from callers and may be any text. An id that no database can store matches nothing and is sent to
//! neither database.

mod host;
pub mod shared;

use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use self::shared::{SharedTable, leases::FencingToken};
use super::{
    TrainingError,
    records::{EventRecord, FileRecord, JobRecord},
};
use crate::adapters::{
    Registry,
    database::{Database, DatabaseError},
};

/// Part of a list to return, the newest items first.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// Id of the item before the page; the page begins with the newest item if there is none.
    pub after: Option<String>,
    /// Maximum number of items.
    pub limit: u32,
}

impl Page {
    /// Drops an id that no database can store; like any unknown id, it selects the newest items.
    fn stored(&self) -> Self {
        Self { after: self.after.clone().filter(|id| is_storable(id)), limit: self.limit }
    }
}

/// Whether both databases can store `id` as text: PostgreSQL text cannot contain U+0000.
fn is_storable(id: &str) -> bool {
    !id.contains('\0')
}

/// A page of a list.
#[derive(Debug, Clone)]
pub struct ListedPage<T> {
    pub items: Vec<T>,
    /// Whether more items follow the page.
    pub has_more: bool,
}

/// Result of adding a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileAdded {
    Kept,
    /// The tenant's files would have this many bytes in total, more than the limit.
    TooManyBytes(u64),
}

#[derive(Debug, Clone, Copy)]
pub struct NewJob<'a> {
    pub job: &'a JobRecord,
    /// Idempotency key of the request, if any.
    pub key: Option<&'a [u8]>,
    /// First event of the job.
    pub event: &'a EventRecord,
    /// Maximum number of the tenant's unfinished jobs.
    pub limit: usize,
}

/// Result of adding a job.
#[derive(Debug, Clone, PartialEq)]
pub enum JobAdded {
    Kept,
    /// A request with the same key created this job before.
    Before(Box<JobRecord>),
    /// The tenant has reached its limit of unfinished jobs.
    TooMany,
    /// A data file with this id is gone.
    NoFile(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdatedBy {
    /// A caller that needs no lease.
    Anyone,
    /// The worker that holds the job's lease.
    Holder(FencingToken),
}

/// Table of files, jobs and events.
#[derive(Debug, Clone)]
pub enum TrainingTable {
    /// Database of this host alone.
    Host(Arc<Database>),
    /// PostgreSQL that all hosts of a fleet share.
    Shared(Arc<SharedTable>),
}

impl TrainingTable {
    /// Returns the table that belongs to a registry.
    #[must_use]
    pub fn of(registry: &Registry) -> Self {
        match registry.shared() {
            None => Self::Host(Arc::clone(registry.database())),
            Some((link, _)) => {
                Self::Shared(Arc::new(SharedTable::new(Arc::clone(link), registry.instance().to_owned())))
            }
        }
    }

    /// Adds a file, unless the tenant's files would exceed `limit` bytes then.
    ///
    /// # Errors
    /// If the database fails; nothing has changed then, except possibly after [`DatabaseError::Unclear`].
    pub async fn add_file(&self, file: &FileRecord, limit: Option<u64>) -> Result<FileAdded, DatabaseError> {
        match self {
            Self::Host(database) => database.add_file(file, limit).await,
            Self::Shared(table) => table.add_file(file, limit).await,
        }
    }

    /// Removes the file `id` of `tenant`; returns its record.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn remove_file(&self, id: &str, tenant: &str) -> Result<Option<FileRecord>, DatabaseError> {
        match self {
            _ if !is_storable(id) => Ok(None),
            Self::Host(database) => database.remove_file(id, tenant).await,
            Self::Shared(table) => table.remove_file(id, tenant).await,
        }
    }

    /// Returns the file `id` of `tenant`, if there is one.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn file(&self, id: &str, tenant: &str) -> Result<Option<FileRecord>, DatabaseError> {
        match self {
            _ if !is_storable(id) => Ok(None),
            Self::Host(database) => database.file(id, tenant).await,
            Self::Shared(table) => table.file(id, tenant).await,
        }
    }

    /// Lists the files of `tenant`.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn files(&self, tenant: &str, page: &Page) -> Result<ListedPage<FileRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.files(tenant, &page.stored()).await,
            Self::Shared(table) => table.files(tenant, &page.stored()).await,
        }
    }

    /// Adds a new job, unless its request came before or its tenant has reached the limit.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn add_job(&self, new: NewJob<'_>) -> Result<JobAdded, DatabaseError> {
        match self {
            Self::Host(database) => database.add_job(new).await,
            Self::Shared(table) => table.add_job(new).await,
        }
    }

    /// Changes an unfinished job and stores the events that `change` returns. Returns `None` if the job has
    /// ended, or if `by` has lost its lease.
    ///
    /// # Errors
    /// As for [`TrainingTable::add_file`]; or the error of `change`, and nothing has changed then.
    pub async fn change(
        &self,
        id: &str,
        by: UpdatedBy,
        change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
    ) -> Result<Option<JobRecord>, TrainingError> {
        match self {
            // A host's own database has no other holders.
            Self::Host(database) => database.change(id, change).await,
            Self::Shared(table) => table.change(id, by, change).await,
        }
    }

    /// Counts the unfinished jobs of `tenant`.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn unfinished_of(&self, tenant: &str) -> Result<usize, DatabaseError> {
        match self {
            Self::Host(database) => database.unfinished_of(tenant).await,
            Self::Shared(table) => table.unfinished_of(tenant).await,
        }
    }

    /// Removes ended jobs of `tenant` with their events, except the `keep` newest; returns the removed jobs.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn remove_ended(&self, tenant: &str, keep: u32) -> Result<Vec<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.remove_ended(tenant, keep).await,
            Self::Shared(table) => table.remove_ended(tenant, keep).await,
        }
    }

    /// Returns the job `id` of `tenant`, if there is one.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn job(&self, id: &str, tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        match self {
            _ if !is_storable(id) => Ok(None),
            Self::Host(database) => database.job(id, tenant).await,
            Self::Shared(table) => table.job(id, tenant).await,
        }
    }

    /// Returns the job that a request of `tenant` with this key created, if there is one.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn job_of_key(&self, key: &[u8], tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.job_of_key(key, tenant).await,
            Self::Shared(table) => table.job_of_key(key, tenant).await,
        }
    }

    /// Lists the jobs of `tenant`.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn jobs(&self, tenant: &str, page: &Page) -> Result<ListedPage<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.jobs(tenant, &page.stored()).await,
            Self::Shared(table) => table.jobs(tenant, &page.stored()).await,
        }
    }

    /// Returns every unfinished job, in the order of creation.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn unfinished_jobs(&self) -> Result<Vec<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.unfinished_jobs().await,
            Self::Shared(table) => Ok(table.unfinished().await?.into_iter().map(|seen| seen.job).collect()),
        }
    }

    /// Lists the events of a job, each with its number.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn events(
        &self,
        job: &str,
        page: &Page,
    ) -> Result<ListedPage<(i64, EventRecord)>, DatabaseError> {
        match self {
            Self::Host(database) => database.events(job, page).await,
            Self::Shared(table) => table.events(job, page).await,
        }
    }
}

/// Query of a page of a table's records of a tenant, after the one with an id, the newest first.
macro_rules! page_query {
    ($table:literal) => {
        concat!(
            "SELECT record FROM ",
            $table,
            " WHERE tenant = ?1 AND number < COALESCE((SELECT number FROM ",
            $table,
            " WHERE id = ?2), 9223372036854775807) ORDER BY number DESC LIMIT ?3"
        )
    };
}
pub(crate) use page_query;

/// Makes a page of `items`, which were queried with one more than `limit` to see whether more follow.
fn cut<T>(mut items: Vec<T>, limit: u32) -> ListedPage<T> {
    let has_more = items.len() > limit as usize;
    items.truncate(limit as usize);
    ListedPage { items, has_more }
}

/// Number of the event before the page; events are listed from the newest.
fn before(page: &Page) -> i64 {
    page.after.as_deref().and_then(|number| number.parse().ok()).unwrap_or(i64::MAX)
}

pub(crate) fn text(record: &impl Serialize) -> String {
    // Records contain only strings, numbers, maps and lists, so serialization cannot fail.
    serde_json::to_string(record).unwrap_or_default()
}

fn read<T: DeserializeOwned>(row: &str) -> Result<T, sqlx::Error> {
    serde_json::from_str(row).map_err(|error| sqlx::Error::Decode(error.into()))
}
