//! Where executors and trainers are found.

use std::path::PathBuf;

use super::{ConfigError, args::ExecutorArgs};
use crate::executors::{Address, MAX_EXECUTORS, ONLY};

/// `sun_path` without its final zero.
pub(super) const MAX_SOCKET_BYTES: usize = 107;

/// Where executors are: those that were named, or the only one.
pub(super) fn addresses(args: &ExecutorArgs) -> Result<Vec<Address>, ConfigError> {
    if args.executors.is_empty() {
        let socket = args.socket.clone().unwrap_or_default();
        return Ok(vec![Address { name: ONLY.to_owned(), socket }]);
    }
    if args.executors.len() > MAX_EXECUTORS {
        return Err(ConfigError::TooManyExecutors);
    }
    for (index, address) in args.executors.iter().enumerate() {
        let is_same = |other: &Address| other.name == address.name || other.socket == address.socket;
        if args.executors[..index].iter().any(is_same) {
            return Err(ConfigError::SameExecutor(address.name.clone()));
        }
    }
    Ok(args.executors.clone())
}

/// Fails if the system would not take a path.
pub(super) fn check_sockets(executors: &[Address], trainers: Option<&PathBuf>) -> Result<(), ConfigError> {
    let sockets = executors.iter().map(|address| ("socket", &address.socket));
    let mut sockets = sockets.chain(trainers.map(|path| ("trainer-socket", path)));
    match sockets.find(|(_, path)| path.as_os_str().len() > MAX_SOCKET_BYTES) {
        None => Ok(()),
        Some((name, path)) => Err(ConfigError::SocketPath { name, path: path.clone() }),
    }
}
