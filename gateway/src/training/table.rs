//! Files, jobs and events in the registry's database: on disk when a change returns.

use serde::{Serialize, de::DeserializeOwned};
use sqlx::{Connection as _, SqliteConnection};

use super::records::{EventRecord, FileRecord, JobRecord};
use crate::adapters::database::{Database, DatabaseError};

/// Part of a list, the newest first.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// Behind this one; from the newest, if there is none.
    pub after: Option<String>,
    /// At most so many.
    pub limit: u32,
}

/// What a page holds, and whether there is more behind it.
#[derive(Debug, Clone)]
pub struct Listed<T> {
    /// In order.
    pub items: Vec<T>,
    /// Whether more follow.
    pub has_more: bool,
}

impl Database {
    /// # Errors
    /// The database's; nothing has changed then.
    pub async fn put_file(&self, file: &FileRecord) -> Result<(), DatabaseError> {
        let put = sqlx::query("INSERT INTO files (id, tenant, bytes, record) VALUES (?1, ?2, ?3, ?4)");
        let bytes = i64::try_from(file.bytes).unwrap_or(i64::MAX);
        let put = put.bind(&file.id).bind(&file.tenant).bind(bytes).bind(text(file));
        let mut connection = self.writer().await?;
        put.execute(&mut *connection).await.map(drop).map_err(DatabaseError::of)
    }

