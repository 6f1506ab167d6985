//! The SQLite database of registered adapters, with one writer.
//!
//! Every change is one transaction and is synced before it is answered (write-ahead log, `synchronous=FULL`).
//! The file is built under another name and renamed when it is complete: an empty or missing file is damage,
//! never an empty registry. The layout is numbered by `PRAGMA user_version`, and the number only grows.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use failpoint::FailpointOutcome;
use sqlx::{
    ConnectOptions as _, Connection as _, Row as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteRow, SqliteSynchronous},
};
use tokio::sync::{Mutex, MutexGuard};
use types::AdapterVersion;

pub use super::{
    errors::DatabaseError,
    record::{Labels, OwnTemplate, Record},
};
use super::{
    layout::MIGRATIONS,
    publication::Publication,
    store::{self, ContentId},
};

const FILE: &str = "registry.sqlite3";
/// Name of the file that a gateway locks while it uses the state directory.
const LOCK: &str = "gateway.lock";
/// How long a start waits for the lock of a gateway that is about to end.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// How long SQLite waits while another tool has locked the database file.
const BUSY_WAIT: Duration = Duration::from_secs(5);

/// Lock that keeps other gateways out of the state directory until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "held, not read")] File);

impl Lock {
    /// Takes the lock of the directory `state`, and creates the directory if it is missing.
    ///
    /// # Errors
    /// If another process holds the lock, or the system refuses.
    pub(crate) async fn acquire(state: &Path) -> Result<Self, DatabaseError> {
        fs::create_dir_all(state).map_err(failed("creating", state))?;
        let path = state.join(LOCK);
        let file = File::create(&path).map_err(failed("creating", &path))?;
        let until = Instant::now() + LOCK_WAIT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(TryLockError::WouldBlock) => return Err(DatabaseError::Locked(state.to_owned())),
                Err(TryLockError::Error(error)) => return Err(failed("locking", &path)(error)),
            }
        }
    }
}

/// True if `state` has a registry. Fails if the file is empty.
pub(super) fn exists(state: &Path) -> Result<bool, DatabaseError> {
    exists_at(state.join(FILE))
}

fn exists_at(path: PathBuf) -> Result<bool, DatabaseError> {
    match fs::metadata(&path) {
        Ok(found) if found.len() == 0 => {
            Err(DatabaseError::Damaged { path, reason: "it is empty".to_owned() })
        }
        Ok(_) => Ok(true),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("opening", &path)(error)),
        Err(_) => Ok(false),
    }
}

/// Creates a registry with `records`, completely or not at all.
pub(super) async fn create(state: &Path, records: &[Record]) -> Result<(), DatabaseError> {
    create_at(&state.join(FILE), records).await
}

/// Like [`create`], under any file name.
pub(super) async fn create_at(path: &Path, records: &[Record]) -> Result<(), DatabaseError> {
    let with = |end: &str| PathBuf::from(format!("{}{end}", path.display()));
    let (fresh, state) = (with(".new"), path.parent().unwrap_or(Path::new(".")));
    for leftover in [fresh.clone(), with(".new-wal"), with(".new-shm")] {
        match fs::remove_file(&leftover) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &leftover)(error));
            }
            _ => {}
        }
    }
    let mut connection =
        options(&fresh).create_if_missing(true).connect().await.map_err(DatabaseError::of)?;
    migrate(&mut connection, &fresh).await?;
    let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
    for record in records {
        insert(&mut transaction, record).await.map_err(DatabaseError::of)?;
    }
    transaction.commit().await.map_err(DatabaseError::of)?;
    connection.close().await.map_err(DatabaseError::of)?;
    File::open(&fresh).and_then(|file| file.sync_all()).map_err(failed("syncing", &fresh))?;
    fs::rename(&fresh, path).map_err(failed("renaming", path))?;
    File::open(state).and_then(|directory| directory.sync_all()).map_err(failed("syncing", state))
}

/// The open registry, which makes one change at a time.
#[derive(Debug)]
pub struct Database {
    connection: Mutex<SqliteConnection>,
}

impl Database {
    /// Opens the registry of `state` and reads all records.
    ///
    /// # Errors
    /// If the file is missing, damaged, or newer than this version of the program.
    pub async fn open(state: &Path) -> Result<(Self, Vec<Record>), DatabaseError> {
        Self::open_at(&state.join(FILE)).await
    }

