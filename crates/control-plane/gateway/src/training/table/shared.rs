//! Files, jobs and events in the PostgreSQL of a fleet.
//!
//! A job in progress has a *holder*, a gateway, until a time by the server's clock. A new holder raises the
//! job's *fence*. All writes of a worker name holder and fence, so only one of two gateways that believe to
//! hold a job can write.
//!
//! Objects that rows of jobs and files name lie in the bucket. An object is listed in the *litter* before its
//! upload. The transaction that names it removes it from the litter, and the transaction that stops naming it
//! lists it again. Any host may remove objects that stay in the litter after their time, so nothing is left
//! behind when a host fails.
//!
//! - [`leases`]: leases of hosts on jobs.
//! - [`garbage`]: removal of objects from the bucket.
//! - `changes`: changes in one transaction each.

mod changes;
pub mod garbage;
pub mod leases;

use std::sync::Arc;

use serde::de::DeserializeOwned;

use self::leases::FencingToken;
use super::{FileAdded, JobAdded, ListedPage, NewJob, Page, UpdatedBy, before, cut, read};
use crate::{
    adapters::{database::DatabaseError, records::change_feed::SharedRegistry},
    training::{
        TrainingError,
        records::{EventRecord, FileRecord, JobRecord},
    },
};

/// Channel of notifications about changed jobs, except changes by their workers.
const CHANNEL: &str = "holobiont_jobs";
#[derive(Debug)]
pub struct SharedTable {
    link: Arc<SharedRegistry>,
    /// Unique name of this process as a holder.
    holder: String,
}

impl SharedTable {
    /// Creates the table of the PostgreSQL behind `link`, for a process with the unique name `holder`.
    pub(crate) fn new(link: Arc<SharedRegistry>, holder: String) -> Self {
        Self { link, holder }
    }

    /// Unique name of this process as a holder.
    #[must_use]
    pub fn holder(&self) -> &str {
        &self.holder
    }

    pub(super) async fn add_file(
        &self,
        file: &FileRecord,
        limit: Option<u64>,
    ) -> Result<FileAdded, DatabaseError> {
        let pool = self.link.session()?;
        self.link.done(changes::add_file(&pool, file, limit)).await
    }

    pub(super) async fn remove_file(
        &self,
        id: &str,
        tenant: &str,
    ) -> Result<Option<FileRecord>, DatabaseError> {
        let pool = self.link.session()?;
        self.link.done(changes::remove_file(&pool, id, tenant)).await
    }

    pub(super) async fn file(&self, id: &str, tenant: &str) -> Result<Option<FileRecord>, DatabaseError> {
        self.one("SELECT record FROM holobiont_files WHERE id = $1 AND tenant = $2", id, tenant).await
    }

    pub(super) async fn files(
        &self,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<FileRecord>, DatabaseError> {
        self.page(
            "SELECT record FROM holobiont_files WHERE tenant = $1 \
             AND number < COALESCE((SELECT number FROM holobiont_files WHERE id = $2), 9223372036854775807) \
             ORDER BY number DESC LIMIT $3",
            tenant,
            page,
        )
        .await
    }

    pub(super) async fn add_job(&self, new: NewJob<'_>) -> Result<JobAdded, DatabaseError> {
        let pool = self.link.session()?;
        self.link.done(changes::add_job(&pool, new)).await
    }

    pub(super) async fn unfinished_of(&self, tenant: &str) -> Result<usize, DatabaseError> {
        let pool = self.link.session()?;
        let asked = async { changes::unfinished_of(&mut *pool.acquire().await?, tenant).await };
        self.link.within(asked).await
    }

    pub(super) async fn remove_ended(
        &self,
        tenant: &str,
        keep: u32,
    ) -> Result<Vec<JobRecord>, DatabaseError> {
        let pool = self.link.session()?;
        self.link.done(changes::remove_ended(&pool, tenant, keep)).await
    }

    pub(super) async fn change(
        &self,
        id: &str,
        by: UpdatedBy,
        change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
    ) -> Result<Option<JobRecord>, TrainingError> {
        let pool = self.link.session()?;
        self.link.done(changes::change(&pool, id, self.fence_of(by), change)).await?
    }

    pub(super) async fn job(&self, id: &str, tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        self.one("SELECT record FROM holobiont_jobs WHERE id = $1 AND tenant = $2", id, tenant).await
    }

    pub(super) async fn job_of_key(
        &self,
        key: &[u8],
        tenant: &str,
    ) -> Result<Option<JobRecord>, DatabaseError> {
        let pool = self.link.session()?;
        let asked = async { changes::job_of_key(&mut *pool.acquire().await?, key, tenant).await };
        self.link.within(asked).await
    }

    pub(super) async fn jobs(
        &self,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<JobRecord>, DatabaseError> {
        self.page(
            "SELECT record FROM holobiont_jobs WHERE tenant = $1 \
             AND number < COALESCE((SELECT number FROM holobiont_jobs WHERE id = $2), 9223372036854775807) \
             ORDER BY number DESC LIMIT $3",
            tenant,
            page,
        )
        .await
    }

    pub(super) async fn events(
        &self,
        job: &str,
        page: &Page,
    ) -> Result<ListedPage<(i64, EventRecord)>, DatabaseError> {
        let rows = sqlx::query_as(
            "SELECT number, record FROM holobiont_job_events WHERE job = $1 AND number < $2 \
             ORDER BY number DESC LIMIT $3",
        );
        let rows = rows.bind(job).bind(before(page)).bind(i64::from(page.limit) + 1);
        let pool = self.link.session()?;
        let asked = async {
            let rows: Vec<(i64, String)> = rows.fetch_all(&pool).await?;
            rows.iter().map(|(number, row)| Ok((*number, read(row)?))).collect::<Result<Vec<_>, _>>()
        };
        Ok(cut(self.link.within(asked).await?, page.limit))
    }

    /// Returns the holder and fence that a change must match.
    fn fence_of(&self, by: UpdatedBy) -> Option<(&str, FencingToken)> {
        match by {
            UpdatedBy::Anyone => None,
            UpdatedBy::Holder(fence) => Some((&self.holder, fence)),
        }
    }

    async fn one<T: DeserializeOwned>(
        &self,
        query: &'static str,
        id: &str,
        tenant: &str,
    ) -> Result<Option<T>, DatabaseError> {
        let pool = self.link.session()?;
        let asked = async {
            let row = sqlx::query_scalar(query).bind(id).bind(tenant).fetch_optional(&pool).await?;
            row.map(|row: String| read(&row)).transpose()
        };
        self.link.within(asked).await
    }

    async fn page<T: DeserializeOwned>(
        &self,
        query: &'static str,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<T>, DatabaseError> {
        let pool = self.link.session()?;
        let rows = sqlx::query_scalar(query).bind(tenant).bind(&page.after).bind(i64::from(page.limit) + 1);
        let asked = async {
            let rows: Vec<String> = rows.fetch_all(&pool).await?;
            rows.iter().map(|row| read(row)).collect::<Result<Vec<_>, _>>()
        };
        Ok(cut(self.link.within(asked).await?, page.limit))
    }
}
