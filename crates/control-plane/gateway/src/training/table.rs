//! Files, jobs and events, durable when a change returns: in the database of this host, or in the PostgreSQL that the hosts of
//! a fleet share.
//!
//! - `host`: rows in this host's SQLite.
//! - [`shared`]: rows in PostgreSQL, jobs with their holders, and what is to go from the bucket.
//!
//! A limit is looked at in the transaction that could break it, so it holds however many ask at once.
//!
//! Ids come from callers and may be any text. One that no database holds names nothing, and is never sent to either.

mod host;
pub mod shared;

use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use self::shared::{SharedTable, leases::Fence};
use super::{
    TrainingError,
    records::{EventRecord, FileRecord, JobRecord},
};
use crate::adapters::{
    Registry,
    database::{Database, DatabaseError},
};

/// Part of a list, the newest first.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// Behind this one; from the newest, if there is none.
    pub after: Option<String>,
    /// At most so many.
    pub limit: u32,
}

impl Page {
    /// The same page; behind an id that no database holds it begins with the newest, as behind any id that is not there.
    fn stored(&self) -> Self {
        Self { after: self.after.clone().filter(|id| is_storable(id)), limit: self.limit }
    }
}

/// Whether both databases hold `id` as a text: U+0000 is none of PostgreSQL's characters.
fn is_storable(id: &str) -> bool {
    !id.contains('\0')
}

/// What a page holds, and whether there is more behind it.
#[derive(Debug, Clone)]
pub struct ListedPage<T> {
    /// In order.
    pub items: Vec<T>,
    /// Whether more follow.
    pub has_more: bool,
}

/// What came of adding a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileAdded {
    /// It is kept.
    Kept,
    /// With it the tenant's files would have so many bytes, which is too much.
    TooManyBytes(u64),
}

/// A job to be added.
#[derive(Debug, Clone, Copy)]
pub struct NewJob<'a> {
    /// As it begins.
    pub job: &'a JobRecord,
    /// By this its request is known if it is sent again.
    pub key: Option<&'a [u8]>,
    /// What is said of it.
    pub event: &'a EventRecord,
    /// Jobs that the tenant may have unfinished.
    pub limit: usize,
}

/// What came of adding a job.
#[derive(Debug, Clone, PartialEq)]
pub enum JobAdded {
    /// It is kept.
    Kept,
    /// A request with this key has created that one.
    Before(Box<JobRecord>),
    /// The tenant has as many as it may.
    TooMany,
    /// This file of its data is gone.
    NoFile(String),
}

/// Who changes a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdatedBy {
    /// Anybody who may.
    Anyone,
    /// Whoever works on it, as long as nobody else does.
    Holder(Fence),
}

/// See the module's description.
#[derive(Debug, Clone)]
pub enum TrainingTable {
    /// Of this host alone.
    Host(Arc<Database>),
    /// Of all hosts of a fleet.
    Shared(Arc<SharedTable>),
}

impl TrainingTable {
    /// That which belongs to a registry.
    #[must_use]
    pub fn of(registry: &Registry) -> Self {
        match registry.shared() {
            None => Self::Host(Arc::clone(registry.database())),
            Some((link, _)) => {
                Self::Shared(Arc::new(SharedTable::new(Arc::clone(link), registry.instance().to_owned())))
            }
        }
    }

    /// Keeps a file, unless the tenant's would have more than `limit` bytes then.
    ///
    /// # Errors
    /// The database's; nothing has changed then, but after [`DatabaseError::Unclear`].
    pub async fn add_file(&self, file: &FileRecord, limit: Option<u64>) -> Result<FileAdded, DatabaseError> {
        match self {
            Self::Host(database) => database.add_file(file, limit).await,
            Self::Shared(table) => table.add_file(file, limit).await,
        }
    }

    /// Forgets the file `id` of `tenant`; returns what it was.
    ///
    /// # Errors
    /// As [`TrainingTable::add_file`].
    pub async fn remove_file(&self, id: &str, tenant: &str) -> Result<Option<FileRecord>, DatabaseError> {
        match self {
            _ if !is_storable(id) => Ok(None),
            Self::Host(database) => database.remove_file(id, tenant).await,
            Self::Shared(table) => table.remove_file(id, tenant).await,
        }
    }

    /// The file `id` of `tenant`, if there is one.
    ///
    /// # Errors
    /// The database's.
    pub async fn file(&self, id: &str, tenant: &str) -> Result<Option<FileRecord>, DatabaseError> {
        match self {
            _ if !is_storable(id) => Ok(None),
            Self::Host(database) => database.file(id, tenant).await,
            Self::Shared(table) => table.file(id, tenant).await,
        }
    }