    /// Like [`Database::open`], under any file name.
    pub(super) async fn open_at(path: &Path) -> Result<(Self, Vec<Record>), DatabaseError> {
        let path = path.to_owned();
        if !exists_at(path.clone())? {
            return Err(DatabaseError::Missing(path));
        }
        let damaged =
            |error: sqlx::Error| DatabaseError::Damaged { path: path.clone(), reason: error.to_string() };
        let mut connection = options(&path).connect().await.map_err(damaged)?;
        migrate(&mut connection, &path).await?;
        let sound: String =
            sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(&mut connection).await.map_err(damaged)?;
        if sound != "ok" {
            return Err(DatabaseError::Damaged { path, reason: sound });
        }
        let rows = sqlx::query("SELECT * FROM adapters ORDER BY name").fetch_all(&mut connection).await;
        let records =
            rows.map_err(damaged)?.iter().map(record).collect::<Result<Vec<_>, _>>().map_err(damaged)?;
        Ok((Self { connection: Mutex::new(connection) }, records))
    }

    /// Registers an adapter, in place of one with the same name. The change is on disk when this returns.
    ///
    /// # Errors
    /// [`DatabaseError::Full`], `Failed` or `NotHeld`; nothing has changed then.
    pub async fn put(&self, record: &Record, of: Option<&Publication>) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        if let Some(publication) = of {
            let noted = publication.write_here(&mut transaction, &record.generation.to_string()).await;
            if !noted.map_err(DatabaseError::of)? {
                return Err(DatabaseError::NotHeld(publication.job.clone()));
            }
        }
        insert(&mut transaction, record).await.map_err(DatabaseError::of)?;
        transaction.commit().await.map_err(DatabaseError::of)
    }

    /// Registers many adapters in one transaction. The change is on disk when this returns.
    ///
    /// # Errors
    /// Fails as [`Database::put`] does.
    pub(super) async fn put_all(&self, records: &[Record]) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        for record in records {
            insert(&mut transaction, record).await.map_err(DatabaseError::of)?;
        }
        transaction.commit().await.map_err(DatabaseError::of)
    }

    /// Deletes an adapter. The change is on disk when this returns.
    ///
    /// # Errors
    /// Fails as [`Database::put`] does.
    pub async fn remove(&self, name: &str) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        delete(&mut connection, name).await.map_err(DatabaseError::of)
    }

    /// Stores whether an adapter is pinned. The change is on disk when this returns.
    ///
    /// # Errors
    /// Fails as [`Database::put`] does.
    pub(crate) async fn set_pinned(&self, name: &str, pinned: bool) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let changed = sqlx::query("UPDATE adapters SET pinned = ?2 WHERE name = ?1").bind(name).bind(pinned);
        changed.execute(&mut *connection).await.map(drop).map_err(DatabaseError::of)
    }

    /// Stores when adapters were last used, in microseconds since 1970.
    ///
    /// # Errors
    /// Fails as [`Database::put`] does.
    pub(crate) async fn set_used(&self, used: &[(String, u64)]) -> Result<(), DatabaseError> {
        let mut connection = self.connection.lock().await;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        for (name, at_us) in used {
            let changed = sqlx::query("UPDATE adapters SET last_used_us = ?2 WHERE name = ?1");
            let changed = changed.bind(name).bind(signed(*at_us)).execute(&mut *transaction).await;
            changed.map_err(DatabaseError::of)?;
        }
        transaction.commit().await.map_err(DatabaseError::of)
    }

    /// Counts the fine-tuning jobs that have not ended.
    ///
    /// # Errors
    /// [`DatabaseError::Failed`].
    pub(super) async fn count_unfinished_jobs(&self) -> Result<u64, DatabaseError> {
        let mut connection = self.writer().await?;
        let count =
            sqlx::query_scalar("SELECT COUNT(*) FROM jobs WHERE due").fetch_one(&mut *connection).await;
        count.map(i64::cast_unsigned).map_err(DatabaseError::of)
    }

    /// Locks the connection for one statement or transaction.
    pub(crate) async fn writer(&self) -> Result<MutexGuard<'_, SqliteConnection>, DatabaseError> {
        let connection = self.connection.lock().await;
        if failpoint::hit("gateway.commit_fails") == FailpointOutcome::Fail {
            return Err(DatabaseError::Failed(sqlx::Error::Io(io::Error::other("as a test wants it"))));
        }
        Ok(connection)
    }
}

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(false)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(BUSY_WAIT)
}

