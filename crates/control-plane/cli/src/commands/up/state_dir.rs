//! The state directory: its lock, and the private run directory of one start.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{DirBuilderExt as _, symlink},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::{FlockOperation, flock};

use super::{
    errors::UpError,
    process::{Instance, ProcessRole},
};
use crate::deployment::{
    paths::{LAYER_SOCKETS, lock_path, log_directory},
    running::LockHolder,
};

/// Longest path of a Unix socket on Linux, without the final zero byte.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// A state directory that this process has locked until it is dropped.
#[derive(Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
    run: PathBuf,
    /// The kernel releases the lock with the file, also when this process is killed.
    _lock: File,
}

impl StateDir {
    /// Creates the directory if needed, locks it, and makes a fresh run directory with access for this user
    /// only.
    ///
    /// Errors name the directory as given in `asked`.
    pub(crate) fn claim(asked: &Path, grace: Duration) -> Result<Self, UpError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| UpError::State { path, source }
        };
        private().recursive(true).create(asked).map_err(failed(asked))?;
        let path = asked.canonicalize().map_err(failed(asked))?;
        let lock = lock(asked, LockHolder::this(grace))?;
        let parent = asked.join("run");
        // This process holds the lock, so existing files belong to starts that are over.
        if let Err(error) = fs::remove_dir_all(&parent)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(failed(&parent)(error));
        }
        // A process of a killed predecessor may still be draining and must not find a new socket at its old
        // path.
        let run = path.join("run").join(std::process::id().to_string());
        private().create(&parent).map_err(failed(&parent))?;
        private().create(&run).map_err(failed(&parent))?;
        remove_layer_links(&path).map_err(failed(asked))?;
        let state = Self { path, run, _lock: lock };
        state.check_socket_path(Instance::default())?;
        Ok(state)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Directory where an executor keeps offloaded KV blocks.
    pub(crate) fn history(&self, instance: Instance) -> PathBuf {
        let history = self.path.join("history");
        instance.name().map_or_else(|| history.clone(), |name| history.join(name))
    }

    /// File that keeps the precision that `auto` chose, for all executors of this host.
    pub(crate) fn precision(&self) -> PathBuf {
        self.path.join("precision.json")
    }

    /// Creates and returns the directory of a base beside the first, where the gateway keeps its adapters.
    pub(crate) fn base_directory(&self, base: &str) -> Result<PathBuf, UpError> {
        let directory = self.path.join("bases").join(base);
        let failed = |source| UpError::State { path: directory.clone(), source };
        private().recursive(true).create(&directory).map_err(failed)?;
        Ok(directory)
    }

    /// Socket between an executor and the gateway.
    pub(crate) fn socket(&self, instance: Instance) -> PathBuf {
        self.run.join(format!("executor{}.sock", suffix(instance)))
    }

    /// Socket between an executor and its workers.
    pub(crate) fn worker_socket(&self, instance: Instance) -> PathBuf {
        self.run.join(format!("workers{}.sock", suffix(instance)))
    }

    /// Socket on which the gateway requests training jobs.
    pub(crate) fn trainer_socket(&self) -> PathBuf {
        self.run.join("trainers.sock")
    }

    /// Socket between the executor and split clients of this host.
    pub(crate) fn layer_socket(&self) -> PathBuf {
        self.run.join(LAYER_SOCKETS[0])
    }

    /// Links the sockets for split clients at a path that stays the same across starts.
    pub(crate) fn link_layer_sockets(&self) -> Result<(), UpError> {
        let link = |name: &&str| symlink(self.run.join(name), self.path.join(name));
        let failed = |source| UpError::State { path: self.path.clone(), source };
        LAYER_SOCKETS.iter().try_for_each(link).map_err(failed)
    }

    /// Socket on which a process sends status and heartbeats.
    pub(crate) fn notify_socket(&self, role: ProcessRole) -> PathBuf {
        self.run.join(match role {
            ProcessRole::Executor(instance) => format!("executor{}.life", suffix(instance)),
            ProcessRole::Gateway => "gateway.life".to_owned(),
            ProcessRole::Trainer => "trainer.life".to_owned(),
            ProcessRole::Worker(worker) => format!("{}.life", worker.index),
        })
    }

    pub(crate) fn logs(&self) -> PathBuf {
        log_directory(&self.path)
    }

    /// Fails if the path of an executor's socket is too long for a socket address.
    pub(crate) fn check_socket_path(&self, instance: Instance) -> Result<(), UpError> {
        let socket = self.socket(instance);
        let bytes = socket.as_os_str().as_bytes().len();
        match bytes <= MAX_SOCKET_PATH_BYTES {
            true => Ok(()),
            false => Err(UpError::PathTooLong { socket, bytes }),
        }
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        // Removal is best effort, because the next start removes what is left.
        let _ = fs::remove_dir_all(&self.run);
        let _ = remove_layer_links(&self.path);
    }
}

