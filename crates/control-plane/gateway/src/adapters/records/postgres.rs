//! Queries and changes of the shared registry in PostgreSQL.
//!
//! Every change takes the next number from one row, which stays locked until the commit. So changes are
//! committed in the order of their numbers, and a reader that has seen number n has seen all before. A log
//! says which name changed under which number. Old entries of the log are deleted; a gateway that lags
//! further behind reads everything.

use std::path::PathBuf;

use sqlx::{
    Connection as _, PgConnection, PgPool, Postgres, Row as _, Transaction,
    postgres::{PgQueryResult, PgRow},
};
use types::AdapterVersion;

use super::{ReadScope, RegistryChanges, layout::MIGRATIONS};
use crate::adapters::{
    database::{Labels, OwnTemplate, Record, signed},
    publication::Publication,
    store::ContentId,
};

/// Channel of the notifications about changes.
pub(super) const CHANNEL: &str = "holobiont_registry";

const KEPT_CHANGES: i64 = 10_000;

/// Advisory lock during migrations, because the first gateways of a fleet start together.
const LAYOUT_LOCK: i64 = 0x686f_6c6f_6269_6f6e;

/// PostgreSQL's error code for a full disk.
const DISK_FULL: &str = "53100";

pub(super) fn is_full(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).as_deref() == Some(DISK_FULL)
}

/// Why a change was not made, or may not have been.
#[derive(Debug)]
pub(crate) enum ChangeError {
    /// The change failed before the commit, so nothing was changed.
    Before(sqlx::Error),
    /// The commit was sent, but its outcome is unknown.
    Committing(sqlx::Error),
    /// This gateway does not hold the fine-tuning job with this id, so nothing was changed.
    NotHeld(String),
}

impl From<sqlx::Error> for ChangeError {
    fn from(error: sqlx::Error) -> Self {
        Self::Before(error)
    }
}

/// The layout number of the database, and the latest that this version of the program knows.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewerSchema {
    pub(super) found: i64,
    pub(super) known: i64,
}

/// Applies missing migrations; `Ok(Err(..))` if the layout is of a later version.
pub(super) async fn migrate(connection: &mut PgConnection) -> Result<Result<(), NewerSchema>, sqlx::Error> {
    let known = i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX);
    // A database user without the right to create tables can still use them.
    if layout(connection).await? == Some(known) {
        return Ok(Ok(()));
    }
    let mut transaction = connection.begin().await?;
    let lock = sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LAYOUT_LOCK);
    lock.execute(&mut *transaction).await?;
    let found = layout(&mut transaction).await?;
    if found.is_none() {
        let made = "CREATE TABLE holobiont_layout (number BIGINT NOT NULL); INSERT INTO holobiont_layout VALUES (0);";
        sqlx::raw_sql(made).execute(&mut *transaction).await?;
    }
    let found = found.unwrap_or(0);
    if found > known {
        return Ok(Err(NewerSchema { found, known }));
    }
    for step in MIGRATIONS.iter().skip(usize::try_from(found).unwrap_or(0)) {
        sqlx::raw_sql(*step).execute(&mut *transaction).await?;
    }
    let numbered = sqlx::query("UPDATE holobiont_layout SET number = $1").bind(known);
    numbered.execute(&mut *transaction).await?;
    transaction.commit().await.map(Ok)
}

/// Counts the registered adapters; `None` if there are no tables.
pub(super) async fn count(connection: &mut PgConnection) -> Result<Option<u64>, sqlx::Error> {
    if layout(connection).await?.is_none() {
        return Ok(None);
    }
    let count: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM holobiont_adapters").fetch_one(connection).await?;
    Ok(Some(count.cast_unsigned()))
}

async fn layout(connection: &mut PgConnection) -> Result<Option<i64>, sqlx::Error> {
    let there = sqlx::query_scalar("SELECT to_regclass('holobiont_layout') IS NOT NULL");
    if !there.fetch_one(&mut *connection).await? {
        return Ok(None);
    }
    sqlx::query_scalar("SELECT number FROM holobiont_layout").fetch_optional(connection).await
}

/// Registers an adapter in place of the one with the record version `over`. Returns the change number, which
/// is the new version; `None` if the registered version is not `over`. Only the gateway that holds a
/// fine-tuning job registers the job's result.
pub(super) async fn put(
    pool: &PgPool,
    record: &Record,
    over: Option<u64>,
    of: Option<&Publication>,
) -> Result<Option<u64>, ChangeError> {
    let (mut transaction, number) = begin(pool).await?;
    if let Some(publication) = of
        && !publication.write(&mut transaction, &record.generation.to_string()).await?
    {
        return Err(ChangeError::NotHeld(publication.job.clone()));
    }
    if let Some(made_by) = &record.made_by {
        // A gateway that registers its adapters counts as alive.
        renew(&mut transaction, made_by).await?;
    }
    let done = write(&mut transaction, record, over, number).await.map_err(ChangeError::Before)?;
    finish(transaction, number, &record.name, &done).await
}