async fn migrate(connection: &mut SqliteConnection, path: &Path) -> Result<(), DatabaseError> {
    let damaged =
        |error: sqlx::Error| DatabaseError::Damaged { path: path.to_owned(), reason: error.to_string() };
    let found: i64 =
        sqlx::query_scalar("PRAGMA user_version").fetch_one(&mut *connection).await.map_err(damaged)?;
    let known = i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX);
    if found > known {
        return Err(DatabaseError::Newer { path: path.to_owned(), found, known });
    }
    for (index, step) in MIGRATIONS.iter().enumerate().skip(usize::try_from(found).unwrap_or(0)) {
        let number = format!("PRAGMA user_version = {}", index + 1);
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        sqlx::raw_sql(*step).execute(&mut *transaction).await.map_err(damaged)?;
        // The number is not input of a user; pragmas take no bound parameters.
        let numbered = sqlx::raw_sql(sqlx::AssertSqlSafe(number)).execute(&mut *transaction).await;
        numbered.map_err(DatabaseError::of)?;
        transaction.commit().await.map_err(DatabaseError::of)?;
    }
    Ok(())
}

pub(super) async fn clear(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM adapters").execute(connection).await.map(drop)
}

pub(super) async fn delete(connection: &mut SqliteConnection, name: &str) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM adapters WHERE name = ?1").bind(name).execute(connection).await.map(drop)
}

pub(super) async fn insert(connection: &mut SqliteConnection, record: &Record) -> Result<(), sqlx::Error> {
    let put = sqlx::query(
        "INSERT OR REPLACE INTO adapters (name, tenant, content, generation, rank, bytes, modules, source, \
         loaded_at, last_used_us, pinned, draft_layers, made_by, expires_at, chat_template, weights, \
         labels) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
    );
    put.bind(&record.name)
        .bind(&record.tenant)
        .bind(record.content.0.as_slice())
        .bind(record.generation.0.as_slice())
        .bind(record.rank)
        .bind(signed(record.bytes))
        .bind(record.modules)
        .bind(record.source.display().to_string())
        .bind(signed(record.loaded_at))
        .bind(signed(record.last_used_us))
        .bind(record.pinned)
        .bind(record.draft_layers)
        .bind(&record.made_by)
        .bind(record.expires_at.map(signed))
        .bind(record.template.as_ref().map(|template| &*template.source))
        .bind(record.template.as_ref().map(|template| template.weights.0.as_slice()))
        .bind(record.labels.to_row())
        .execute(connection)
        .await
        .map(drop)
}

fn record(row: &SqliteRow) -> Result<Record, sqlx::Error> {
    let hash = |column: &str| {
        let bytes: Vec<u8> = row.try_get(column)?;
        bytes.try_into().map_err(|_| sqlx::Error::Decode(format!("'{column}' has not 32 bytes").into()))
    };
    let count = |column: &str| {
        let number: i64 = row.try_get(column)?;
        u64::try_from(number).map_err(|error| sqlx::Error::Decode(error.into()))
    };
    Ok(Record {
        name: row.try_get("name")?,
        tenant: row.try_get("tenant")?,
        content: ContentId(hash("content")?),
        generation: AdapterVersion(hash("generation")?),
        template: OwnTemplate::of_row(row.try_get("chat_template")?, row.try_get("weights")?)?,
        rank: row.try_get("rank")?,
        bytes: count("bytes")?,
        modules: row.try_get("modules")?,
        draft_layers: row.try_get("draft_layers")?,
        labels: Labels::of_row(row.try_get("labels")?)?,
        source: PathBuf::from(row.try_get::<String, _>("source")?),
        loaded_at: count("loaded_at")?,
        last_used_us: count("last_used_us")?,
        pinned: row.try_get("pinned")?,
        version: 0,
        made_by: row.try_get("made_by")?,
        expires_at: row.try_get::<Option<i64>, _>("expires_at")?.map(i64::cast_unsigned),
    })
}

/// Converts to the signed integers of databases; all stored values stay far below `i64::MAX`.
pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// SQLite's code for a full disk.
const SQLITE_FULL: &str = "13";

impl DatabaseError {
    pub(crate) fn of(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(|error| error.code());
        if code.as_deref() == Some(SQLITE_FULL) { Self::Full } else { Self::Failed(error) }
    }
}

pub(super) fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DatabaseError + use<> {
    let path = path.to_owned();
    move |source| DatabaseError::Io { attempt, path, source }
}

/// Fails if the store has adapters, or a write-ahead log exists, although the registry is missing.
pub(super) fn check_not_lost(state: &Path) -> Result<(), DatabaseError> {
    let log = state.join(format!("{FILE}-wal"));
    if store::is_inhabited(state) || log.exists() {
        return Err(DatabaseError::Missing(state.join(FILE)));
    }
    Ok(())
}
