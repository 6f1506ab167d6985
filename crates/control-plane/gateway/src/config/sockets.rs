//! Endpoints of executors, and checks of socket paths.

use std::path::{Path, PathBuf};

use security::{
    address::HostPort,
    tls_client::{self, TlsFiles},
};

use super::{
    Args, GatewayConfigError,
    args::ExecutorArgs,
    values::{ExecutorEndpoint, NamedEndpoint},
};
use crate::{
    executor::{Endpoint, RemoteEndpoint},
    executors::{Address, MAX_EXECUTORS, ONLY},
};

/// Length of `sun_path` without its final zero.
pub(super) const MAX_SOCKET_BYTES: usize = 107;

/// Subdirectory of the state directory with the local ends of tunnels to other hosts.
const TUNNELS: &str = "tunnels";

/// Returns the addresses of the named executors, or that of the only one.
pub(super) fn addresses(args: &Args) -> Result<Vec<Address>, GatewayConfigError> {
    let executors = &args.executors;
    if executors.executors.is_empty() {
        let endpoint = Endpoint::Socket(executors.socket.clone().unwrap_or_default());
        return Ok(vec![Address { name: ONLY.to_owned(), endpoint }]);
    }
    check_different(&executors.executors)?;
    let address = |named: &NamedEndpoint| {
        let endpoint = match &named.place {
            ExecutorEndpoint::Socket(socket) => Endpoint::Socket(socket.clone()),
            ExecutorEndpoint::Host(host) => Endpoint::Far(far(executors, &args.state, &named.name, host)?),
        };
        Ok(Address { name: named.name.clone(), endpoint })
    };
    executors.executors.iter().map(address).collect()
}

fn check_different(executors: &[NamedEndpoint]) -> Result<(), GatewayConfigError> {
    if executors.len() > MAX_EXECUTORS {
        return Err(GatewayConfigError::TooManyExecutors);
    }
    for (index, named) in executors.iter().enumerate() {
        let is_same = |other: &NamedEndpoint| other.name == named.name || other.place == named.place;
        if executors[..index].iter().any(is_same) {
            return Err(GatewayConfigError::SameExecutor(named.name.clone()));
        }
    }
    Ok(())
}

/// Returns the endpoint of an executor on another host.
fn far(
    args: &ExecutorArgs,
    state: &Path,
    name: &str,
    host: &HostPort,
) -> Result<RemoteEndpoint, GatewayConfigError> {
    let missing = |flag| GatewayConfigError::FarExecutor { name: name.to_owned(), flag };
    let cert = args.executor_cert.clone().ok_or_else(|| missing("executor-cert"))?;
    let key = args.executor_cert_key.clone().ok_or_else(|| missing("executor-cert-key"))?;
    if args.model.is_none() {
        return Err(missing("model"));
    }
    let files = TlsFiles { ca: args.executor_ca.clone(), identity: Some((cert, key)) };
    let socket = state.join(TUNNELS).join(format!("{name}.sock"));
    let far = RemoteEndpoint::new(host.clone(), tls_client::config(&files)?, socket);
    far.ok_or_else(|| GatewayConfigError::NoHostName(host.clone()))
}

/// Fails if a path is longer than the system accepts for sockets.
pub(super) fn check_sockets(
    executors: &[Address],
    trainers: Option<&PathBuf>,
) -> Result<(), GatewayConfigError> {
    let sockets = executors.iter().map(|address| match &address.endpoint {
        Endpoint::Socket(socket) => ("socket", socket.as_path()),
        Endpoint::Far(far) => ("state", far.socket()),
    });
    let mut sockets = sockets.chain(trainers.map(|path| ("trainer-socket", path.as_path())));
    match sockets.find(|(_, path)| path.as_os_str().len() > MAX_SOCKET_BYTES) {
        None => Ok(()),
        Some((name, path)) => Err(GatewayConfigError::SocketPath { name, path: path.to_owned() }),
    }
}
