//! Changes of the shared table, each in one transaction.

use sqlx::{PgConnection, PgPool};

use super::{
    super::{FileAdded, JobAdded, NewJob, read, text},
    CHANNEL, garbage,
    leases::FencingToken,
};
use crate::{
    adapters::records::change_feed::ChangeError,
    training::{
        TrainingError,
        records::{EventRecord, FileRecord, JobRecord, file_of},
    },
};

/// Class of the advisory locks for changes of a tenant's files or jobs; the second key is the tenant's hash.
const TENANT_LOCK: i32 = 0x686f_6c6f;

pub(super) async fn add_file(
    pool: &PgPool,
    file: &FileRecord,
    limit: Option<u64>,
) -> Result<FileAdded, ChangeError> {
    let mut transaction = pool.begin().await?;
    lock_tenant(&mut transaction, &file.tenant).await?;
    let sum =
        sqlx::query_scalar("SELECT COALESCE(SUM(bytes), 0)::BIGINT FROM holobiont_files WHERE tenant = $1");
    let sum: i64 = sum.bind(&file.tenant).fetch_one(&mut *transaction).await?;
    let all = u64::try_from(sum).unwrap_or(0) + file.bytes;
    if limit.is_some_and(|limit| all > limit) {
        return Ok(FileAdded::TooManyBytes(all));
    }
    let put = sqlx::query(
        "INSERT INTO holobiont_files (id, tenant, bytes, record) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
    );
    let bytes = i64::try_from(file.bytes).unwrap_or(i64::MAX);
    put.bind(&file.id).bind(&file.tenant).bind(bytes).bind(text(file)).execute(&mut *transaction).await?;
    garbage::keep(&mut transaction, &file.path()).await?;
    transaction.commit().await.map_err(ChangeError::Committing)?;
    Ok(FileAdded::Kept)
}

pub(super) async fn remove_file(
    pool: &PgPool,
    id: &str,
    tenant: &str,
) -> Result<Option<FileRecord>, ChangeError> {
    let mut transaction = pool.begin().await?;
    lock_tenant(&mut transaction, tenant).await?;
    let removed = "DELETE FROM holobiont_files WHERE id = $1 AND tenant = $2 RETURNING record";
    let removed = sqlx::query_scalar(removed).bind(id).bind(tenant).fetch_optional(&mut *transaction).await?;
    let Some(file) = removed.map(|row: String| read::<FileRecord>(&row)).transpose()? else {
        return Ok(None);
    };
    garbage::let_file_go(&mut transaction, id, &file.path()).await?;
    transaction.commit().await.map_err(ChangeError::Committing)?;
    Ok(Some(file))
}

pub(super) async fn add_job(pool: &PgPool, new: NewJob<'_>) -> Result<JobAdded, ChangeError> {
    let NewJob { job, key, event, limit } = new;
    let mut transaction = pool.begin().await?;
    lock_tenant(&mut transaction, &job.tenant).await?;
    if let Some(key) = key
        && let Some(before) = job_of_key(&mut transaction, key, &job.tenant).await?
    {
        return Ok(JobAdded::Before(Box::new(before)));
    }
    if unfinished_of(&mut transaction, &job.tenant).await? >= limit {
        return Ok(JobAdded::TooMany);
    }
    let data: Vec<&str> = job.objects.iter().filter_map(|object| file_of(&object.path)).collect();
    for file in &data {
        let there = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM holobiont_files WHERE id = $1)");
        if !there.bind(file).fetch_one(&mut *transaction).await? {
            return Ok(JobAdded::NoFile((*file).to_owned()));
        }
    }
    let add = sqlx::query(
        "INSERT INTO holobiont_jobs (id, tenant, due, record, key, data) VALUES ($1, $2, TRUE, $3, $4, $5)",
    );
    let add = add.bind(&job.id).bind(&job.tenant).bind(text(job)).bind(key).bind(&data);
    add.execute(&mut *transaction).await?;
    garbage::name(&mut transaction, &[], &job.objects).await?;
    add_event(&mut transaction, &job.id, event).await?;
    notify_listeners(&mut transaction, &job.id).await?;
    transaction.commit().await.map_err(ChangeError::Committing)?;
    Ok(JobAdded::Kept)
}

/// Counts the unfinished jobs of a tenant.
pub(super) async fn unfinished_of(connection: &mut PgConnection, tenant: &str) -> Result<usize, sqlx::Error> {
    let count = sqlx::query_scalar("SELECT COUNT(*) FROM holobiont_jobs WHERE due AND tenant = $1");
    let count: i64 = count.bind(tenant).fetch_one(connection).await?;
    Ok(usize::try_from(count).unwrap_or(usize::MAX))
}

