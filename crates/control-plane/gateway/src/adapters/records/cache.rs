//! Copy of a fleet's registry on this host, with which the gateway serves while the registry is unreachable,
//! even after a restart.
//!
//! Each read of the registry updates the copy. The copy is read if the registry is unreachable at start; it
//! may be outdated and never changes the registry. API keys are written to the key file, where gateway and
//! executor find them as on a single host.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use security::keys::KeyFileEdit;
use sqlx::{Connection as _, SqliteConnection};

use super::{ReadScope, RegistryChanges, address::PostgresAddress};
use crate::{
    adapters::database::{self, Database, DatabaseError, Record},
    thread,
};

/// Prefix of the file name; a hash of the registry's address follows, since each registry has other adapters.
const FILE: &str = "known-";
/// SQLite application id of a file that holds a complete registry.
const READ: i64 = 0x686f_6c6f;

#[derive(Debug)]
pub(in crate::adapters) struct RegistryCache {
    path: PathBuf,
    database: Database,
    /// File that receives the registry's API keys; `None` if they are not wanted.
    key_file: Option<PathBuf>,
}

#[derive(Debug)]
pub(super) struct CachedRecords {
    pub(super) records: Vec<Record>,
    /// Upper bound of the records' age.
    pub(super) age: Duration,
}

impl RegistryCache {
    /// Opens and reads the copy of the registry at `address`; `None` if the registry was never read.
    pub(in crate::adapters) async fn open(
        state: &Path,
        address: &PostgresAddress,
        key_file: Option<PathBuf>,
    ) -> Result<(Self, Option<CachedRecords>), DatabaseError> {
        let hash = blake3::hash(address.to_string().as_bytes()).to_hex();
        let path = state.join(format!("{FILE}{}.sqlite3", &hash[..16]));
        let (database, known) = match open(&path).await {
            Ok(opened) => opened,
            Err(error) => {
                // The copy holds nothing that the registry does not hold.
                tracing::warn!(%error, "cannot read the local copy of the registry; it is removed");
                fs::remove_file(&path).map_err(database::failed("removing", &path))?;
                open(&path).await?
            }
        };
        Ok((Self { path, database, key_file }, known))
    }

    /// Writes what was read to the copy. A failed write only affects a later start.
    pub(super) async fn keep(&self, changes: &RegistryChanges) {
        if let Err(error) = self.write(changes).await {
            tracing::warn!(%error, path = %self.path.display(), "cannot write the local copy of the \
                registry");
        }
    }

    async fn write(&self, changes: &RegistryChanges) -> Result<(), DatabaseError> {
        if changes.records.is_empty() && changes.scope == ReadScope::Since {
            return Ok(());
        }
        let mut connection = self.database.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        if changes.scope == ReadScope::Whole {
            database::clear(&mut transaction).await.map_err(DatabaseError::of)?;
            mark(&mut transaction).await.map_err(DatabaseError::of)?;
        }
        for (name, record) in &changes.records {
            let written = match record {
                Some(record) => database::insert(&mut transaction, record).await,
                None => database::delete(&mut transaction, name).await,
            };
            written.map_err(DatabaseError::of)?;
        }
        transaction.commit().await.map_err(DatabaseError::of)
    }

    pub(super) fn wants_keys(&self) -> bool {
        self.key_file.is_some()
    }

    /// Makes the key file hold exactly the registry's keys. The file is not written if it holds them already.
    pub(super) async fn keep_keys(&self, lines: Vec<String>) {
        let Some(path) = self.key_file.clone() else { return };
        let shown = path.display().to_string();
        match thread::run("key-file", move || KeyFileEdit::write_keys(&path, &lines)).await {
            Ok(Ok(false)) => {}
            Ok(Ok(true)) => tracing::info!(path = shown, "wrote the registry's API keys to this file"),
            Ok(Err(error)) => {
                tracing::error!(%error, "cannot write the key file; the old API keys stay valid")
            }
            Err(error) => tracing::error!(%error, "cannot write the key file; the old API keys stay valid"),
        }
    }
}

async fn open(path: &Path) -> Result<(Database, Option<CachedRecords>), DatabaseError> {
    let age = written(path).map(|written| written.elapsed().unwrap_or_default());
    if age.is_none() {
        database::create_at(path, &[]).await?;
    }
    let (database, records) = Database::open_at(path).await?;
    // A file that was created but never written is not an empty registry; the registry may have adapters.
    let is_read = is_marked(&mut *database.writer().await?).await.map_err(DatabaseError::of)?;
    let known = age.filter(|_| is_read).map(|age| CachedRecords { records, age });
    Ok((database, known))
}

/// Marks in the file's header that the file holds a complete registry, even an empty one.
async fn mark(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    // The number is not input of a user; pragmas take no bound parameters.
    let marked = format!("PRAGMA application_id = {READ}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(marked)).execute(connection).await.map(drop)
}

async fn is_marked(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    let found: i64 = sqlx::query_scalar("PRAGMA application_id").fetch_one(connection).await?;
    Ok(found == READ)
}

/// Returns when the database or its write-ahead log was last written.
fn written(path: &Path) -> Option<std::time::SystemTime> {
    let log = PathBuf::from(format!("{}-wal", path.display()));
    let modified = |path: &Path| fs::metadata(path).and_then(|about| about.modified());
    let database = modified(path).ok()?;
    Some(modified(&log).map_or(database, |log| log.max(database)))
}
