//! The store keeps the adapters' files by content; executors load them, also after a restart.
//!
//! ```text
//! STATE/adapters/                          only the gateway's user may enter
//!     .incoming-0123456789abcdef/          a copy in progress, or an old copy to delete; removed at start
//!     .partial-<64 hexadecimal digits>/    the fetched beginning of a content from the bucket
//!     <64 hexadecimal digits>/             named after its content and never changed
//!         adapter_config.json, adapter_model.safetensors     or: adapter.gguf
//! ```
//!
//! - [`content`]: content ids and hashing; [`copy`] copies and hashes files at a path.
//! - [`incoming`]: files of an upload over HTTP, until they are copied like any others.
//! - [`push`]: weights that arrive in one piece; they are hashed on arrival and not copied.
//! - [`memory`]: contents of ephemeral adapters, which are never on disk.
//! - [`address`]: address of a store that many hosts share.
//! - [`bucket`]: the shared store, over `transport`. The directory is then a cache of the bucket, with limits
//!   by `cache`.
//! - [`fetch`]: fetches contents from the bucket, and publishes new contents there.
//!
//! A copy is written, its files are synced, its directory is synced, it is renamed, and the store is synced.
//! So after a power cut a directory with a content's name is complete. The name also hashes the owner: two
//! tenants never share files, while two names of one tenant may share a directory.

pub(crate) mod address;
pub(crate) mod bucket;
mod cache;
mod content;
mod copy;
mod fetch;
mod incoming;
mod memory;
mod push;
pub(super) mod transport;

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{CWD, RenameFlags, renameat_with};

pub use self::{
    address::BucketAddress,
    bucket::BucketError,
    content::ContentId,
    incoming::{IncomingAdapter, IncomingFile},
    memory::EphemeralStorage,
    push::Durability,
};
use self::{bucket::Bucket, cache::Cache, memory::EphemeralContents};
pub(crate) use self::{cache::CacheHold, push::PushedWeights};
use super::jail::{GGUF_FILE, JailError};
use crate::tenant_memory::Reservation;

const DIRECTORY: &str = "adapters";
/// Prefix of a copy in progress.
const INCOMING: &str = ".incoming-";
/// Prefix of an incomplete content.
const PARTIAL: &str = ".partial-";

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(transparent)]
    Jail(#[from] JailError),
    #[error(
        "'{name}' has more than {limit_bytes} bytes, which is the limit (--max-adapter-file-bytes; 1 MiB for adapter_config.json)"
    )]
    TooLarge { name: &'static str, limit_bytes: u64 },
    /// A file of an upload is not a file of an adapter.
    #[error("'{name}' {reason}; send adapter_config.json and adapter_model.safetensors, or one .gguf file")]
    NoPart { name: String, reason: &'static str },
    #[error("the disk of the state directory is full: {0}; free some space, then load the adapter again")]
    Full(io::Error),
    #[error("{attempt} '{}' failed: {source}; check the state directory's disk", path.display())]
    Io { attempt: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The contents from the bucket do not match their hash.
    #[error("its files in the bucket {0} were changed; load the adapter again")]
    Damaged(BucketAddress),
    #[error("reading its files failed: {0}; see the log")]
    Stopped(String),
    /// The tenant's ephemeral adapters have too many bytes.
    #[error(
        "the tenant's ephemeral adapters have {used} of {limit} bytes, and {asked} more do not fit; unload \
         some, send durable=true, or raise --ephemeral-adapter-bytes, of which a tenant may have half"
    )]
    TenantMemory { asked: usize, used: usize, limit: usize },
    /// The ephemeral adapters of all tenants have too many bytes.
    #[error(
        "all ephemeral adapters together may have {limit_bytes} bytes (--ephemeral-adapter-bytes), which are \
         in use; unload some, or send durable=true"
    )]
    Memory { limit_bytes: u64 },
    /// The configuration of pushed weights is missing or invalid.
    #[error("{0}")]
    PushedConfig(String),
}

/// A complete copy without a name; dropping it removes the copy.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub content: ContentId,
    /// Bytes of all files.
    pub(super) bytes: u64,
    directory: Temporary,
    /// Memory of an ephemeral adapter; `None` for a durable one.
    reserved: Option<Arc<Reservation>>,
}

impl Incoming {
    pub(super) fn durability(&self) -> Durability {
        if self.reserved.is_some() { Durability::Ephemeral } else { Durability::Durable }
    }
}

