//! The hosts there are, what each said last, and which of them a request goes to.
//!
//! - here: hosts that come and go, and whose word is old; [`host`]: one of them.
//! - [`choice`]: candidates for [`scheduling::routing`], and the endpoints that come of it.
//!
//! A host is a gateway with its executors. Whoever was not heard of lately is no candidate, and nothing outlives the process:
//! a second picker that asks the same hosts decides alike.

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

/// Most blocks of prompts that are remembered, of all hosts together.
const MAX_BLOCKS: usize = 1 << 20;

/// How hosts are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PickRules {
    /// Among candidates.
    pub policy: RoutingPolicy,
    /// What every request is promised.
    pub slo: Slo,
    /// A host that was not heard of for so long is none.
    pub stale: Duration,
    /// Endpoints beside the first, for when that one fails.
    pub fallbacks: usize,
}

/// All hosts.
#[derive(Debug)]
pub struct HostFleet {
    rules: PickRules,
    /// Keys that nobody outside can foresee.
    hasher: RandomState,
    table: Mutex<HostTable>,
}

/// What is known of them.
#[derive(Debug)]
struct HostTable {
    hosts: BTreeMap<SocketAddr, Host>,
    /// The number of the next host: none is used again.
    next: usize,
    prefixes: Prefixes,
    /// How often somebody was chosen.
    decisions: u64,
}

/// How many hosts there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostCount {
    /// All that are asked.
    pub known: usize,
    /// Of them, those that take requests, as they said lately.
    pub ready: usize,
}

impl HostFleet {
    /// No hosts yet.
    #[must_use]
    pub fn new(rules: PickRules) -> Self {
        let prefixes = Prefixes::new(MAX_BLOCKS);
        let table = HostTable { hosts: BTreeMap::new(), next: 0, prefixes, decisions: 0 };
        Self { rules, hasher: RandomState::new(), table: Mutex::new(table) }
    }

    /// From now on these are the hosts. What is known of those that stay is kept.
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

    /// The tags of what is known of a host.
    #[must_use]
    pub fn have(&self, address: SocketAddr) -> KnownTags {
        self.table().hosts.get(&address).map_or_else(KnownTags::default, Host::have)
    }

    /// A host said this when it was asked, then.
    ///
    /// # Errors
    /// If it leaves out what nobody here has: what was known of it is forgotten, and it can be asked anew.
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

    /// A host does not answer.
    pub fn lost(&self, address: SocketAddr) {
        if let Some(host) = self.table().hosts.get_mut(&address) {
            host.forget();
        }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self, now: Instant) -> HostCount {
        let table = self.table();
        let ready = table.hosts.values().filter(|host| host.is_ready(now, self.rules.stale));
        HostCount { known: table.hosts.len(), ready: ready.count() }
    }

    /// How long ago each host was heard of; `None` if it does not answer.
    #[must_use]
    pub fn ages(&self, now: Instant) -> Vec<(SocketAddr, Option<Duration>)> {
        let table = self.table();
        table.hosts.iter().map(|(address, host)| (*address, host.age(now))).collect()
    }

    fn table(&self) -> MutexGuard<'_, HostTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostTable {
    /// The adapters of this tag, if one of the hosts knows them: hosts that know the same share them.
    fn find(&self, tag: u64) -> Option<Arc<RegisteredAdapters>> {
        self.hosts.values().find_map(|host| host.registered(tag))
    }
}
