//! How the executor and its workers or clients find each other: a socket in a directory that nobody else may enter.

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

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Why the executor cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The kernel takes no path of this length.
    #[error("{0} cannot be the path of a socket: give one of at most 107 bytes, in a directory")]
    Path(PathBuf),
    /// Others may enter the directory, or it is another user's.
    #[error("others may enter {0}, where the executor's socket is to be: own it, and run `chmod 700 {0}`")]
    DirectoryOpen(PathBuf),
    /// Somebody listens there.
    #[error("another process is listening on {0}: stop it, or give this socket another path")]
    InUse(PathBuf),
    /// Something that is no socket is in the way.
    #[error("{0} exists and is no socket: remove it, or give this socket another path")]
    NotASocket(PathBuf),
    /// The operating system said no.
    #[error("cannot {action} {path} ({source}): check that this user may write there")]
    System {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Why a caller was not taken. The listener goes on.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// Another user's process called; its connection is closed.
    #[error(
        "process {pid} of user {uid} wanted to be a worker and was turned away: run workers as the executor's user"
    )]
    Stranger {
        /// The process.
        pid: u32,
        /// Its user.
        uid: u32,
    },
    /// The operating system said no.
    #[error("a worker's call cannot be taken ({0}): raise the limit of open files")]
    System(#[source] io::Error),
}

/// Why a worker or client has no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kernel takes no path of this length.
    #[error("{0} cannot be the path of a socket: give --executor one of at most 107 bytes")]
    Path(PathBuf),
    /// Nobody listens there yet, or any more: worth trying again.
    #[error("no executor listens on {0}: start it, or name its socket with --executor")]
    Absent(PathBuf),
    /// It listens, and does not take more callers now: worth trying again.
    #[error("the executor on {0} does not take calls: try again")]
    Busy(PathBuf),
    /// Another user's process listens there.
    #[error(
        "user {uid} listens on {path}, not this process's user: name the socket of an executor of your own"
    )]
    Stranger {
        /// The socket.
        path: PathBuf,
        /// Who listens.
        uid: u32,
    },
    /// The operating system said no.
    #[error("cannot connect to {path} ({source}): check --executor")]
    System {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// The executor's socket, which does not block; its file is removed when this is dropped. It sends `S` and receives `R`.
#[derive(Debug)]
pub struct Listening<S, R> {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file, so that nobody else's is removed.
    file: (u64, u64),
    messages: PhantomData<fn(S) -> R>,
}

/// The socket that workers find their executor by.
pub type BoardListener = Listening<ToWorker, FromWorker>;

/// A worker that called.
pub type Accepted = ConnectedPeer<ToWorker, FromWorker>;

/// A worker or client that called.
#[derive(Debug)]
pub struct ConnectedPeer<S, R> {
    /// The connection, which does not block.
    pub connection: Connection<S, R>,
    /// The caller's process, as the kernel says.
    pub pid: u32,
}

impl<S: FdMessage, R: FdMessage> Listening<S, R> {
    /// Listens on `path`, whose directory must be this user's alone. The socket of a dead process is replaced.
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

    /// The next that called; `None` if there is none.
    pub fn accept(&self) -> Result<Option<ConnectedPeer<S, R>>, AcceptError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::io::retry_on_intr(|| net::accept_with(&self.socket, flags)) {
            Ok(socket) => socket,
            // A caller that gave up again is no caller.
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
            // It may go in this very moment; nothing depends on it.
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
    /// If nobody listens there, or somebody else.
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

/// Process and user of the other side, as they were when it connected or began to listen.
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
    // Whoever does not take the call at once is alive all the same; so is a socket of another type.
    match call(path, SocketFlags::NONBLOCK) {
        Err(ConnectError::Absent(_)) => fs::remove_file(path).map_err(system("remove the stale")),
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}
