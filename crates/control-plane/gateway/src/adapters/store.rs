//! The adapters' files, kept by content: what the executor loads, and what a restart brings back.
//!
//! ```text
//! STATE/adapters/                          only the gateway's user may enter
//!     .incoming-0123456789abcdef/          a copy that is being made, or one that goes; swept at start
//!     .partial-<64 hexadecimal digits>/    what has come of a content from the bucket
//!     <64 hexadecimal digits>/             named after its content and never changed
//!         adapter_config.json, adapter_model.safetensors     or: adapter.gguf
//! ```
//!
//! - [`content`]: what files are called by.
//! - [`incoming`]: files that come over HTTP, until they can be copied like any.
//! - [`address`]: where a store is that many hosts share.
//! - [`bucket`]: such a store, over `transport`. The directory is its cache then, and goes by `cache`.
//! - [`fetch`]: what is needed here brought from the bucket, and what came in brought there.
//!
//! A copy is written, its files are synced, its directory is synced, it is renamed, and the store is synced: after
//! a power cut a directory with a content's name is whole. The name also hashes the owner, so that two tenants share
//! nothing, while two names of one tenant share one directory.

pub(crate) mod address;
pub(crate) mod bucket;
mod cache;
mod content;
mod fetch;
mod incoming;
mod transport;

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use failpoint::FailpointOutcome;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use types::TenantId;

pub(crate) use self::cache::CacheHold;
pub use self::{
    address::BucketAddress,
    content::ContentId,
    fetch::FetchStats,
    incoming::{IncomingAdapter, IncomingFile},
};
use self::{
    bucket::{Bucket, BucketError},
    cache::Cache,
    content::{CHUNK_BYTES, ContentHasher},
};
use super::jail::{AdapterFile, AdapterLocation, GGUF_FILE, JailError};
use crate::random::random_u64;

/// The store within the state directory.
const DIRECTORY: &str = "adapters";
/// What a copy is called before it is whole.
const INCOMING: &str = ".incoming-";
/// What is before a content's name as long as it is not whole.
const PARTIAL: &str = ".partial-";

/// Why files did not get into the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// They may not be read.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// A file has more bytes than are taken.
    #[error(
        "'{name}' has more than {limit_bytes} bytes, which is the limit (--max-adapter-file-bytes; 1 MiB for adapter_config.json)"
    )]
    TooLarge {
        /// The file.
        name: &'static str,
        /// The limit it exceeds.
        limit_bytes: u64,
    },
    /// It is sent with an adapter, and is none of its files.
    #[error("'{name}' {reason}; send adapter_config.json and adapter_model.safetensors, or one .gguf file")]
    NoPart {
        /// What its sender calls it.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No room.
    #[error("the disk of the state directory is full: {0}; free some space, then load the adapter again")]
    Full(io::Error),
    /// The system refused something else.
    #[error("{attempt} '{}' failed: {source}; check the state directory's disk", path.display())]
    Io {
        /// What was tried.
        attempt: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bucket did not take or give it.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// What the bucket gave is not what is called so.
    #[error("what the bucket {0} has of it was changed there; load the adapter again")]
    Damaged(BucketAddress),
    /// The thread that looked at it is gone.
    #[error("looking at its files stopped: {0}; the log says why")]
    Stopped(String),
}

/// A whole copy that has no name yet; dropping it removes it.
#[derive(Debug)]
pub struct Incoming {
    /// What it is.
    pub content: ContentId,
    /// Bytes of all files.
    pub(super) bytes: u64,
    directory: Temporary,
}

#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // It is not there any more once it has its name; what stays behind is swept at the next start.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a sweep is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CleanupScope {
    /// Contents, and copies that were being made: at start there is nobody who makes one.
    Everything,
    /// Contents alone.
    Contents,
}

/// See the module's description. What is not `async` may block.
#[derive(Debug, Clone)]
pub struct AdapterStore {
    directory: PathBuf,
    max_file_bytes: u64,
    remote: Option<Arc<Remote>>,
}

/// A bucket, and what of it is here.
#[derive(Debug)]
struct Remote {
    bucket: Arc<Bucket>,
    cache: Arc<Cache>,
    figures: fetch::BucketCounters,
}

