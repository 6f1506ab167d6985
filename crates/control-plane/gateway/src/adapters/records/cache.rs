//! What is kept on this host of a registry of many: enough to serve while it is away, also after a restart.
//!
//! It is written as the registry is read, and read when the registry cannot be. It says what was true once; nothing is ever
//! changed by it. API keys go into the key file, where gateway and executor find them as they find those of one host.

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

/// What its file begins with; what the registry's address hashes to follows, for another one knows other adapters.
const FILE: &str = "known-";
/// SQLite's application id of a file that holds a whole registry.
const READ: i64 = 0x686f_6c6f;

/// See the module's description.
#[derive(Debug)]
pub(in crate::adapters) struct RegistryCache {
    path: PathBuf,
    database: Database,
    /// Where the registry's API keys are brought, if they are wanted.
    key_file: Option<PathBuf>,
}

/// What was known once.
#[derive(Debug)]
pub(super) struct CachedRecords {
    pub(super) records: Vec<Record>,
    /// How long ago at most.
    pub(super) age: Duration,
}

impl RegistryCache {
    /// Opens what is kept in `state` of the registry at `address`, and reads it; `None` if that was never read.
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
                // Nothing is lost that the registry does not know.
                tracing::warn!(%error, "what was known of the registry cannot be read, and is forgotten");
                fs::remove_file(&path).map_err(database::failed("removing", &path))?;
                open(&path).await?
            }
        };
        Ok((Self { path, database, key_file }, known))
    }

    /// Keeps what was read. A failure costs a later start, and nothing now.
    pub(super) async fn keep(&self, changes: &RegistryChanges) {
        if let Err(error) = self.write(changes).await {
            tracing::warn!(%error, path = %self.path.display(), "what is known of the registry could not be kept");
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

    /// Whether API keys are wanted.
    pub(super) fn wants_keys(&self) -> bool {
        self.key_file.is_some()
    }

    /// Makes the key file hold the registry's keys, and no other. One that holds them already is not touched.
    pub(super) async fn keep_keys(&self, lines: Vec<String>) {
        let Some(path) = self.key_file.clone() else { return };
        let shown = path.display().to_string();
        match thread::run("key-file", move || KeyFileEdit::write_keys(&path, &lines)).await {
            Ok(Ok(false)) => {}
            Ok(Ok(true)) => tracing::info!(path = shown, "the registry's API keys are kept here"),
            Ok(Err(error)) => tracing::error!(%error, "the API keys stay as they were"),
            Err(error) => tracing::error!(%error, "the API keys stay as they were"),
        }
    }
}

async fn open(path: &Path) -> Result<(Database, Option<CachedRecords>), DatabaseError> {
    let age = written(path).map(|written| written.elapsed().unwrap_or_default());
    if age.is_none() {
        database::create_at(path, &[]).await?;
    }
    let (database, records) = Database::open_at(path).await?;
    // One that was made and never written knows nothing, of a registry that may have adapters.
    let is_read = is_marked(&mut *database.writer().await?).await.map_err(DatabaseError::of)?;
    let known = age.filter(|_| is_read).map(|age| CachedRecords { records, age });
    Ok((database, known))
}

/// Notes in the file's header that all of a registry is in it, be that nothing.
async fn mark(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    // A number of ours: pragmas take no parameters.
    let marked = format!("PRAGMA application_id = {READ}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(marked)).execute(connection).await.map(drop)
}

async fn is_marked(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    let found: i64 = sqlx::query_scalar("PRAGMA application_id").fetch_one(connection).await?;
    Ok(found == READ)
}

/// When anything of it was written last.
fn written(path: &Path) -> Option<std::time::SystemTime> {
    let log = PathBuf::from(format!("{}-wal", path.display()));
    let modified = |path: &Path| fs::metadata(path).and_then(|about| about.modified());
    let database = modified(path).ok()?;
    Some(modified(&log).map_or(database, |log| log.max(database)))
}
