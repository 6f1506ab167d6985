//! Paths of files and sockets in a deployment's state directory.

use std::path::{Path, PathBuf};

/// Current log file in [`log_directory`].
pub(crate) const LOG_FILE: &str = "holobiont.log";

/// Previous log file, rotated when it was full.
pub(crate) const OLD_LOG_FILE: &str = "holobiont.log.1";

/// Sockets for split clients: shared memory and ZeroMQ.
pub(crate) const LAYER_SOCKETS: [&str; 2] = ["layers.sock", "layers.zmq"];

pub(crate) fn lock_path(state: &Path) -> PathBuf {
    state.join("lock")
}

/// Returns the layer socket of the deployment in `state`; the path stays the same across starts.
pub(crate) fn layer_socket(state: &Path) -> PathBuf {
    state.join(LAYER_SOCKETS[0])
}

pub(crate) fn log_directory(state: &Path) -> PathBuf {
    state.join("logs")
}