impl AdapterStore {
    /// Opens the store of the state directory `state`, and creates it if it is not there.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn open(state: &Path, max_file_bytes: u64) -> Result<Self, StoreError> {
        let directory = state.join(DIRECTORY);
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        created.map_err(failed("creating", &directory))?;
        sync(state)?;
        // Absolute: the executor that is told these paths may run somewhere else.
        let directory = directory.canonicalize().map_err(failed("finding", &directory))?;
        Ok(Self { directory, max_file_bytes, remote: None })
    }

    /// Copies the adapter at `place`, hashing what is copied. The copy is on disk when this returns.
    ///
    /// # Errors
    /// If it cannot be read, is too large, or does not fit the disk; nothing is left behind.
    pub fn copy(&self, place: &AdapterLocation, owner: TenantId) -> Result<Incoming, StoreError> {
        let pieces = place.pieces()?;
        let path = self.directory.join(format!("{INCOMING}{:016x}", random_u64()));
        DirBuilder::new().mode(0o700).create(&path).map_err(failed("creating", &path))?;
        let directory = Temporary(path);
        failpoint::pass("gateway.copy_begun");
        let mut hasher = ContentHasher::new(owner, pieces.len());
        let copies = pieces.into_iter().map(|piece| self.copy_piece(piece, &directory.0, &mut hasher));
        let copies = copies.collect::<Result<Vec<_>, _>>()?;
        failpoint::pass("gateway.copied_before_sync");
        let mut bytes = 0;
        for (path, copy) in copies {
            copy.sync_all().map_err(failed("syncing", &path))?;
            bytes += copy.metadata().map_err(failed("syncing", &path))?.len();
        }
        sync(&directory.0)?;
        Ok(Incoming { content: hasher.finish(), bytes, directory })
    }

    fn copy_piece(
        &self,
        mut piece: AdapterFile,
        directory: &Path,
        hasher: &mut ContentHasher,
    ) -> Result<(PathBuf, File), StoreError> {
        let path = directory.join(piece.name);
        let copy = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let mut copy = copy.map_err(failed("creating", &path))?;
        let limit_bytes = piece.max_bytes.unwrap_or(self.max_file_bytes);
        let mut own = blake3::Hasher::new();
        let (mut total_bytes, mut chunk) = (0u64, vec![0; CHUNK_BYTES]);
        loop {
            let count = match piece.file.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed("reading", Path::new(piece.name))(error)),
            };
            // Counted as it comes: what the file's length said a moment ago binds nobody.
            total_bytes = total_bytes.saturating_add(count as u64);
            if total_bytes > limit_bytes {
                return Err(StoreError::TooLarge { name: piece.name, limit_bytes });
            }
            if failpoint::hit("gateway.copy_fails") == FailpointOutcome::Fail {
                return Err(StoreError::Full(ErrorKind::StorageFull.into()));
            }
            own.update(&chunk[..count]);
            copy.write_all(&chunk[..count]).map_err(failed("writing", &path))?;
        }
        hasher.add(piece.name, total_bytes, &own.finalize());
        Ok((path, copy))
    }

    /// Gives a copy its name. One that has it already should be equal, but may have rotted: the fresh one takes its
    /// place at one stroke, and the other goes with `incoming`. Durable when this returns, and it stays as long as what is
    /// returned lives.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn install(&self, incoming: &Incoming) -> Result<CacheHold, StoreError> {
        let path = self.directory(incoming.content);
        failpoint::pass("gateway.synced_before_rename");
        let remote = self.remote.as_ref();
        let held = remote.map(|remote| remote.cache.admit(incoming.content, incoming.bytes));
        let renamed = if path.exists() {
            renameat_with(CWD, &incoming.directory.0, CWD, &path, RenameFlags::EXCHANGE)
                .map_err(io::Error::from)
        } else {
            fs::rename(&incoming.directory.0, &path)
        };
        if let Some(remote) = remote.filter(|_| !path.exists()) {
            remote.cache.forget(incoming.content);
        }
        renamed.map_err(failed("renaming", &path))?;
        sync(&self.directory)?;
        failpoint::pass("gateway.renamed_before_load");
        Ok(held.unwrap_or_else(CacheHold::by_nobody))
    }

    /// What the executor is told to load.
    #[must_use]
    pub fn path(&self, content: ContentId) -> PathBuf {
        let directory = self.directory(content);
        let gguf = directory.join(GGUF_FILE);
        if gguf.exists() { gguf } else { directory }
    }

    /// Removes a content that nothing here refers to. In a bucket it stays: there somebody else may.
    pub fn remove(&self, content: ContentId) {
        if let Some(remote) = &self.remote {
            remote.cache.forget(content);
        }
        remove(&self.directory(content));
    }

    /// Removes contents that are not in `keep`; returns how many things went.
    ///
    /// # Errors
    /// If the store cannot be listed.
    pub fn sweep(&self, keep: &HashSet<ContentId>, sweep: CleanupScope) -> Result<usize, StoreError> {
        let kept: HashSet<String> = keep.iter().map(ContentId::to_string).collect();
        let mut removed = 0;
        for entry in fs::read_dir(&self.directory).map_err(failed("listing", &self.directory))? {
            let entry = entry.map_err(failed("listing", &self.directory))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let is_copy = name.starts_with(INCOMING);
            if !kept.contains(name.strip_prefix(PARTIAL).unwrap_or(&name))
                && (!is_copy || sweep == CleanupScope::Everything)
            {
                self.forget(&name);
                remove(&entry.path());
                removed += 1;
            }
        }
        failpoint::pass("gateway.store_swept");
        Ok(removed)
    }

    fn forget(&self, name: &str) {
        if let (Some(remote), Some(content)) = (&self.remote, ContentId::named(name)) {
            remote.cache.forget(content);
        }
    }

    fn directory(&self, content: ContentId) -> PathBuf {
        self.directory.join(content.to_string())
    }
}

/// Sees whether a bucket can be written and read.
///
/// # Errors
/// What it says.
pub(crate) async fn try_out(address: &BucketAddress) -> Result<(), BucketError> {
    Bucket::open(address.clone())?.try_out().await
}

/// True if the state directory holds whole contents: then there must be a registry that knows them.
#[must_use]
pub(super) fn is_inhabited(state: &Path) -> bool {
    let entries = fs::read_dir(state.join(DIRECTORY)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| !name.to_string_lossy().starts_with('.'))
}

/// What stays behind is swept at the next start, so a failure is only worth a word.
fn remove(path: &Path) {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "files of no adapter could not be removed");
        }
        _ => {}
    }
}

/// Makes the names in a directory outlive a power cut.
pub(super) fn sync(directory: &Path) -> Result<(), StoreError> {
    let synced = File::open(directory).and_then(|opened| opened.sync_all());
    synced.map_err(failed("syncing", directory))
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError + use<> {
    let path = path.to_owned();
    move |source| match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            StoreError::Full(source)
        }
        _ => StoreError::Io { attempt, path, source },
    }
}
