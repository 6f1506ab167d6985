//! Files, jobs and events in the registry's SQLite database, durable when a change returns.

use serde::de::DeserializeOwned;
use sqlx::{Connection as _, Sqlite, SqliteConnection, query::QueryScalar, sqlite::SqliteArguments};

use super::{FileAdded, JobAdded, ListedPage, NewJob, Page, before, cut, page_query, read, text};
use crate::{
    adapters::database::{Database, DatabaseError},
    training::{
        TrainingError,
        records::{EventRecord, FileRecord, JobRecord},
    },
};

impl Database {
    pub(super) async fn add_file(
        &self,
        file: &FileRecord,
        limit: Option<u64>,
    ) -> Result<FileAdded, DatabaseError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        let sum = sqlx::query_scalar("SELECT COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?1");
        let sum: i64 =
            sum.bind(&file.tenant).fetch_one(&mut *transaction).await.map_err(DatabaseError::of)?;
        let all = u64::try_from(sum).unwrap_or(0) + file.bytes;
        if limit.is_some_and(|limit| all > limit) {
            return Ok(FileAdded::TooManyBytes(all));
        }
        let put = sqlx::query(
            "INSERT INTO files (id, tenant, bytes, record) VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING",
        );
        let bytes = i64::try_from(file.bytes).unwrap_or(i64::MAX);
        let put = put.bind(&file.id).bind(&file.tenant).bind(bytes).bind(text(file));
        put.execute(&mut *transaction).await.map_err(DatabaseError::of)?;
        transaction.commit().await.map_err(DatabaseError::of)?;
        Ok(FileAdded::Kept)
    }

    pub(super) async fn remove_file(
        &self,
        id: &str,
        tenant: &str,
    ) -> Result<Option<FileRecord>, DatabaseError> {
        self.one("DELETE FROM files WHERE id = ?1 AND tenant = ?2 RETURNING record", id, tenant).await
    }

    pub(super) async fn file(&self, id: &str, tenant: &str) -> Result<Option<FileRecord>, DatabaseError> {
        self.one("SELECT record FROM files WHERE id = ?1 AND tenant = ?2", id, tenant).await
    }

    pub(super) async fn files(
        &self,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<FileRecord>, DatabaseError> {
        self.page(page_query!("files"), tenant, page).await
    }

    /// Returns the ids of all files.
    ///
    /// # Errors
    /// If the database fails.
    pub(crate) async fn file_ids(&self) -> Result<Vec<String>, DatabaseError> {
        let mut connection = self.writer().await?;
        let ids = sqlx::query_scalar("SELECT id FROM files").fetch_all(&mut *connection).await;
        ids.map_err(DatabaseError::of)
    }

    pub(super) async fn add_job(&self, new: NewJob<'_>) -> Result<JobAdded, DatabaseError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        let NewJob { job, key, event, limit } = new;
        let before = sqlx::query_scalar("SELECT record FROM jobs WHERE tenant = ?1 AND key = ?2");
        let before = before.bind(&job.tenant).bind(key).fetch_optional(&mut *transaction).await;
        let before: Option<String> = before.map_err(DatabaseError::of)?;
        if let Some(before) = before {
            return Ok(JobAdded::Before(Box::new(read(&before).map_err(DatabaseError::of)?)));
        }
        if unfinished_of(&mut transaction, &job.tenant).await.map_err(DatabaseError::of)? >= limit {
            return Ok(JobAdded::TooMany);
        }
        let add = sqlx::query("INSERT INTO jobs (id, tenant, due, record, key) VALUES (?1, ?2, ?3, ?4, ?5)");
        let add = add.bind(&job.id).bind(&job.tenant).bind(!job.status.is_final()).bind(text(job)).bind(key);
        add.execute(&mut *transaction).await.map_err(DatabaseError::of)?;
        add_event(&mut transaction, &job.id, event).await.map_err(DatabaseError::of)?;
        transaction.commit().await.map_err(DatabaseError::of)?;
        Ok(JobAdded::Kept)
    }

    pub(super) async fn unfinished_of(&self, tenant: &str) -> Result<usize, DatabaseError> {
        let mut connection = self.writer().await?;
        unfinished_of(&mut connection, tenant).await.map_err(DatabaseError::of)
    }

    pub(super) async fn remove_ended(
        &self,
        tenant: &str,
        keep: u32,
    ) -> Result<Vec<JobRecord>, DatabaseError> {
        let removed = sqlx::query_scalar(
            "DELETE FROM jobs WHERE tenant = ?1 AND NOT due AND number <= \
             (SELECT number FROM jobs WHERE tenant = ?1 AND NOT due ORDER BY number DESC LIMIT 1 OFFSET ?2) \
             RETURNING record",
        );
        self.records(removed.bind(tenant).bind(keep)).await
    }

    pub(super) async fn change(
        &self,
        id: &str,
        change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
    ) -> Result<Option<JobRecord>, TrainingError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        let row = sqlx::query_scalar("SELECT record FROM jobs WHERE id = ?1 AND due").bind(id);
        let row: Option<String> = row.fetch_optional(&mut *transaction).await.map_err(DatabaseError::of)?;
        let Some(row) = row else { return Ok(None) };
        let mut job: JobRecord = read(&row).map_err(DatabaseError::of)?;
        let events = change(&mut job)?;
        let put = sqlx::query("UPDATE jobs SET due = ?2, record = ?3 WHERE id = ?1");
        let put = put.bind(id).bind(!job.status.is_final()).bind(text(&job));
        put.execute(&mut *transaction).await.map_err(DatabaseError::of)?;
        for event in &events {
            add_event(&mut transaction, id, event).await.map_err(DatabaseError::of)?;
        }
        transaction.commit().await.map_err(DatabaseError::of)?;
        Ok(Some(job))
    }

    pub(super) async fn job(&self, id: &str, tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        self.one("SELECT record FROM jobs WHERE id = ?1 AND tenant = ?2", id, tenant).await
    }

    pub(super) async fn job_of_key(
        &self,
        key: &[u8],
        tenant: &str,
    ) -> Result<Option<JobRecord>, DatabaseError> {
        let query = sqlx::query_scalar("SELECT record FROM jobs WHERE tenant = ?1 AND key = ?2");
        Ok(self.records(query.bind(tenant).bind(key)).await?.pop())
    }

    pub(super) async fn jobs(
        &self,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<JobRecord>, DatabaseError> {
        self.page(page_query!("jobs"), tenant, page).await
    }

    pub(super) async fn unfinished_jobs(&self) -> Result<Vec<JobRecord>, DatabaseError> {
        self.records(sqlx::query_scalar("SELECT record FROM jobs WHERE due ORDER BY number")).await
    }

    pub(super) async fn events(
        &self,
        job: &str,
        page: &Page,
    ) -> Result<ListedPage<(i64, EventRecord)>, DatabaseError> {
        let rows = sqlx::query_as(
            "SELECT number, record FROM job_events WHERE job = ?1 AND number < ?2 ORDER BY number DESC LIMIT ?3",
        );
        let rows = rows.bind(job).bind(before(page)).bind(i64::from(page.limit) + 1);
        let mut connection = self.writer().await?;
        let rows: Vec<(i64, String)> = rows.fetch_all(&mut *connection).await.map_err(DatabaseError::of)?;
        let items = rows.iter().map(|(number, row)| Ok((*number, read(row)?))).collect::<Result<_, _>>();
        Ok(cut(items.map_err(DatabaseError::of)?, page.limit))
    }

    /// Returns the record that `query` finds by id and tenant.
    pub(crate) async fn one<T: DeserializeOwned>(
        &self,
        query: &'static str,
        id: &str,
        tenant: &str,
    ) -> Result<Option<T>, DatabaseError> {
        Ok(self.records(sqlx::query_scalar(query).bind(id).bind(tenant)).await?.pop())
    }

    /// Returns the records that `query` finds by tenant, id of the item before, and number of items.
    pub(crate) async fn page<T: DeserializeOwned>(
        &self,
        query: &'static str,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<T>, DatabaseError> {
        let query = sqlx::query_scalar(query).bind(tenant).bind(&page.after).bind(i64::from(page.limit) + 1);
        Ok(cut(self.records(query).await?, page.limit))
    }

    /// Returns the records that `query` finds.
    pub(crate) async fn records<T: DeserializeOwned>(
        &self,
        query: QueryScalar<'_, Sqlite, String, SqliteArguments>,
    ) -> Result<Vec<T>, DatabaseError> {
        let mut connection = self.writer().await?;
        let rows = query.fetch_all(&mut *connection).await.map_err(DatabaseError::of)?;
        rows.iter().map(|row| read(row)).collect::<Result<_, _>>().map_err(DatabaseError::of)
    }
}

/// Counts the unfinished jobs of a tenant.
async fn unfinished_of(connection: &mut SqliteConnection, tenant: &str) -> Result<usize, sqlx::Error> {
    let count = sqlx::query_scalar("SELECT COUNT(*) FROM jobs WHERE due AND tenant = ?1").bind(tenant);
    let count: i64 = count.fetch_one(connection).await?;
    Ok(usize::try_from(count).unwrap_or(usize::MAX))
}

async fn add_event(
    connection: &mut SqliteConnection,
    job: &str,
    event: &EventRecord,
) -> Result<(), sqlx::Error> {
    let add = sqlx::query("INSERT INTO job_events (job, record) VALUES (?1, ?2)");
    add.bind(job).bind(text(event)).execute(connection).await.map(drop)
}
