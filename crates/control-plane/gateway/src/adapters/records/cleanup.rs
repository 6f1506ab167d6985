//! What lies in the bucket although no adapter is registered that it is of, removed.
//!
//! A gateway brings files there before it registers their adapter, and files that are there already are written again, so they
//! are young then. What is old is removed while no change can be committed, once it has been looked for among what is
//! registered; and whoever has registered something looks afterwards whether its files are there.

use std::time::{Duration, SystemTime};

use super::{address::PostgresAddress, change_feed::SharedRegistry};
use crate::adapters::{
    database::DatabaseError,
    store::{
        BucketAddress,
        bucket::{Bucket, BucketError},
    },
};

/// How long the bucket may take to remove something: changes wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why not everything was removed.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// What is registered cannot be read.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The bucket does not do it.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// It takes too long.
    #[error("{0} takes too long to remove something, and changes wait meanwhile; sweep again")]
    Slow(BucketAddress),
}

/// What to do with what is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CleanupMode {
    /// It is counted.
    Counted,
    /// It is removed.
    Removed,
}

/// What was found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OrphanedFiles {
    /// Adapters' files that no name stands for.
    pub(crate) contents: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
}

/// Finds what no registered adapter is of, and was written `age` ago or earlier.
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
            // It may have come again since it was listed.
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
