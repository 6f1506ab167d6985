//! Errors of pads on disk.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Reason why no pad is available.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Another process uses the pool.
    #[error("another process uses the pads in {}: use one process per pool", path.display())]
    Held {
        /// Directory of the pool.
        path: PathBuf,
    },
    /// A file of the pool has invalid content.
    #[error("{} is damaged ({reason}): remove the pool and prepare another", path.display())]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Description of the defect.
        reason: &'static str,
    },
    /// The directory holds no pool.
    #[error("there are no pads in {}: prepare some with `holobiont-client pads prepare`", path.display())]
    Absent {
        /// Directory that should hold one.
        path: PathBuf,
    },
    /// The pool is a copy, whose original may be in use as well.
    #[error("{} is a copy of another pool, whose pads may be used there: prepare one for this place", path.display())]
    Copied {
        /// Directory of the pool.
        path: PathBuf,
    },
    /// The pads belong to other weights than the executor's.
    #[error("the pads in {} belong to other weights than the executor's: prepare a pool for \
             these", path.display())]
    OtherWeights {
        /// Directory of the pool.
        path: PathBuf,
    },
    /// All pads of a site are used.
    #[error(
        "the pads of {site} are used up ({left} of {wanted} needed are left): prepare more with \
         `holobiont-client pads prepare`, or use `--pads-empty wait`"
    )]
    Empty {
        /// Site and direction, for the user.
        site: String,
        /// Number of pads that are left.
        left: u64,
        /// Number of pads that the call needs.
        wanted: u64,
    },
    /// The new pads would exceed the size limit.
    #[error(
        "pads for {tokens} tokens need {wanted} bytes, but {left} bytes of --pad-bytes are left: {fit} \
         tokens would fit"
    )]
    Budget {
        /// Number of requested tokens.
        tokens: u64,
        /// Bytes that the pads of these tokens need.
        wanted: u64,
        /// Bytes that are left below the limit.
        left: u64,
        /// Number of tokens whose pads would fit.
        fit: u64,
    },
}

impl PoolError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn corrupt(path: &Path, reason: &'static str) -> Self {
        Self::Corrupt { path: path.to_owned(), reason }
    }
}