    /// Files of `tenant`.
    ///
    /// # Errors
    /// The database's.
    pub async fn files(&self, tenant: &str, page: &Page) -> Result<ListedPage<FileRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.files(tenant, &page.stored()).await,
            Self::Shared(table) => table.files(tenant, &page.stored()).await,
        }
    }

    /// Keeps a new job, unless its request came before or its tenant has enough.
    ///
    /// # Errors
    /// As [`TrainingTable::add_file`].
    pub async fn add_job(&self, new: NewJob<'_>) -> Result<JobAdded, DatabaseError> {
        match self {
            Self::Host(database) => database.add_job(new).await,
            Self::Shared(table) => table.add_job(new).await,
        }
    }

    /// Changes a job that has not ended, and keeps what `change` says of it; `None` if it has ended, or whoever changes it
    /// does not hold it any more.
    ///
    /// # Errors
    /// As [`TrainingTable::add_file`], and what `change` says: then nothing has changed.
    pub async fn change(
        &self,
        id: &str,
        by: UpdatedBy,
        change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
    ) -> Result<Option<JobRecord>, TrainingError> {
        match self {
            // Nobody else works on it.
            Self::Host(database) => database.change(id, change).await,
            Self::Shared(table) => table.change(id, by, change).await,
        }
    }

    /// Jobs of `tenant` that have not ended.
    ///
    /// # Errors
    /// The database's.
    pub async fn unfinished_of(&self, tenant: &str) -> Result<usize, DatabaseError> {
        match self {
            Self::Host(database) => database.unfinished_of(tenant).await,
            Self::Shared(table) => table.unfinished_of(tenant).await,
        }
    }

    /// Removes jobs of `tenant` that have ended, with their events, but for the `keep` newest; returns what is removed.
    ///
    /// # Errors
    /// As [`TrainingTable::add_file`].
    pub async fn remove_ended(&self, tenant: &str, keep: u32) -> Result<Vec<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.remove_ended(tenant, keep).await,
            Self::Shared(table) => table.remove_ended(tenant, keep).await,
        }
    }

    /// The job `id` of `tenant`, if there is one.
    ///
    /// # Errors
    /// The database's.
    pub async fn job(&self, id: &str, tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        match self {
            _ if !is_storable(id) => Ok(None),
            Self::Host(database) => database.job(id, tenant).await,
            Self::Shared(table) => table.job(id, tenant).await,
        }
    }

    /// The job that a request of `tenant` with this key has created, if there is one.
    ///
    /// # Errors
    /// The database's.
    pub async fn job_of_key(&self, key: &[u8], tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.job_of_key(key, tenant).await,
            Self::Shared(table) => table.job_of_key(key, tenant).await,
        }
    }

    /// Jobs of `tenant`.
    ///
    /// # Errors
    /// The database's.
    pub async fn jobs(&self, tenant: &str, page: &Page) -> Result<ListedPage<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.jobs(tenant, &page.stored()).await,
            Self::Shared(table) => table.jobs(tenant, &page.stored()).await,
        }
    }

    /// Every job that has not ended, in the order in which they were created.
    ///
    /// # Errors
    /// The database's.
    pub async fn unfinished_jobs(&self) -> Result<Vec<JobRecord>, DatabaseError> {
        match self {
            Self::Host(database) => database.unfinished_jobs().await,
            Self::Shared(table) => Ok(table.unfinished().await?.into_iter().map(|seen| seen.job).collect()),
        }
    }

    /// What happened to a job, with the number of each event.
    ///
    /// # Errors
    /// The database's.
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

/// One more was asked for than is given: whether it was there says whether there are more.
fn cut<T>(mut items: Vec<T>, limit: u32) -> ListedPage<T> {
    let has_more = items.len() > limit as usize;
    items.truncate(limit as usize);
    ListedPage { items, has_more }
}

/// The number of the event that a page lies behind.
fn before(page: &Page) -> i64 {
    page.after.as_deref().and_then(|number| number.parse().ok()).unwrap_or(i64::MAX)
}

fn text(record: &impl Serialize) -> String {
    // Strings, numbers and lists of them.
    serde_json::to_string(record).unwrap_or_default()
}

fn read<T: DeserializeOwned>(row: &str) -> Result<T, sqlx::Error> {
    serde_json::from_str(row).map_err(|error| sqlx::Error::Decode(error.into()))
}
