//! Listens on a Unix socket in a directory that only this user may enter.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::{
        fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

/// Longest path of a Unix socket on Linux, without the closing zero.
const MAX_PATH_BYTES: usize = 107;

/// Error of a socket that could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path names no file in a directory.
    #[error("{0} names no file in a directory; give --socket a path such as /run/holobiont/executor.sock")]
    NoDirectory(PathBuf),
    /// The path is too long for the kernel.
    #[error("the socket path {path} has {bytes} bytes, and the limit is {MAX_PATH_BYTES}; use a shorter one")]
    TooLong {
        /// Path that was requested.
        path: PathBuf,
        /// Length of the path in bytes.
        bytes: usize,
    },
    /// Other users may enter the directory.
    #[error(
        "other users may enter {directory} (mode {mode:o}), the directory of the socket; run `chmod 700 \
         {directory}`"
    )]
    DirectoryOpen {
        /// Path of the directory.
        directory: PathBuf,
        /// Permission bits of the directory.
        mode: u32,
    },
    /// Another user owns the directory.
    #[error(
        "{directory}, the directory of the socket, belongs to user {owner}, not to this user; use \
         another directory"
    )]
    ForeignDirectory {
        /// Path of the directory.
        directory: PathBuf,
        /// Id of the owner.
        owner: u32,
    },
    /// Another process listens on the path.
    #[error("another process is listening on {0}; stop it or give --socket another path")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0} exists and is not a socket; remove it or give --socket another path")]
    NotASocket(PathBuf),
    /// The operating system refused an operation.
    #[error("cannot {action} {path}: {cause}; check that the path is writable")]
    Io {
        /// Operation that was attempted.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
}

/// Listening socket in a private directory. Dropping it removes the file.
#[derive(Debug)]
pub struct PrivateSocket {
    path: PathBuf,
}

impl PrivateSocket {
    /// Creates the directory if it does not exist, checks that only this user may enter it, removes the
    /// socket file of a dead process, and listens.
    ///
    /// # Errors
    /// Returns the first step that failed.
    pub fn bind(path: &Path) -> Result<(Self, UnixListener), BindError> {
        let bytes = path.as_os_str().len();
        if bytes > MAX_PATH_BYTES {
            return Err(BindError::TooLong { path: path.to_owned(), bytes });
        }
        let directory = match (path.parent(), path.file_name()) {
            (Some(parent), Some(_)) if parent.as_os_str().is_empty() => Path::new("."),
            (Some(parent), Some(_)) => parent,
            _ => return Err(BindError::NoDirectory(path.to_owned())),
        };
        prepare_directory(directory)?;
        remove_stale(path)?;
        let listener = UnixListener::bind(path).map_err(failed("bind", path))?;
        Ok((Self { path: path.to_owned() }, listener))
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        // The file may be gone already, which does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

fn prepare_directory(directory: &Path) -> Result<(), BindError> {
    let builder = &mut DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory).map_err(failed("create", directory))?;
    let metadata = fs::metadata(directory).map_err(failed("inspect", directory))?;
    let owner = metadata.uid();
    if owner != rustix::process::geteuid().as_raw() {
        return Err(BindError::ForeignDirectory { directory: directory.to_owned(), owner });
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(BindError::DirectoryOpen { directory: directory.to_owned(), mode });
    }
    Ok(())
}

fn remove_stale(path: &Path) -> Result<(), BindError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(cause) => return Err(failed("inspect", path)(cause)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(BindError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    if UnixStream::connect(path).is_ok() {
        return Err(BindError::InUse(path.to_owned()));
    }
    fs::remove_file(path).map_err(failed("remove the stale", path))
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BindError {
    let path = path.to_owned();
    move |cause| BindError::Io { action, path, cause }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn directory(mode: u32) -> tempfile::TempDir {
        tempfile::Builder::new().permissions(fs::Permissions::from_mode(mode)).tempdir().unwrap()
    }

    #[test]
    fn the_directory_is_made_private_and_the_file_goes_with_its_owner() {
        let root = directory(0o700);
        let path = root.path().join("a/b/executor.sock");
        let (socket, _listener) = PrivateSocket::bind(&path).unwrap();
        let mode = fs::metadata(path.parent().unwrap()).unwrap().mode();
        assert_eq!(mode & 0o777, 0o700);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let root = directory(0o750);
        let refused = PrivateSocket::bind(&root.path().join("executor.sock")).unwrap_err();
        assert!(matches!(refused, BindError::DirectoryOpen { mode: 0o750, .. }), "{refused}");
    }

    #[test]
    fn a_dead_process_leaves_nothing_in_the_way_but_a_living_one_does() {
        let root = directory(0o700);
        let path = root.path().join("executor.sock");
        drop(UnixListener::bind(&path).unwrap());
        let (_socket, _listener) = PrivateSocket::bind(&path).unwrap();
        assert!(matches!(PrivateSocket::bind(&path), Err(BindError::InUse(_))));
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_removed() {
        let root = directory(0o700);
        let path = root.path().join("precious");
        fs::write(&path, "data").unwrap();
        assert!(matches!(PrivateSocket::bind(&path), Err(BindError::NotASocket(_))));
        assert!(path.exists());
    }

    #[test]
    fn a_path_the_kernel_cannot_take_is_named() {
        let path = PathBuf::from(format!("/tmp/{}", "x".repeat(120)));
        assert!(matches!(PrivateSocket::bind(&path), Err(BindError::TooLong { bytes: 125, .. })));
    }
}
