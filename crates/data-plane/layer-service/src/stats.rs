//! Stats of the layer service for its operator.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use shmproto::{
    layer::control::SessionStats,
    message::{LayerRoute, LayerSession, LayerStats, MAX_LAYER_SESSIONS, MAX_LAYER_TENANTS, TenantUse},
};

use super::{
    SessionTransport, Tenant,
    session::{SessionCounters, SessionInfo},
};

/// A monotonic counter, independent of others, so relaxed ordering suffices.
#[derive(Debug, Default)]
pub(super) struct EventCount(AtomicU64);

impl EventCount {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct ServiceCounts {
    /// Clients that did not get a session.
    pub(super) refused: EventCount,
    /// Clients that were disconnected because they broke the protocol or took no answers.
    pub(super) broken: EventCount,
    /// Batches with calls of clients alone.
    pub(super) batches: EventCount,
    /// Rows that joined a resident pass.
    pub(super) joined_rows: EventCount,
}

/// Usage of closed sessions, by tenant. Keys name the tenants, so their number is limited.
#[derive(Debug, Default)]
pub(super) struct ClosedSessions(BTreeMap<Tenant, SessionStats>);

impl ClosedSessions {
    pub(super) fn add(&mut self, info: &SessionInfo, account: &SessionCounters) {
        add_stats(self.0.entry(info.tenant.clone()).or_default(), &account.stats());
    }
}

impl ServiceCounts {
    /// Returns all stats: of closed sessions, and of the `open` ones.
    pub(super) fn report<'a>(
        &self,
        past: &ClosedSessions,
        open: impl Iterator<Item = (&'a SessionInfo, &'a SessionCounters)>,
    ) -> LayerStats {
        let mut sessions: Vec<_> = open.map(|(info, account)| session(info, account)).collect();
        let open = u32::try_from(sessions.len()).unwrap_or(u32::MAX);
        let (used, tenants) = by_tenant(past, &sessions);
        sessions.sort_by_key(|session| Reverse(session.used.calls));
        sessions.truncate(MAX_LAYER_SESSIONS);
        let Self { refused, broken, batches, joined_rows } = self;
        LayerStats {
            open,
            refused: refused.get(),
            broken: broken.get(),
            batches: batches.get(),
            joined_rows: joined_rows.get(),
            used,
            tenants,
            sessions,
        }
    }
}

/// Returns the usage of all tenants together, and of each tenant.
fn by_tenant(past: &ClosedSessions, sessions: &[LayerSession]) -> (SessionStats, Vec<TenantUse>) {
    let mut tenants: BTreeMap<String, TenantUse> = BTreeMap::new();
    let mut add = |tenant: String, used: &SessionStats, waiting_rows: u32| {
        let fresh = || TenantUse { tenant: tenant.clone(), used: SessionStats::default(), waiting_rows: 0 };
        let entry = tenants.entry(tenant.clone()).or_insert_with(fresh);
        add_stats(&mut entry.used, used);
        entry.waiting_rows = entry.waiting_rows.saturating_add(waiting_rows);
    };
    past.0.iter().for_each(|(tenant, used)| add(tenant.to_string(), used, 0));
    sessions.iter().for_each(|session| add(session.tenant.clone(), &session.used, session.waiting_rows));
    let mut all = SessionStats::default();
    tenants.values().for_each(|tenant| add_stats(&mut all, &tenant.used));
    let mut tenants: Vec<_> = tenants.into_values().collect();
    tenants.sort_by_key(|tenant| Reverse(tenant.used.calls));
    tenants.truncate(MAX_LAYER_TENANTS);
    (all, tenants)
}

fn session(info: &SessionInfo, account: &SessionCounters) -> LayerSession {
    LayerSession {
        session: info.number.0,
        tenant: info.tenant.to_string(),
        name: info.name.clone(),
        masking: info.masking.clone(),
        route: match info.transport {
            SessionTransport::Channel => LayerRoute::SharedMemory,
            SessionTransport::Ipc => LayerRoute::Ipc,
            SessionTransport::Tls => LayerRoute::Tls,
        },
        used: account.stats(),
        waiting_rows: u32::try_from(account.waiting_rows()).unwrap_or(u32::MAX),
        slab_bytes: account.slab_bytes(),
    }
}

fn add_stats(to: &mut SessionStats, more: &SessionStats) {
    to.calls += more.calls;
    to.refused += more.refused;
    to.rows.iter_mut().zip(more.rows).for_each(|(to, more)| *to += more);
    to.bytes_in += more.bytes_in;
    to.bytes_out += more.bytes_out;
    to.wait_us += more.wait_us;
    to.compute_us += more.compute_us;
    to.batch_rows += more.batch_rows;
}