pub(super) async fn put_all(pool: &PgPool, records: &[Record]) -> Result<(), ChangeError> {
    let mut transaction = pool.begin().await.map_err(ChangeError::Before)?;
    for record in records {
        let number = next(&mut transaction).await.map_err(ChangeError::Before)?;
        write(&mut transaction, record, None, number).await.map_err(ChangeError::Before)?;
        log(&mut transaction, number, &record.name).await.map_err(ChangeError::Before)?;
    }
    transaction.commit().await.map_err(ChangeError::Committing)
}

/// Deletes an adapter. Returns the change number; `None` if `version` is outdated.
pub(super) async fn remove(pool: &PgPool, name: &str, version: u64) -> Result<Option<u64>, ChangeError> {
    let (mut transaction, number) = begin(pool).await?;
    let removed = sqlx::query("DELETE FROM holobiont_adapters WHERE name = $1 AND version = $2");
    let removed = removed.bind(name).bind(signed(version)).execute(&mut *transaction).await;
    finish(transaction, number, name, &removed.map_err(ChangeError::Before)?).await
}

/// Stores whether an adapter is pinned. Returns its new version; `None` if `version` is outdated.
pub(super) async fn set_pinned(
    pool: &PgPool,
    name: &str,
    version: u64,
    pinned: bool,
) -> Result<Option<u64>, ChangeError> {
    let (mut transaction, number) = begin(pool).await?;
    let changed = sqlx::query(
        "UPDATE holobiont_adapters SET pinned = $3, version = $4 WHERE name = $1 AND version = $2",
    );
    let changed = changed.bind(name).bind(signed(version)).bind(pinned).bind(number);
    let changed = changed.execute(&mut *transaction).await.map_err(ChangeError::Before)?;
    finish(transaction, number, name, &changed).await
}

/// Stores when an adapter is to be unloaded. Returns its new version; `None` if `version` is outdated.
pub(super) async fn set_expiry(
    pool: &PgPool,
    name: &str,
    version: u64,
    at: Option<u64>,
) -> Result<Option<u64>, ChangeError> {
    let (mut transaction, number) = begin(pool).await?;
    let changed = sqlx::query(
        "UPDATE holobiont_adapters SET expires_at = $3, version = $4 WHERE name = $1 AND version = $2",
    );
    let changed = changed.bind(name).bind(signed(version)).bind(at.map(signed)).bind(number);
    let changed = changed.execute(&mut *transaction).await.map_err(ChangeError::Before)?;
    finish(transaction, number, name, &changed).await
}

/// Seconds for which a renewal keeps a gateway alive: as long as a Tinker session without a heartbeat.
const LEASE_S: f64 = 300.0;

pub(super) async fn renew(connection: &mut PgConnection, id: &str) -> Result<(), sqlx::Error> {
    let renewed = sqlx::query(
        "INSERT INTO holobiont_gateways (id, until) VALUES ($1, now() + make_interval(secs => $2)) \
         ON CONFLICT (id) DO UPDATE SET until = EXCLUDED.until",
    );
    renewed.bind(id).bind(LEASE_S).execute(connection).await.map(drop)
}

pub(super) async fn is_registered(pool: &PgPool, name: &str, version: u64) -> Result<bool, sqlx::Error> {
    let asked =
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM holobiont_adapters WHERE name = $1 AND version = $2)");
    asked.bind(name).bind(signed(version)).fetch_one(pool).await
}

/// Blocks all commits until the returned transaction ends; `None` if an adapter with `content` is registered.
pub(super) async fn block_commits(
    pool: &PgPool,
    content: ContentId,
) -> Result<Option<Transaction<'static, Postgres>>, ChangeError> {
    let (mut transaction, _) = begin(pool).await?;
    let is_registered =
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM holobiont_adapters WHERE content = $1)");
    let is_registered = is_registered.bind(content.0.as_slice()).fetch_one(&mut *transaction).await?;
    Ok(if is_registered { None } else { Some(transaction) })
}

