//! The hosts, their latest reports, and the choice of a host.
//!
//! - here: the table of hosts and their reports.
//! - [`host`]: the state of one host.
//! - [`choice`]: candidates for [`scheduling::routing`], and the chosen endpoints.
//!
//! A host is a gateway with its executors. A host with an old report is no candidate. No state outlives the
//! process, so a second picker for the same hosts decides alike.

pub mod choice;
pub mod host;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::RandomState,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use control_protocol::fleet::{GatewayReport, KnownTags};
use scheduling::routing::{RoutingPolicy, Slo, prefixes::Prefixes};

use self::host::{Host, MissingDelta, RegisteredAdapters};

/// Maximum number of remembered prompt blocks, over all hosts.
const MAX_BLOCKS: usize = 1 << 20;

/// Rules for the choice of hosts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PickRules {
    pub policy: RoutingPolicy,
    /// SLO targets of every request.
    pub slo: Slo,
    /// Age of a report after which its host is no candidate.
    pub stale: Duration,
    /// Number of endpoints after the first, for the case that it fails.
    pub fallbacks: usize,
}

#[derive(Debug)]
pub struct HostFleet {
    rules: PickRules,
    /// Hasher with a random key, so that clients cannot cause collisions.
    hasher: RandomState,
    table: Mutex<HostTable>,
}

#[derive(Debug)]
struct HostTable {
    hosts: BTreeMap<SocketAddr, Host>,
    /// Number of the next host; numbers are never reused.
    next: usize,
    prefixes: Prefixes,
    /// Number of choices so far, which seeds the routing policy.
    decisions: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct HostCount {
    pub known: usize,
    /// Number of hosts whose recent report says that they accept requests.
    pub ready: usize,
}

impl HostFleet {
    #[must_use]
    pub fn new(rules: PickRules) -> Self {
        let prefixes = Prefixes::new(MAX_BLOCKS);
        let table = HostTable { hosts: BTreeMap::new(), next: 0, prefixes, decisions: 0 };
        Self { rules, hasher: RandomState::new(), table: Mutex::new(table) }
    }

    /// Replaces the set of hosts. The state of hosts that stay is kept.
    pub fn set_hosts(&self, addresses: &BTreeSet<SocketAddr>) {
        let mut table = self.table();
        let HostTable { hosts, next, prefixes, .. } = &mut *table;
        hosts.retain(|address, host| {
            let stays = addresses.contains(address);
            if !stays {
                prefixes.forget(host.number);
            }
            stays
        });
        for address in addresses {
            hosts.entry(*address).or_insert_with(|| {
                *next += 1;
                Host::new(*next, *address)
            });
        }
    }

    /// Returns the tags of the adapter lists that are known of a host.
    #[must_use]
    pub(crate) fn have(&self, address: SocketAddr) -> KnownTags {
        self.table().hosts.get(&address).map_or_else(KnownTags::default, Host::have)
    }

    /// Stores the report that a host gave when it was asked at `asked_at`.
    ///
    /// # Errors
    /// If the report omits lists that are unknown here. The host's state is dropped, for a full report later.
    pub fn heard(
        &self,
        address: SocketAddr,
        asked_at: Instant,
        report: GatewayReport,
    ) -> Result<(), MissingDelta> {
        let mut table = self.table();
        let shared = table.find(report.registered.tag);
        let HostTable { hosts, prefixes, .. } = &mut *table;
        let Some(host) = hosts.get_mut(&address) else { return Ok(()) };
        if host.is_another(&report) {
            prefixes.forget(host.number);
        }
        host.hear(asked_at, report, shared, &self.hasher)
    }

    /// Drops the state of a host that does not answer.
    pub(crate) fn lost(&self, address: SocketAddr) {
        if let Some(host) = self.table().hosts.get_mut(&address) {
            host.forget();
        }
    }

    #[must_use]
    pub(crate) fn count(&self, now: Instant) -> HostCount {
        let table = self.table();
        let ready = table.hosts.values().filter(|host| host.is_ready(now, self.rules.stale));
        HostCount { known: table.hosts.len(), ready: ready.count() }
    }

    /// Returns the age of each host's report; `None` if the host does not answer.
    #[must_use]
    pub(crate) fn ages(&self, now: Instant) -> Vec<(SocketAddr, Option<Duration>)> {
        let table = self.table();
        table.hosts.iter().map(|(address, host)| (*address, host.age(now))).collect()
    }

    fn table(&self) -> MutexGuard<'_, HostTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostTable {
    /// Returns the adapters with this tag, if a host has them. Hosts with equal lists share them.
    fn find(&self, tag: u64) -> Option<Arc<RegisteredAdapters>> {
        self.hosts.values().find_map(|host| host.registered(tag))
    }
}
