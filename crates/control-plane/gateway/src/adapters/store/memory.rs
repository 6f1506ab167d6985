//! Contents of ephemeral adapters, in a memory file system that the executors of this host read.
//!
//! ```text
//! MEMORY/holobiont-0123456789abcdef/       named by the state directory; only the gateway's user may enter
//!     .incoming-0123456789abcdef/          files that are being received
//!     <64 hexadecimal digits>/             a content, as in the state directory
//! ```
//!
//! No file is synced. The directory is made for the first content and removed with the gateway; the next
//! start removes what a killed gateway left. Bytes are reserved before they arrive, and counted until the
//! content is removed.

use std::{
    collections::HashMap,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use rustix::process::geteuid;

use super::{StoreError, content::ContentId, failed};
use crate::{
    lock::lock,
    tenant_memory::{MemoryFull, MemoryLimits, Reservation, TenantMemory},
};

/// Directory and limit of ephemeral contents.
#[derive(Debug, Clone)]
pub struct EphemeralStorage {
    /// Directory on a memory file system.
    pub memory: PathBuf,
    /// Maximum bytes of all tenants; one tenant may have half.
    pub bytes: u64,
}

/// The ephemeral contents on this host, each with the bytes reserved for it. The default holds none.
#[derive(Debug)]
pub(super) struct EphemeralContents {
    directory: PathBuf,
    limit_bytes: u64,
    memory: Arc<TenantMemory>,
    held: Mutex<HashMap<ContentId, Arc<Reservation>>>,
}

impl EphemeralContents {
    /// Prepares contents of the gateway whose store is at the absolute path `store`, and removes remains.
    pub(super) fn open(storage: &EphemeralStorage, store: &Path) -> Self {
        let key = blake3::hash(store.as_os_str().as_encoded_bytes());
        let directory = storage.memory.join(format!("holobiont-{}", &key.to_hex()[..16]));
        let contents = Self::within(directory, storage.bytes);
        contents.clear();
        contents
    }

    fn within(directory: PathBuf, limit_bytes: u64) -> Self {
        let total_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
        let limits = MemoryLimits { tenant_bytes: total_bytes.div_ceil(2), total_bytes };
        Self { directory, limit_bytes, memory: TenantMemory::new(limits), held: Mutex::default() }
    }

    /// Reserves `bytes` of `owner`, and returns a directory for files of this user alone.
    pub(super) fn begin(&self, owner: Option<&str>, bytes: u64) -> Result<(&Path, Reservation), StoreError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let reserved = self.memory.reserve(&owner.unwrap_or_default().into(), bytes);
        let reserved = reserved.map_err(|full| self.refused(full))?;
        self.make_directory().map_err(failed("creating", &self.directory))?;
        Ok((&self.directory, reserved))
    }

    /// Returns the error of a refused reservation.
    pub(super) fn refused(&self, full: MemoryFull) -> StoreError {
        let limit_bytes = self.limit_bytes;
        match full {
            MemoryFull::Tenant { asked, used, limit } => StoreError::TenantMemory { asked, used, limit },
            MemoryFull::Total => StoreError::Memory { limit_bytes },
        }
    }

    /// Creates the directory, or accepts one that only this user may enter.
    fn make_directory(&self) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && self.is_own() => Ok(()),
            made => made,
        }
    }

    /// Whether the directory belongs to this user alone. Other users may write to a memory file system too.
    fn is_own(&self) -> bool {
        fs::symlink_metadata(&self.directory).is_ok_and(|found| {
            found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0
        })
    }

    /// Adds a content whose files are in place.
    pub(super) fn hold(&self, content: ContentId, reserved: &Arc<Reservation>) {
        lock(&self.held).insert(content, Arc::clone(reserved));
    }

    /// Directory of a content, if the content is here.
    pub(super) fn find(&self, content: ContentId) -> Option<PathBuf> {
        lock(&self.held).contains_key(&content).then(|| self.place(content))
    }

    pub(super) fn place(&self, content: ContentId) -> PathBuf {
        self.directory.join(content.to_string())
    }

    /// Forgets a content, and returns the directory whose files are to be removed.
    pub(super) fn release(&self, content: ContentId) -> Option<PathBuf> {
        lock(&self.held).remove(&content).map(|_| self.place(content))
    }

    fn clear(&self) {
        if self.is_own()
            && let Err(error) = fs::remove_dir_all(&self.directory)
        {
            tracing::warn!(directory = %self.directory.display(), %error, "cannot remove ephemeral adapters");
        }
    }
}

impl Default for EphemeralContents {
    fn default() -> Self {
        Self::within(PathBuf::new(), 0)
    }
}

impl Drop for EphemeralContents {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(memory: &Path) -> EphemeralContents {
        let storage = EphemeralStorage { memory: memory.to_owned(), bytes: 100 };
        EphemeralContents::open(&storage, Path::new("/state/adapters"))
    }

    #[test]
    fn a_directory_that_others_may_enter_is_neither_used_nor_removed() {
        let place = tempfile::tempdir().unwrap();
        let contents = open(place.path());
        let directory = contents.directory.clone();
        DirBuilder::new().mode(0o755).create(&directory).unwrap();
        assert!(matches!(contents.begin(None, 1), Err(StoreError::Io { .. })));
        drop(contents);
        assert!(directory.exists());
        fs::remove_dir(&directory).unwrap();
        std::os::unix::fs::symlink(place.path(), &directory).unwrap();
        assert!(matches!(open(place.path()).begin(None, 1), Err(StoreError::Io { .. })));
        assert!(place.path().exists(), "a link is not followed");
    }

    #[test]
    fn what_a_killed_gateway_left_is_removed_by_the_next() {
        let place = tempfile::tempdir().unwrap();
        let killed = open(place.path());
        let (left, reserved) = killed.begin(None, 50).unwrap();
        fs::write(left.join("weights"), "weights").unwrap();
        assert_eq!(reserved.bytes(), 50);
        let next = open(place.path());
        assert!(!killed.directory.exists());
        drop(next.begin(Some("alice"), 1).unwrap());
        assert!(next.directory.exists());
        let directory = next.directory.clone();
        drop(next);
        assert!(!directory.exists(), "nothing is left at the end");
    }
}
