//! File descriptors: how many connections they allow, and a reserved one for when they run out.

use std::{fs::File, io, time::Duration};

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use tokio::{net::TcpListener, time::timeout};

/// Number of descriptors for other purposes: log, registry, executor, adapters being loaded.
const OTHERS: u64 = 96;
/// Number of connections reserved for probes when all others are taken.
const MAX_RESERVE: usize = 64;
/// How long accepting pauses when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    pub(super) connections: usize,
    /// Number of further connections for probes and refusals.
    pub(super) reserve: usize,
}

impl Budget {
    /// Returns how many of `wanted` connections the system allows, after raising its limit as far as
    /// permitted.
    pub(super) fn find(wanted: usize) -> Self {
        let limit = getrlimit(Resource::Nofile);
        let needed = (wanted.saturating_add(MAX_RESERVE) as u64).saturating_add(OTHERS);
        let mut current = limit.current.unwrap_or(u64::MAX);
        if current < needed {
            let raised = needed.min(limit.maximum.unwrap_or(u64::MAX));
            let new = Rlimit { current: Some(raised), maximum: limit.maximum };
            if setrlimit(Resource::Nofile, new).is_ok() {
                current = raised;
            }
        }
        let budget = Self::of(wanted, current);
        if budget.connections < wanted {
            tracing::warn!(
                wanted,
                connections = budget.connections,
                descriptors = current,
                "the limit of open files allows fewer connections than --max-connections; raise it \
                 (LimitNOFILE=)"
            );
        }
        budget
    }

    fn of(wanted: usize, descriptors: u64) -> Self {
        let others = OTHERS.min(descriptors / 2);
        let available = usize::try_from(descriptors - others).unwrap_or(usize::MAX);
        let reserve = (available / 8).clamp(1, MAX_RESERVE);
        Self { connections: wanted.min(available.saturating_sub(reserve)).max(1), reserve }
    }
}

/// A reserved descriptor, with which a newcomer can be turned away when no other is left.
#[derive(Debug)]
pub(super) struct ReservedDescriptor(Option<File>);

impl ReservedDescriptor {
    pub(super) fn new() -> Self {
        Self(File::open("/dev/null").ok())
    }

    /// Handles an error of `accept`, and pauses if the system's resources are exhausted.
    pub(super) async fn after(&mut self, error: &io::Error, listener: &TcpListener) {
        let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
        let is_exhausted = Errno::from_io_error(error).is_some_and(|errno| exhausted.contains(&errno));
        if !is_exhausted {
            // The peer disconnected before it was accepted.
            tracing::debug!(%error, "cannot accept a connection");
            return;
        }
        tracing::warn!(%error, "cannot accept more connections; trying again shortly");
        self.0 = None;
        // The freed descriptor accepts and closes one connection, so that the peer is refused at once.
        drop(timeout(ACCEPT_PAUSE, listener.accept()).await);
        self.0 = File::open("/dev/null").ok();
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_as_many_as_wanted_or_as_descriptors_allow() {
        assert_eq!(Budget::of(1024, 1 << 20), Budget { connections: 1024, reserve: 64 });
        assert_eq!(Budget::of(1024, 64), Budget { connections: 28, reserve: 4 });
        assert_eq!(Budget::of(1024, 4), Budget { connections: 1, reserve: 1 });
    }
}