/// Stores when adapters were last used. The record versions stay the same, and no notification is sent.
pub(super) async fn set_used(pool: &PgPool, used: &[(String, u64)]) -> Result<(), sqlx::Error> {
    let (names, times): (Vec<&str>, Vec<i64>) =
        used.iter().map(|(name, at_us)| (name.as_str(), signed(*at_us))).unzip();
    let changed = sqlx::query(
        "UPDATE holobiont_adapters SET last_used_us = GREATEST(last_used_us, used.at_us) \
         FROM unnest($1::text[], $2::bigint[]) AS used (name, at_us) WHERE holobiont_adapters.name = used.name",
    );
    changed.bind(names).bind(times).execute(pool).await.map(drop)
}

/// Reads the changes since number `last`, or everything if `last` is `None`, unknown, or older than the log.
pub(super) async fn read(
    connection: &mut PgConnection,
    last: Option<u64>,
) -> Result<RegistryChanges, sqlx::Error> {
    // Each query is one statement, so it reads one snapshot.
    const SINCE: &str = "SELECT clock.change AS clock, \
         (SELECT MIN(number) FROM holobiont_changes) AS oldest, changed.name AS changed, adapter.* \
         FROM holobiont_clock AS clock \
         LEFT JOIN (SELECT DISTINCT name FROM holobiont_changes WHERE number > $1) AS changed ON TRUE \
         LEFT JOIN holobiont_adapters AS adapter ON adapter.name = changed.name";
    const WHOLE: &str = "SELECT clock.change AS clock, adapter.name AS changed, adapter.* \
         FROM holobiont_clock AS clock LEFT JOIN holobiont_adapters AS adapter ON TRUE";
    if let Some(last) = last.map(signed) {
        let rows = sqlx::query(SINCE).bind(last).fetch_all(&mut *connection).await?;
        let first = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        let (clock, oldest): (i64, Option<i64>) = (first.try_get("clock")?, first.try_get("oldest")?);
        if clock >= last && oldest.is_none_or(|oldest| oldest <= last.saturating_add(1)) {
            return changes(&rows, ReadScope::Since);
        }
    }
    changes(&sqlx::query(WHOLE).fetch_all(connection).await?, ReadScope::Whole)
}

/// Returns the API keys as lines of a key file, ordered by their creation.
pub(super) async fn keys(connection: &mut PgConnection) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar("SELECT line FROM holobiont_keys ORDER BY number, hash").fetch_all(connection).await
}

/// Adds API keys, given as hash and line, and removes those with the hashes `removed`. Returns the change
/// number.
pub(super) async fn change_keys(
    pool: &PgPool,
    added: &[(String, String)],
    removed: &[String],
) -> Result<u64, ChangeError> {
    let (mut transaction, number) = begin(pool).await?;
    let gone = sqlx::query("DELETE FROM holobiont_keys WHERE hash = ANY($1)").bind(removed);
    gone.execute(&mut *transaction).await.map_err(ChangeError::Before)?;
    for (hash, line) in added {
        let add = sqlx::query("INSERT INTO holobiont_keys (hash, line, number) VALUES ($1, $2, $3)");
        let add = add.bind(hash).bind(line).bind(number).execute(&mut *transaction).await;
        add.map_err(ChangeError::Before)?;
    }
    notify_listeners(&mut transaction, number).await.map_err(ChangeError::Before)?;
    transaction.commit().await.map_err(ChangeError::Committing)?;
    Ok(number.cast_unsigned())
}

fn changes(rows: &[PgRow], scope: ReadScope) -> Result<RegistryChanges, sqlx::Error> {
    let clock: i64 = rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get("clock")?;
    let mut records = Vec::with_capacity(rows.len());
    for row in rows {
        // Without any change or adapter, the joins return one row without a name.
        if let Some(name) = row.try_get::<Option<String>, _>("changed")? {
            let is_there = row.try_get::<Option<i64>, _>("version")?.is_some();
            records.push((name, if is_there { Some(record(row)?) } else { None }));
        }
    }
    Ok(RegistryChanges { number: clock.cast_unsigned(), scope, records })
}

/// Begins a transaction that has taken the next change number.
async fn begin(pool: &PgPool) -> Result<(Transaction<'static, Postgres>, i64), ChangeError> {
    let mut transaction = pool.begin().await.map_err(ChangeError::Before)?;
    let number = next(&mut transaction).await.map_err(ChangeError::Before)?;
    Ok((transaction, number))
}

async fn next(connection: &mut PgConnection) -> Result<i64, sqlx::Error> {
    let next = sqlx::query_scalar("UPDATE holobiont_clock SET change = change + 1 RETURNING change");
    next.fetch_one(connection).await
}

