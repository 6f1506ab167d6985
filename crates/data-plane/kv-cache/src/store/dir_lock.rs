//! Opens the file in a directory that only this user may enter, for one process at a time.

use std::{
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use thiserror::Error;

/// Error of a store that could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Other users may enter the directory.
    #[error(
        "other users may enter {} (mode {mode:o}), the directory of KV blocks; run `chmod 700 {}`",
        directory.display(), directory.display()
    )]
    DirectoryOpen {
        /// Path of the directory.
        directory: PathBuf,
        /// Permission bits of the directory.
        mode: u32,
    },
    /// Another user owns the directory.
    #[error(
        "{}, the directory of KV blocks, belongs to user {owner}, not to this user; use another directory",
        directory.display()
    )]
    ForeignDirectory {
        /// Path of the directory.
        directory: PathBuf,
        /// Id of the owner.
        owner: u32,
    },
    /// The path is a link, a directory or a device, or names no file in a directory.
    #[error("{} is not a plain file; remove it or give another path", .0.display())]
    NotAFile(PathBuf),
    /// The file was not made by a store, and is left unchanged.
    #[error("{} is not a file of KV blocks; remove it or give another path", .0.display())]
    NotAStore(PathBuf),
    /// Another process has the file open.
    #[error("another process stores its KV blocks in {}; stop it or give another path", .0.display())]
    InUse(PathBuf),
    /// The operating system refused an operation.
    #[error("cannot {action} {}: {source}; check the disk, and that the path is writable", path.display())]
    Io {
        /// Operation that was attempted.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { action, path, source }
}

/// Opens the file at `path` for this process alone; creates missing directories and the file.
pub(super) fn claim(path: &Path) -> Result<File, OpenError> {
    let directory = match (path.parent(), path.file_name()) {
        (Some(parent), Some(_)) if parent.as_os_str().is_empty() => Path::new("."),
        (Some(parent), Some(_)) => parent,
        _ => return Err(OpenError::NotAFile(path.to_owned())),
    };
    prepare_directory(directory)?;
    let file = open(path)?;
    if !file.metadata().map_err(failed("inspect", path))?.is_file() {
        return Err(OpenError::NotAFile(path.to_owned()));
    }
    match file.try_lock() {
        // The system holds the lock while the file is open, and releases it even if this process is killed.
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(OpenError::InUse(path.to_owned())),
        Err(TryLockError::Error(source)) => Err(failed("lock", path)(source)),
    }
}

fn prepare_directory(directory: &Path) -> Result<(), OpenError> {
    let builder = &mut DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory).map_err(failed("create", directory))?;
    let metadata = fs::metadata(directory).map_err(failed("inspect", directory))?;
    let owner = metadata.uid();
    if owner != rustix::process::geteuid().as_raw() {
        return Err(OpenError::ForeignDirectory { directory: directory.to_owned(), owner });
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(OpenError::DirectoryOpen { directory: directory.to_owned(), mode });
    }
    Ok(())
}

/// Opens without following a link, and without waiting for the other end of a pipe.
fn open(path: &Path) -> Result<File, OpenError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(file.into()),
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => Err(OpenError::NotAFile(path.to_owned())),
        Err(errno) => Err(failed("open", path)(errno.into())),
    }
}
