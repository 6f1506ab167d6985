//! Removes files from the bucket that belong to no registered adapter.
//!
//! A gateway uploads files before it registers their adapter, and uploads existing files again, so files in
//! use are young. Only old files are removed, while no change can be committed, and after a check that no
//! registered adapter has them. A gateway that has registered an adapter checks afterwards that its files
//! exist.

use std::time::{Duration, SystemTime};

use super::{address::PostgresAddress, change_feed::SharedRegistry};
use crate::adapters::{
    database::DatabaseError,
    store::{
        BucketAddress,
        bucket::{Bucket, BucketError},
    },
};

/// Timeout of a removal in the bucket; changes of the registry wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Bucket(#[from] BucketError),
    #[error("{0} took too long to remove a file, so the sweep stopped; sweep again")]
    Slow(BucketAddress),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CleanupMode {
    Counted,
    Removed,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OrphanedFiles {
    /// Number of adapter contents without a registered name.
    pub(crate) contents: u64,
    pub(crate) bytes: u64,
}

/// Finds the files of no registered adapter that were written at least `age` ago.
pub(crate) async fn sweep(
    registry: PostgresAddress,
    store: BucketAddress,
    age: Duration,
    found: CleanupMode,
) -> Result<OrphanedFiles, CleanupError> {
    let (shared, bucket) = (SharedRegistry::open(registry).await?.0, Bucket::open(store)?);
    let old = |written: SystemTime| written.elapsed().is_ok_and(|elapsed| elapsed >= age);
    let mut litter = OrphanedFiles::default();
    for (content, lying) in bucket.contents().await? {
        if !old(lying.written) {
            continue;
        }
        let remove = async {
            // The file may have been uploaded again since the listing.
            if found == CleanupMode::Removed && bucket.written(content).await?.is_some_and(old) {
                bucket.remove(content).await?;
            }
            Ok::<_, CleanupError>(())
        };
        let limited = async {
            let done = tokio::time::timeout(PATIENCE, remove).await;
            done.unwrap_or_else(|_| Err(CleanupError::Slow(bucket.address().clone())))
        };
        if let Some(done) = shared.unless_registered(content, limited).await? {
            done?;
            litter = OrphanedFiles { contents: litter.contents + 1, bytes: litter.bytes + lying.bytes };
        }
    }
    Ok(litter)
}
