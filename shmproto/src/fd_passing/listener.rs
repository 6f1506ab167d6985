//! Listens, accepts and connects: a socket in a directory that only this user may enter.

use std::{
    fs, io,
    marker::PhantomData,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt},
};

use super::{Connection, FdMessage, FromWorker, ToWorker, WorkerEnd};

/// Number of connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Error of an executor that cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path is too long for the kernel or has no file name.
    #[error("{0} cannot be the path of a socket: give one of at most 107 bytes, in a directory")]
    Path(PathBuf),
    /// Other users may enter the directory, or another user owns it.
    #[error("others may enter {0}, where the executor's socket is to be: own it, and run `chmod 700 {0}`")]
    DirectoryOpen(PathBuf),
    /// Another process listens on the path.
    #[error("another process is listening on {0}: stop it, or give this socket another path")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0} exists and is no socket: remove it, or give this socket another path")]
    NotASocket(PathBuf),
    /// The operating system refused an operation.
    #[error("cannot {action} {path} ({source}): check that this user may write there")]
    System {
        /// Operation that was attempted.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Error of an incoming connection that was not accepted. The listener continues.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// A process of another user connected; its connection is closed.
    #[error(
        "process {pid} of user {uid} wanted to be a worker and was turned away: run workers as the executor's user"
    )]
    Stranger {
        /// Id of the process.
        pid: u32,
        /// Id of its user.
        uid: u32,
    },
    /// The operating system refused the connection.
    #[error("a worker's call cannot be taken ({0}): raise the limit of open files")]
    System(#[source] io::Error),
}

/// Error of a worker or client that could not connect.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The path is too long for the kernel.
    #[error("{0} cannot be the path of a socket: give --executor one of at most 107 bytes")]
    Path(PathBuf),
    /// No process listens on the path; a retry may succeed.
    #[error("no executor listens on {0}: start it, or name its socket with --executor")]
    Absent(PathBuf),
    /// The executor's backlog is full; a retry may succeed.
    #[error("the executor on {0} does not take calls: try again")]
    Busy(PathBuf),
    /// A process of another user listens on the path.
    #[error(
        "user {uid} listens on {path}, not this process's user: name the socket of an executor of your own"
    )]
    Stranger {
        /// Path of the socket.
        path: PathBuf,
        /// Id of the listening user.
        uid: u32,
    },
    /// The operating system refused an operation.
    #[error("cannot connect to {path} ({source}): check --executor")]
    System {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// The executor's non-blocking socket, which sends `S` and receives `R`. Dropping it removes its file.
#[derive(Debug)]
pub struct Listening<S, R> {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file, so that `drop` does not remove the file of another process.
    file: (u64, u64),
    messages: PhantomData<fn(S) -> R>,
}

/// Socket on which the executor accepts workers.
pub type BoardListener = Listening<ToWorker, FromWorker>;

/// Connection of a worker with its process id.
pub type Accepted = ConnectedPeer<ToWorker, FromWorker>;

/// Connection of a worker or client with its process id.
#[derive(Debug)]
pub struct ConnectedPeer<S, R> {
    /// Connection to the peer; non-blocking.
    pub connection: Connection<S, R>,
    /// Id of the peer's process, from the kernel.
    pub pid: u32,
}

impl<S: FdMessage, R: FdMessage> Listening<S, R> {
    /// Listens on `path` in a directory private to this user. A socket of a dead process is replaced.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let system = |action| move |source| ListenError::System { action, path: path.to_owned(), source };
        let address = SocketAddrUnix::new(path).map_err(|_| ListenError::Path(path.to_owned()))?;
        check_directory(path)?;
        remove_stale(path)?;
        let socket = socket(SocketFlags::NONBLOCK).map_err(system("make a socket for"))?;
        net::bind(&socket, &address).map_err(|errno| system("bind")(errno.into()))?;
        let metadata = fs::symlink_metadata(path).map_err(system("inspect"))?;
        let file = (metadata.dev(), metadata.ino());
        let listener = Self { socket, path: path.to_owned(), file, messages: PhantomData };
        net::listen(&listener.socket, BACKLOG).map_err(|errno| system("listen on")(errno.into()))?;
        Ok(listener)
    }

    /// Accepts the next connection; `None` if none waits.
    pub fn accept(&self) -> Result<Option<ConnectedPeer<S, R>>, AcceptError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::io::retry_on_intr(|| net::accept_with(&self.socket, flags)) {
            Ok(socket) => socket,
            // A peer that gave up again counts as no connection.
            Err(Errno::AGAIN | Errno::CONNABORTED) => return Ok(None),
            Err(errno) => return Err(AcceptError::System(errno.into())),
        };
        let (pid, uid) = peer(socket.as_fd()).map_err(AcceptError::System)?;
        if uid != own_uid() {
            return Err(AcceptError::Stranger { pid, uid });
        }
        Ok(Some(ConnectedPeer { connection: Connection::over(socket), pid }))
    }
}