/// Commits the change of `name` and notifies the listeners. Returns `None` if no row was changed.
async fn finish(
    mut transaction: Transaction<'static, Postgres>,
    number: i64,
    name: &str,
    done: &PgQueryResult,
) -> Result<Option<u64>, ChangeError> {
    if done.rows_affected() == 0 {
        return Ok(None);
    }
    log(&mut transaction, number, name).await.map_err(ChangeError::Before)?;
    transaction.commit().await.map_err(ChangeError::Committing)?;
    Ok(Some(number.cast_unsigned()))
}

async fn log(connection: &mut PgConnection, number: i64, name: &str) -> Result<(), sqlx::Error> {
    let logged = sqlx::query("INSERT INTO holobiont_changes (number, name) VALUES ($1, $2)");
    logged.bind(number).bind(name).execute(&mut *connection).await?;
    let cut = sqlx::query("DELETE FROM holobiont_changes WHERE number <= $1").bind(number - KEPT_CHANGES);
    cut.execute(&mut *connection).await?;
    notify_listeners(connection, number).await
}

/// Notifies the listeners when the transaction is committed.
async fn notify_listeners(connection: &mut PgConnection, number: i64) -> Result<(), sqlx::Error> {
    let notify = sqlx::query("SELECT pg_notify($1, $2)").bind(CHANNEL).bind(number.to_string());
    notify.execute(connection).await.map(drop)
}

async fn write(
    connection: &mut PgConnection,
    record: &Record,
    over: Option<u64>,
    number: i64,
) -> Result<PgQueryResult, sqlx::Error> {
    const INSERT: &str = "INSERT INTO holobiont_adapters (name, tenant, content, generation, rank, bytes, modules, \
         draft_layers, source, loaded_at, last_used_us, pinned, version, made_by, expires_at, chat_template, weights, \
         labels) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18) ON CONFLICT DO NOTHING";
    const REPLACE: &str = "UPDATE holobiont_adapters SET tenant = $2, content = $3, generation = $4, rank = $5, bytes = $6, \
         modules = $7, draft_layers = $8, source = $9, loaded_at = $10, last_used_us = $11, pinned = $12, version = $13, \
         made_by = $14, expires_at = $15, chat_template = $16, weights = $17, labels = $18 \
         WHERE name = $1 AND version = $19";
    let put = sqlx::query(if over.is_some() { REPLACE } else { INSERT })
        .bind(&record.name)
        .bind(&record.tenant)
        .bind(record.content.0.as_slice())
        .bind(record.generation.0.as_slice())
        .bind(i64::from(record.rank))
        .bind(signed(record.bytes))
        .bind(i64::from(record.modules))
        .bind(i64::from(record.draft_layers))
        .bind(record.source.display().to_string())
        .bind(signed(record.loaded_at))
        .bind(signed(record.last_used_us))
        .bind(record.pinned)
        .bind(number)
        .bind(&record.made_by)
        .bind(record.expires_at.map(signed))
        .bind(record.template.as_ref().map(|template| &*template.source))
        .bind(record.template.as_ref().map(|template| template.weights.0.as_slice()))
        .bind(record.labels.to_row());
    let put = if let Some(over) = over { put.bind(signed(over)) } else { put };
    put.execute(connection).await
}

fn record(row: &PgRow) -> Result<Record, sqlx::Error> {
    let hash = |column: &str| {
        let bytes: Vec<u8> = row.try_get(column)?;
        bytes.try_into().map_err(|_| sqlx::Error::Decode(format!("'{column}' has not 32 bytes").into()))
    };
    let count = |column: &str| {
        let number: i64 = row.try_get(column)?;
        u64::try_from(number).map_err(|error| sqlx::Error::Decode(error.into()))
    };
    let small =
        |column: &str| u32::try_from(count(column)?).map_err(|error| sqlx::Error::Decode(error.into()));
    Ok(Record {
        name: row.try_get("name")?,
        tenant: row.try_get("tenant")?,
        content: ContentId(hash("content")?),
        generation: AdapterVersion(hash("generation")?),
        template: OwnTemplate::of_row(row.try_get("chat_template")?, row.try_get("weights")?)?,
        rank: small("rank")?,
        bytes: count("bytes")?,
        modules: small("modules")?,
        draft_layers: small("draft_layers")?,
        labels: Labels::of_row(row.try_get("labels")?)?,
        source: PathBuf::from(row.try_get::<String, _>("source")?),
        loaded_at: count("loaded_at")?,
        last_used_us: count("last_used_us")?,
        pinned: row.try_get("pinned")?,
        version: count("version")?,
        made_by: row.try_get("made_by")?,
        expires_at: row.try_get::<Option<i64>, _>("expires_at")?.map(i64::cast_unsigned),
    })
}