    /// # Errors
    /// The database's; nothing has changed then.
    pub async fn remove_file(&self, id: &str) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let removed = sqlx::query("DELETE FROM files WHERE id = ?1").bind(id).execute(&mut *connection).await;
        removed.map(drop).map_err(DatabaseError::of)
    }

    /// The file `id` of `tenant`, if there is one.
    ///
    /// # Errors
    /// The database's.
    pub async fn file(&self, id: &str, tenant: &str) -> Result<Option<FileRecord>, DatabaseError> {
        self.one("SELECT record FROM files WHERE id = ?1 AND tenant = ?2", id, tenant).await
    }

    /// Files of `tenant`.
    ///
    /// # Errors
    /// The database's.
    pub async fn files(&self, tenant: &str, page: &Page) -> Result<Listed<FileRecord>, DatabaseError> {
        self.page(
            "SELECT record FROM files WHERE tenant = ?1 \
             AND number < COALESCE((SELECT number FROM files WHERE id = ?2), 9223372036854775807) \
             ORDER BY number DESC LIMIT ?3",
            tenant,
            page,
        )
        .await
    }

    /// How many bytes the files of `tenant` have together.
    ///
    /// # Errors
    /// The database's.
    pub async fn file_bytes(&self, tenant: &str) -> Result<u64, DatabaseError> {
        let sum = sqlx::query_scalar("SELECT COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?1");
        let mut connection = self.writer().await?;
        let bytes: i64 = sum.bind(tenant).fetch_one(&mut *connection).await.map_err(DatabaseError::of)?;
        Ok(u64::try_from(bytes).unwrap_or(0))
    }

    /// The names of all files there are.
    ///
    /// # Errors
    /// The database's.
    pub async fn file_ids(&self) -> Result<Vec<String>, DatabaseError> {
        let mut connection = self.writer().await?;
        let ids = sqlx::query_scalar("SELECT id FROM files").fetch_all(&mut *connection).await;
        ids.map_err(DatabaseError::of)
    }

    /// Keeps a new job, with the key by which its request is known if it is sent again.
    ///
    /// # Errors
    /// The database's; nothing has changed then.
    pub async fn add_job(
        &self,
        job: &JobRecord,
        key: Option<&[u8]>,
        event: EventRecord,
    ) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        let add = sqlx::query("INSERT INTO jobs (id, tenant, due, record, key) VALUES (?1, ?2, ?3, ?4, ?5)");
        let add = add.bind(&job.id).bind(&job.tenant).bind(!job.status.is_final()).bind(text(job)).bind(key);
        add.execute(&mut *transaction).await.map_err(DatabaseError::of)?;
        add_event(&mut transaction, &job.id, &event).await.map_err(DatabaseError::of)?;
        transaction.commit().await.map_err(DatabaseError::of)
    }

    /// Keeps a job as it is now, with what happened to it.
    ///
    /// # Errors
    /// The database's; nothing has changed then.
    pub async fn put_job(&self, job: &JobRecord, events: &[EventRecord]) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        let put = sqlx::query("UPDATE jobs SET due = ?2, record = ?3 WHERE id = ?1");
        let put = put.bind(&job.id).bind(!job.status.is_final()).bind(text(job));
        put.execute(&mut *transaction).await.map_err(DatabaseError::of)?;
        for event in events {
            add_event(&mut transaction, &job.id, event).await.map_err(DatabaseError::of)?;
        }
        transaction.commit().await.map_err(DatabaseError::of)
    }

    /// The job `id` of `tenant`, if there is one.
    ///
    /// # Errors
    /// The database's.
    pub async fn job(&self, id: &str, tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        self.one("SELECT record FROM jobs WHERE id = ?1 AND tenant = ?2", id, tenant).await
    }

    /// The job that a request of `tenant` with this key has created, if there is one.
    ///
    /// # Errors
    /// The database's.
    pub async fn job_of_key(&self, key: &[u8], tenant: &str) -> Result<Option<JobRecord>, DatabaseError> {
        let row = sqlx::query_scalar("SELECT record FROM jobs WHERE tenant = ?1 AND key = ?2");
        let mut connection = self.writer().await?;
        let row = row.bind(tenant).bind(key).fetch_optional(&mut *connection).await;
        let row: Option<String> = row.map_err(DatabaseError::of)?;
        row.map(|row| read(&row)).transpose()
    }

    /// Jobs of `tenant`.
    ///
    /// # Errors
    /// The database's.
    pub async fn jobs(&self, tenant: &str, page: &Page) -> Result<Listed<JobRecord>, DatabaseError> {
        self.page(
            "SELECT record FROM jobs WHERE tenant = ?1 \
             AND number < COALESCE((SELECT number FROM jobs WHERE id = ?2), 9223372036854775807) \
             ORDER BY number DESC LIMIT ?3",
            tenant,
            page,
        )
        .await
    }

    /// Every job that has not ended, in the order in which they were created.
    ///
    /// # Errors
    /// The database's.
    pub async fn unfinished_jobs(&self) -> Result<Vec<JobRecord>, DatabaseError> {
        let mut connection = self.writer().await?;
        let rows = sqlx::query_scalar("SELECT record FROM jobs WHERE due ORDER BY number");
        let rows: Vec<String> = rows.fetch_all(&mut *connection).await.map_err(DatabaseError::of)?;
        rows.iter().map(|row| read(row)).collect()
    }

    /// What happened to a job, with the number of each event.
    ///
    /// # Errors
    /// The database's.
    pub async fn events(&self, job: &str, page: &Page) -> Result<Listed<(i64, EventRecord)>, DatabaseError> {
        let rows = sqlx::query_as(
            "SELECT number, record FROM job_events WHERE job = ?1 AND number < ?2 ORDER BY number DESC LIMIT ?3",
        );
        let before = page.after.as_deref().and_then(|number| number.parse().ok()).unwrap_or(i64::MAX);
        let rows = rows.bind(job).bind(before).bind(i64::from(page.limit) + 1);
        let mut connection = self.writer().await?;
        let rows: Vec<(i64, String)> = rows.fetch_all(&mut *connection).await.map_err(DatabaseError::of)?;
        let items: Result<Vec<_>, _> = rows.iter().map(|(number, row)| Ok((*number, read(row)?))).collect();
        Ok(cut(items?, page.limit))
    }

    async fn one<T: DeserializeOwned>(
        &self,
        query: &'static str,
        id: &str,
        tenant: &str,
    ) -> Result<Option<T>, DatabaseError> {
        let mut connection = self.writer().await?;
        let row = sqlx::query_scalar(query).bind(id).bind(tenant).fetch_optional(&mut *connection).await;
        let row: Option<String> = row.map_err(DatabaseError::of)?;
        row.map(|row| read(&row)).transpose()
    }

    async fn page<T: DeserializeOwned>(
        &self,
        query: &'static str,
        tenant: &str,
        page: &Page,
    ) -> Result<Listed<T>, DatabaseError> {
        let rows = sqlx::query_scalar(query).bind(tenant).bind(&page.after).bind(i64::from(page.limit) + 1);
        let mut connection = self.writer().await?;
        let rows: Vec<String> = rows.fetch_all(&mut *connection).await.map_err(DatabaseError::of)?;
        let items: Result<Vec<_>, _> = rows.iter().map(|row| read(row)).collect();
        Ok(cut(items?, page.limit))
    }
}

async fn add_event(
    connection: &mut SqliteConnection,
    job: &str,
    event: &EventRecord,
) -> Result<(), sqlx::Error> {
    let add = sqlx::query("INSERT INTO job_events (job, record) VALUES (?1, ?2)");
    add.bind(job).bind(text(event)).execute(connection).await.map(drop)
}

/// One more was asked for than is given: whether it was there says whether there are more.
fn cut<T>(mut items: Vec<T>, limit: u32) -> Listed<T> {
    let has_more = items.len() > limit as usize;
    items.truncate(limit as usize);
    Listed { items, has_more }
}

fn text(record: &impl Serialize) -> String {
    // Strings, numbers and lists of them.
    serde_json::to_string(record).unwrap_or_default()
}

fn read<T: DeserializeOwned>(row: &str) -> Result<T, DatabaseError> {
    serde_json::from_str(row).map_err(|error| DatabaseError::of(sqlx::Error::Decode(error.into())))
}
