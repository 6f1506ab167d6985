//! Removal of objects from a fleet's bucket.

use sqlx::PgConnection;

use super::SharedTable;
use crate::{
    adapters::database::DatabaseError,
    training::records::{FILES, ObjectRecord, file_of},
};

/// Seconds until an uploaded object must be named by a row.
const BRING_S: f64 = 3600.0;
/// Maximum number of objects per sweep.
const SWEEP: i64 = 100;

impl SharedTable {
    /// Records `path` in the table `holobiont_litter` before its upload. An object that no row names in time
    /// may be removed.
    ///
    /// # Errors
    /// If the database fails; the object must not be uploaded then.
    pub async fn intend(&self, path: &str) -> Result<(), DatabaseError> {
        let intended = sqlx::query(
            "INSERT INTO holobiont_litter (path, after) VALUES ($1, now() + make_interval(secs => $2)) \
             ON CONFLICT (path) DO UPDATE SET after = EXCLUDED.after",
        );
        let pool = self.link.session()?;
        self.link.within(intended.bind(path).bind(BRING_S).execute(&pool)).await.map(drop)
    }

    /// Lets an object that no row will name be removed at once.
    ///
    /// # Errors
    /// If the database fails; the object is removed after its time then.
    pub async fn discard(&self, path: &str) -> Result<(), DatabaseError> {
        let discarded = sqlx::query("UPDATE holobiont_litter SET after = now() WHERE path = $1").bind(path);
        let pool = self.link.session()?;
        self.link.within(discarded.execute(&pool)).await.map(drop)
    }

    /// Returns some paths that may be removed from the bucket.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn litter(&self) -> Result<Vec<String>, DatabaseError> {
        let paths = sqlx::query_scalar(
            "SELECT path FROM holobiont_litter WHERE after <= now() \
             AND NOT EXISTS (SELECT 1 FROM holobiont_files WHERE $2 || id = path) ORDER BY after LIMIT $1",
        );
        let pool = self.link.session()?;
        self.link.within(paths.bind(SWEEP).bind(FILES).fetch_all(&pool)).await
    }

    /// Removes `path` from the litter after its removal from the bucket.
    ///
    /// # Errors
    /// If the database fails; the object is removed once more then.
    pub async fn swept(&self, path: &str) -> Result<(), DatabaseError> {
        let swept = sqlx::query("DELETE FROM holobiont_litter WHERE path = $1").bind(path);
        let pool = self.link.session()?;
        self.link.within(swept.execute(&pool)).await.map(drop)
    }
}

/// Updates the litter when a row names the objects `now` instead of `before`, in the same transaction.
pub(super) async fn name(
    connection: &mut PgConnection,
    before: &[ObjectRecord],
    now: &[ObjectRecord],
) -> Result<(), sqlx::Error> {
    let lacks = |all: &[ObjectRecord], path: &str| !all.iter().any(|object| object.path == path);
    for object in now.iter().filter(|object| lacks(before, &object.path)) {
        match file_of(&object.path) {
            Some(_) => {}
            None => keep(connection, &object.path).await?,
        }
    }
    for object in before.iter().filter(|object| lacks(now, &object.path)) {
        match file_of(&object.path) {
            Some(file) => let_file_go(connection, file, &object.path).await?,
            None => mark_garbage(connection, &object.path).await?,
        }
    }
    Ok(())
}

/// Takes a named object out of the litter, or fails if its time is over.
pub(super) async fn keep(connection: &mut PgConnection, path: &str) -> Result<(), sqlx::Error> {
    let kept = sqlx::query("DELETE FROM holobiont_litter WHERE path = $1 AND after > now()").bind(path);
    match kept.execute(connection).await?.rows_affected() {
        0 => Err(sqlx::Error::Protocol("the upload to the bucket took too long and was removed".to_owned())),
        _ => Ok(()),
    }
}

/// Marks the bytes of a file for removal, unless the file or an unfinished job needs them. The caller holds
/// the tenant's lock.
pub(super) async fn let_file_go(
    connection: &mut PgConnection,
    file: &str,
    path: &str,
) -> Result<(), sqlx::Error> {
    let needed = sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM holobiont_files WHERE id = $1) \
         OR EXISTS (SELECT 1 FROM holobiont_jobs WHERE due AND $1 = ANY(data))",
    );
    match needed.bind(file).fetch_one(&mut *connection).await? {
        true => Ok(()),
        false => mark_garbage(connection, path).await,
    }
}

async fn mark_garbage(connection: &mut PgConnection, path: &str) -> Result<(), sqlx::Error> {
    let gone =
        sqlx::query("INSERT INTO holobiont_litter (path, after) VALUES ($1, now()) ON CONFLICT DO NOTHING");
    gone.bind(path).execute(connection).await.map(drop)
}