#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // After `install` the path is missing or holds an older copy; the next start removes remains.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CleanupScope {
    /// Contents, and copies in progress, which only exist at start if a previous gateway left them.
    Everything,
    Contents,
}

/// The files of adapters by content. Functions that are not `async` may block.
#[derive(Debug, Clone)]
pub(crate) struct AdapterStore {
    directory: PathBuf,
    max_file_bytes: u64,
    ephemeral: Arc<EphemeralContents>,
    remote: Option<Arc<Remote>>,
}

/// A bucket, and the part of it that is cached here.
#[derive(Debug)]
struct Remote {
    bucket: Arc<Bucket>,
    cache: Arc<Cache>,
    counters: fetch::BucketCounters,
}

impl AdapterStore {
    /// Opens the store of the state directory `state`, and creates it if it is missing.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn open(state: &Path, max_file_bytes: u64) -> Result<Self, StoreError> {
        let directory = state.join(DIRECTORY);
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        created.map_err(failed("creating", &directory))?;
        sync(state)?;
        // The path is absolute because the executor may have another working directory.
        let directory = directory.canonicalize().map_err(failed("finding", &directory))?;
        Ok(Self { directory, max_file_bytes, ephemeral: Arc::default(), remote: None })
    }

    /// Lets the store hold contents of ephemeral adapters in `storage`, and removes those of an ended
    /// gateway.
    #[must_use]
    pub(crate) fn with_ephemeral(self, storage: &EphemeralStorage) -> Self {
        let ephemeral = Arc::new(EphemeralContents::open(storage, &self.directory));
        Self { ephemeral, ..self }
    }

    /// Renames a copy to its content id. An existing directory with that name may be corrupt, so it is
    /// exchanged atomically and removed with `incoming`. The change is durable when this returns, and the
    /// files stay until the returned hold is dropped.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn install(&self, incoming: &Incoming) -> Result<CacheHold, StoreError> {
        if let Some(reserved) = &incoming.reserved {
            return self.install_ephemeral(incoming, reserved);
        }
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

    /// Renames the files of an ephemeral adapter to their content id. Equal files may be there already.
    fn install_ephemeral(
        &self,
        incoming: &Incoming,
        reserved: &Arc<Reservation>,
    ) -> Result<CacheHold, StoreError> {
        if self.ephemeral.find(incoming.content).is_none() {
            let path = self.ephemeral.place(incoming.content);
            fs::rename(&incoming.directory.0, &path).map_err(failed("renaming", &path))?;
            self.ephemeral.hold(incoming.content, reserved);
        }
        Ok(CacheHold::by_nobody())
    }

    /// Path that the executor loads.
    #[must_use]
    pub(crate) fn path(&self, content: ContentId) -> PathBuf {
        let directory = self.directory(content);
        let gguf = directory.join(GGUF_FILE);
        if gguf.exists() { gguf } else { directory }
    }

    /// Removes a content from this host; the bucket keeps it, because other hosts may use it.
    pub(crate) fn remove(&self, content: ContentId) {
        if let Some(path) = self.ephemeral.release(content) {
            return remove(&path);
        }
        if let Some(remote) = &self.remote {
            remote.cache.forget(content);
        }
        remove(&self.directory(content));
    }

    /// Removes contents that are not in `keep`. Returns the number of removed entries.
    ///
    /// # Errors
    /// If the store cannot be listed.
    pub(crate) fn sweep(&self, keep: &HashSet<ContentId>, sweep: CleanupScope) -> Result<usize, StoreError> {
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
        self.ephemeral.find(content).unwrap_or_else(|| self.directory.join(content.to_string()))
    }
}

/// Tests whether a bucket can be written and read.
///
/// # Errors
/// If the bucket refuses, or cannot be reached.
pub(crate) async fn try_out(address: &BucketAddress) -> Result<(), BucketError> {
    Bucket::open(address.clone())?.try_out().await
}

/// True if the state directory holds complete contents, so there must be a registry that knows them.
#[must_use]
pub(super) fn is_inhabited(state: &Path) -> bool {
    let entries = fs::read_dir(state.join(DIRECTORY)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| !name.to_string_lossy().starts_with('.'))
}

/// Removes a file or directory. A failure is only logged, because the next start removes the remains.
fn remove(path: &Path) {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot remove files that belong to no adapter");
        }
        _ => {}
    }
}

/// Syncs a directory, so that its names survive a power cut.
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