impl<S, R> AsFd for Listening<S, R> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<S, R> Drop for Listening<S, R> {
    fn drop(&mut self) {
        let same = |metadata: fs::Metadata| (metadata.dev(), metadata.ino()) == self.file;
        if fs::symlink_metadata(&self.path).is_ok_and(same) {
            // Another process may remove the file at this moment, which does no harm.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Connects a worker to the executor that listens on `path`. The connection blocks.
pub fn connect(path: &Path) -> Result<WorkerEnd, ConnectError> {
    Connection::to(path)
}

impl<S: FdMessage, R: FdMessage> Connection<S, R> {
    /// Connects to the executor that listens on `path`, to send `S` and receive `R`. The connection blocks.
    ///
    /// # Errors
    /// Returns a [`ConnectError`] if no process, or one of another user, listens there.
    pub fn to(path: &Path) -> Result<Self, ConnectError> {
        Ok(Self::over(call(path, SocketFlags::empty())?))
    }
}

fn call(path: &Path, flags: SocketFlags) -> Result<OwnedFd, ConnectError> {
    let system = |source| ConnectError::System { path: path.to_owned(), source };
    let address = SocketAddrUnix::new(path).map_err(|_| ConnectError::Path(path.to_owned()))?;
    let socket = socket(flags).map_err(system)?;
    match rustix::io::retry_on_intr(|| net::connect(&socket, &address)) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::CONNREFUSED) => return Err(ConnectError::Absent(path.to_owned())),
        Err(Errno::AGAIN) => return Err(ConnectError::Busy(path.to_owned())),
        Err(errno) => return Err(system(errno.into())),
    }
    let (_, uid) = peer(socket.as_fd()).map_err(system)?;
    if uid != own_uid() {
        return Err(ConnectError::Stranger { path: path.to_owned(), uid });
    }
    Ok(socket)
}

fn socket(more: SocketFlags) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | more;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Returns process and user of the peer, as of the time it connected or began to listen.
fn peer(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let credentials = sockopt::socket_peercred(socket)?;
    Ok((credentials.pid.as_raw_nonzero().get().unsigned_abs(), credentials.uid.as_raw()))
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn check_directory(path: &Path) -> Result<(), ListenError> {
    let directory = match (path.parent(), path.file_name()) {
        (Some(parent), Some(_)) if parent.as_os_str().is_empty() => Path::new("."),
        (Some(parent), Some(_)) => parent,
        _ => return Err(ListenError::Path(path.to_owned())),
    };
    let inspect = |source| ListenError::System { action: "inspect", path: directory.to_owned(), source };
    let metadata = fs::metadata(directory).map_err(inspect)?;
    if metadata.uid() == own_uid() && metadata.mode() & 0o077 == 0 {
        Ok(())
    } else {
        Err(ListenError::DirectoryOpen(directory.to_owned()))
    }
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let system = |action| move |source| ListenError::System { action, path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(system("inspect")(source)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    // A process with a full backlog still lives, and so does the owner of a socket of another type.
    match call(path, SocketFlags::NONBLOCK) {
        Err(ConnectError::Absent(_)) => fs::remove_file(path).map_err(system("remove the stale")),
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}
