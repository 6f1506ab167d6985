//! Where the things of a deployment lie in its state directory.

use std::path::{Path, PathBuf};

/// The log that is written, in [`log_directory`].
pub(crate) const LOG_FILE: &str = "holobiont.log";

/// The log that was full.
pub(crate) const OLD_LOG_FILE: &str = "holobiont.log.1";

/// The sockets for split clients: shared memory's, and ZeroMQ's.
pub(crate) const LAYER_SOCKETS: [&str; 2] = ["layers.sock", "layers.zmq"];

/// The lock file of a state directory.
pub(crate) fn lock_path(state: &Path) -> PathBuf {
    state.join("lock")
}

/// Where split clients of this host find the executor of the deployment in `state`, whichever start it is.
pub(crate) fn layer_socket(state: &Path) -> PathBuf {
    state.join(LAYER_SOCKETS[0])
}

/// Where a deployment's log is.
pub(crate) fn log_directory(state: &Path) -> PathBuf {
    state.join("logs")
}
