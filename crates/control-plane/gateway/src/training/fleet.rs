//! Files and jobs that the hosts of a fleet share: rows in PostgreSQL, bytes in the bucket.
//!
//! ```text
//! PREFIX/training/files/ID                      a file that a client uploaded
//! PREFIX/training/jobs/ID/checkpoint-...        the last checkpoint of an unfinished job
//! PREFIX/training/jobs/ID/from-...              the adapter that an unfinished job trains further
//! ```
//!
//! An object is listed in the table's litter before its upload and again before its removal: see
//! [`table::shared`](super::table::shared). Downloads are hashed before they are used.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::Notify;

use super::{
    TrainingError, failed,
    records::{JobRecord, ObjectRecord},
    table::shared::SharedTable,
};
use crate::{
    adapters::store::bucket::{Bucket, BucketError},
    random::random_u64,
    thread,
};

/// Number of downloads of an object before it counts as damaged.
const ATTEMPTS: usize = 2;

#[derive(Debug)]
pub(super) struct TrainingFleet {
    pub(super) table: Arc<SharedTable>,
    bucket: Arc<Bucket>,
    /// Signal that a trainer's reports wait to be written.
    pub(super) notes: Notify,
    /// Signal that an object may be removed from the bucket.
    pub(super) litter: Notify,
}

impl TrainingFleet {
    pub(super) fn new(table: Arc<SharedTable>, bucket: Arc<Bucket>) -> Self {
        Self { table, bucket, notes: Notify::new(), litter: Notify::new() }
    }

    /// Uploads a file as `path`. The object stays if a row names it before the litter entry expires.
    pub(super) async fn send(&self, path: &str, from: &Path) -> Result<(), TrainingError> {
        self.table.intend(path).await?;
        Ok(self.bucket.put(path, from).await?)
    }

    /// Uploads the files of a directory for a job, under the directory name `name` within the job.
    pub(super) async fn send_all(
        &self,
        job: &JobRecord,
        name: &str,
        from: &Path,
    ) -> Result<Vec<ObjectRecord>, TrainingError> {
        let mut objects = Vec::new();
        let mut entries = tokio::fs::read_dir(from).await.map_err(failed("reading", from))?;
        while let Some(entry) = entries.next_entry().await.map_err(failed("reading", from))? {
            let name = format!("{name}/{}", entry.file_name().display());
            let sent = self.send_as(job, name, &entry.path()).await;
            match sent {
                Ok(object) => objects.push(object),
                Err(error) => {
                    for ObjectRecord { path, .. } in &objects {
                        self.discard(path).await;
                    }
                    return Err(error);
                }
            }
        }
        Ok(objects)
    }

    /// Uploads a file that the job calls `name`.
    pub(super) async fn send_as(
        &self,
        job: &JobRecord,
        name: String,
        from: &Path,
    ) -> Result<ObjectRecord, TrainingError> {
        let (hash, bytes) = hash_of(from.to_owned()).await?;
        let path = job.fresh_path(name.split('/').next().unwrap_or_default());
        self.send(&path, from).await?;
        Ok(ObjectRecord { name, path, bytes, hash })
    }

    /// Marks an uploaded object that no row will name for removal.
    pub(super) async fn discard(&self, path: &str) {
        if let Err(error) = self.table.discard(path).await {
            tracing::debug!(path, %error, "cannot remove an unneeded file from the bucket; trying again \
                later");
        }
        self.litter.notify_one();
    }

    /// Downloads an object to `to`, completely or not at all.
    pub(super) async fn download(&self, object: &ObjectRecord, to: &Path) -> Result<(), TrainingError> {
        let incoming = to.with_file_name(format!("incoming-{:016x}", random_u64()));
        let brought = self.bring_as(object, &incoming).await;
        let brought = match brought {
            Ok(()) => tokio::fs::rename(&incoming, to).await.map_err(failed("renaming", to)),
            Err(error) => Err(error),
        };
        if brought.is_err() {
            let _ = tokio::fs::remove_file(&incoming).await;
        }
        brought
    }

    async fn bring_as(&self, object: &ObjectRecord, incoming: &Path) -> Result<(), TrainingError> {
        for _ in 0..ATTEMPTS {
            match self.bucket.get(&object.path, object.bytes, incoming).await {
                Err(BucketError::Missing { .. } | BucketError::Changed { .. }) => break,
                gotten => gotten?,
            }
            if is(object, incoming).await? {
                return Ok(());
            }
            tracing::error!(path = object.path, bucket = %self.bucket.address(), "a downloaded file does \
                not match its hash");
            tokio::fs::remove_file(incoming).await.map_err(failed("removing", incoming))?;
        }
        Err(TrainingError::Damaged(object.path.clone()))
    }

    /// Removes all objects from the bucket whose litter entry has expired.
    pub(super) async fn sweep(&self) -> Result<(), TrainingError> {
        loop {
            let litter = self.table.litter().await?;
            if litter.is_empty() {
                return Ok(());
            }
            for path in &litter {
                self.bucket.delete(path).await?;
                self.table.swept(path).await?;
            }
        }
    }
}

/// Whether length and hash of the file at `path` match `object`.
pub(super) async fn is(object: &ObjectRecord, path: &Path) -> Result<bool, TrainingError> {
    let (hash, bytes) = hash_of(path.to_owned()).await?;
    Ok(hash == object.hash && bytes == object.bytes)
}

/// Returns the hash of a file, in hexadecimal, and its length in bytes.
pub(super) async fn hash_of(path: PathBuf) -> Result<(String, u64), TrainingError> {
    let work = move || {
        let mut hasher = blake3::Hasher::new();
        let read = File::open(&path).and_then(|file| hasher.update_reader(file).map(drop));
        read.map_err(failed("reading", &path))?;
        Ok((hasher.finalize().to_string(), hasher.count()))
    };
    thread::run("training-hash", work).await?
}