/// Removes ended jobs with their events, except the `keep` newest.
pub(super) async fn remove_ended(
    pool: &PgPool,
    tenant: &str,
    keep: u32,
) -> Result<Vec<JobRecord>, ChangeError> {
    let removed = sqlx::query_scalar(
        "DELETE FROM holobiont_jobs WHERE tenant = $1 AND NOT due AND number <= \
         (SELECT number FROM holobiont_jobs WHERE tenant = $1 AND NOT due ORDER BY number DESC LIMIT 1 OFFSET $2) \
         RETURNING record",
    );
    let rows: Vec<String> = removed.bind(tenant).bind(i64::from(keep)).fetch_all(pool).await?;
    Ok(rows.iter().map(|row| read(row)).collect::<Result<_, _>>()?)
}

/// Changes an unfinished job, its events and the objects that it names in the bucket.
pub(super) async fn change(
    pool: &PgPool,
    id: &str,
    holder: Option<(&str, FencingToken)>,
    change: impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError>,
) -> Result<Result<Option<JobRecord>, TrainingError>, ChangeError> {
    let mut transaction = pool.begin().await?;
    let Some(mut job) = locked(&mut transaction, id, holder).await? else { return Ok(Ok(None)) };
    let named = job.objects.clone();
    let events = match change(&mut job) {
        Ok(events) => events,
        Err(error) => return Ok(Err(error)),
    };
    let is_over = job.status.is_final();
    if is_over {
        lock_tenant(&mut transaction, &job.tenant).await?;
        job.objects.clear();
    }
    let put = "UPDATE holobiont_jobs SET due = $2, record = $3, holder = CASE WHEN $2 THEN holder END WHERE id = $1";
    let put = sqlx::query(put).bind(id).bind(!is_over).bind(text(&job));
    put.execute(&mut *transaction).await?;
    garbage::name(&mut transaction, &named, &job.objects).await?;
    for event in &events {
        add_event(&mut transaction, id, event).await?;
    }
    if is_over || holder.is_none() {
        notify_listeners(&mut transaction, id).await?;
    }
    transaction.commit().await.map_err(ChangeError::Committing)?;
    Ok(Ok(Some(job)))
}

/// Reads an unfinished job and locks its row until the end of the transaction; `None` if `holder` has lost
/// it.
async fn locked(
    connection: &mut PgConnection,
    id: &str,
    holder: Option<(&str, FencingToken)>,
) -> Result<Option<JobRecord>, sqlx::Error> {
    const ANY: &str = "SELECT record FROM holobiont_jobs WHERE id = $1 AND due FOR UPDATE";
    const HELD: &str =
        "SELECT record FROM holobiont_jobs WHERE id = $1 AND due AND holder = $2 AND fence = $3 FOR UPDATE";
    let row = match holder {
        None => sqlx::query_scalar(ANY).bind(id),
        Some((holder, fence)) => sqlx::query_scalar(HELD).bind(id).bind(holder).bind(fence.0),
    };
    let row: Option<String> = row.fetch_optional(connection).await?;
    row.map(|row| read(&row)).transpose()
}

pub(super) async fn job_of_key(
    connection: &mut PgConnection,
    key: &[u8],
    tenant: &str,
) -> Result<Option<JobRecord>, sqlx::Error> {
    let row = sqlx::query_scalar("SELECT record FROM holobiont_jobs WHERE tenant = $1 AND key = $2");
    let row: Option<String> = row.bind(tenant).bind(key).fetch_optional(connection).await?;
    row.map(|row| read(&row)).transpose()
}

/// Serializes changes of a tenant's counts, and of the files that its jobs need.
async fn lock_tenant(connection: &mut PgConnection, tenant: &str) -> Result<(), sqlx::Error> {
    let locked = sqlx::query("SELECT pg_advisory_xact_lock($1, hashtext($2))");
    locked.bind(TENANT_LOCK).bind(tenant).execute(connection).await.map(drop)
}

async fn add_event(connection: &mut PgConnection, job: &str, event: &EventRecord) -> Result<(), sqlx::Error> {
    let add = sqlx::query("INSERT INTO holobiont_job_events (job, record) VALUES ($1, $2)");
    add.bind(job).bind(text(event)).execute(connection).await.map(drop)
}

/// Notifies listeners when the transaction commits.
async fn notify_listeners(connection: &mut PgConnection, job: &str) -> Result<(), sqlx::Error> {
    let notify = sqlx::query("SELECT pg_notify($1, $2)").bind(CHANNEL).bind(job);
    notify.execute(connection).await.map(drop)
}
