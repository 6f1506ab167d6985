//! What can be wrong with pads on a disk.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Why there is no pad.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Another process has it.
    #[error("another process uses the pads in {}: a pool is one process's at a time", path.display())]
    Held {
        /// The pool.
        path: PathBuf,
    },
    /// What it holds makes no sense.
    #[error("{} is broken ({reason}): remove the pool and prepare another; a pad of it is never guessed at", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// In what way.
        reason: &'static str,
    },
    /// There is none.
    #[error("there are no pads in {}: make some with `holobiont-client pads prepare`", path.display())]
    Absent {
        /// The directory.
        path: PathBuf,
    },
    /// Its original may be in use as well.
    #[error("{} is a copy of another pool, whose pads may be used there: prepare one for this place", path.display())]
    Copied {
        /// The pool.
        path: PathBuf,
    },
    /// Its pads are of another model.
    #[error("the pads in {} are of other weights than the executor's: prepare a pool for these", path.display())]
    OtherWeights {
        /// The pool.
        path: PathBuf,
    },
    /// All are used.
    #[error(
        "the pads of {site} are used up ({left} are left where {wanted} are needed): make more with `holobiont-client pads \
         prepare`, or say `--pads-empty wait`"
    )]
    Empty {
        /// Which site, and which way.
        site: String,
        /// How many there are.
        left: u64,
        /// How many it takes.
        wanted: u64,
    },
    /// More would be kept than may be.
    #[error(
        "pads for {tokens} tokens take {wanted} bytes, and {left} are left of --pad-bytes: {fit} tokens would fit"
    )]
    Budget {
        /// Of so many tokens.
        tokens: u64,
        /// What they take.
        wanted: u64,
        /// What there may be more.
        left: u64,
        /// How many would.
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