fn suffix(instance: Instance) -> String {
    instance.name().map(|name| format!("-{name}")).unwrap_or_default()
}

fn remove_layer_links(state: &Path) -> io::Result<()> {
    for name in LAYER_SOCKETS {
        match fs::remove_file(state.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn private() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

fn lock(state: &Path, holder: LockHolder) -> Result<File, UpError> {
    let path = lock_path(state);
    let failed = |source| UpError::State { path: path.clone(), source };
    let open = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = open.map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let holder = LockHolder::of(state).ok().flatten();
            let pid = holder.map(|holder| holder.process.pid);
            return Err(UpError::StateTaken { path: state.to_owned(), pid });
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    file.set_len(0).map_err(failed)?;
    serde_json::to_writer(&mut file, &holder).map_err(|error| failed(error.into()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        deployment::paths::layer_socket,
        exit::{Exit, Explain as _},
    };
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_second_claim_is_refused_and_names_the_first_process() {
        let directory = tempfile::tempdir().unwrap();
        let first = StateDir::claim(&directory.path().join("s"), Duration::ZERO).unwrap();
        let error = StateDir::claim(&directory.path().join("s"), Duration::ZERO).unwrap_err();
        assert_eq!(error.exit(), Exit::Conflict);
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        drop(first);
        StateDir::claim(&directory.path().join("s"), Duration::ZERO).unwrap();
    }

    #[test]
    fn the_run_directory_is_private_and_goes_with_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::claim(&directory.path().join("s"), Duration::ZERO).unwrap();
        let run = state.socket(Instance::default()).parent().unwrap().to_owned();
        assert_eq!(fs::metadata(&run).unwrap().permissions().mode() & 0o777, 0o700);
        drop(state);
        assert!(!run.exists());
    }

    #[test]
    fn split_clients_find_the_sockets_at_the_same_place_after_every_start() {
        let home = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let state = StateDir::claim(home.path(), Duration::ZERO).unwrap();
            assert!(fs::read_link(layer_socket(home.path())).is_err(), "none before there are sockets");
            state.link_layer_sockets().unwrap();
            assert_eq!(fs::read_link(layer_socket(home.path())).unwrap(), state.layer_socket());
        }
        assert!(fs::read_link(layer_socket(home.path())).is_err(), "the link goes with the deployment");
    }

    #[test]
    fn what_a_killed_predecessor_left_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let stale = directory.path().join("run/1");
        fs::create_dir_all(&stale).unwrap();
        fs::write(stale.join("executor.sock"), "").unwrap();
        let _state = StateDir::claim(directory.path(), Duration::ZERO).unwrap();
        assert!(!stale.exists());
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let error = StateDir::claim(&directory.path().join("x".repeat(100)), Duration::ZERO).unwrap_err();
        assert!(matches!(error, UpError::PathTooLong { .. }), "{error}");
    }
}
