//! Base layers rented to split clients: who uses them, and how much.
//!
//! Figures are by tenant, for those who own the base to see who uses it; `--max-adapter-labels` bounds them like
//! adapters' figures, and the tenants beyond it share `other`.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use shmproto::{
    layer::control::SessionStats,
    message::{LayerStats, TenantUse},
};

use super::{
    executor::{float, grown},
    labels::OTHER,
    store::{Number, Store},
    table::Id,
};
use crate::layers::CLASSES;

/// The figures that have no labels, and which tenants have labels.
#[derive(Debug)]
pub(super) struct LayerFigures {
    /// Most tenants with a label.
    cap: usize,
    tenants: Mutex<BTreeSet<String>>,
    open: Arc<Number>,
    refused: Arc<Number>,
    broken: Arc<Number>,
    batches: Arc<Number>,
    joined_rows: Arc<Number>,
}

impl LayerFigures {
    pub(super) fn new(store: &Store, cap: usize) -> Self {
        let number = |id| store.number(id, &[]);
        Self {
            cap,
            tenants: Mutex::default(),
            open: number(Id::LayerSessions),
            refused: number(Id::LayerSessionsRefused),
            broken: number(Id::LayerSessionsBroken),
            batches: number(Id::LayerBatches),
            joined_rows: number(Id::LayerJoinedRows),
        }
    }

    /// Takes over what was reported since `before`.
    pub(super) fn report(&self, store: &Store, now: &LayerStats, before: Option<&LayerStats>) {
        self.open.set(f64::from(now.open));
        for (counter, figure) in [
            (&self.refused, (|stats| stats.refused) as fn(&LayerStats) -> u64),
            (&self.broken, |stats| stats.broken),
            (&self.batches, |stats| stats.batches),
            (&self.joined_rows, |stats| stats.joined_rows),
        ] {
            counter.add(float(grown(figure(now), before.map(figure))));
        }
        store.retain(Id::LayerWaitingRows, |_| false);
        for tenant in &now.tenants {
            let old = before.and_then(|before| before.tenants.iter().find(|old| old.tenant == tenant.tenant));
            self.count_tenant(store, tenant, old.map(|old| &old.used));
        }
    }

    fn count_tenant(&self, store: &Store, of: &TenantUse, old: Option<&SessionStats>) {
        let (tenant, now) = (self.label(&of.tenant), &of.used);
        let add = |id, labels: &[&str], figure: fn(&SessionStats) -> u64, unit: f64| {
            let grown = float(grown(figure(now), old.map(figure)));
            store.number(id, labels).add(grown * unit);
        };
        add(Id::LayerCalls, &[tenant, "done"], |used| used.calls, 1.0);
        add(Id::LayerCalls, &[tenant, "refused"], |used| used.refused, 1.0);
        add(Id::LayerBytes, &[tenant, "in"], |used| used.bytes_in, 1.0);
        add(Id::LayerBytes, &[tenant, "out"], |used| used.bytes_out, 1.0);
        add(Id::LayerWait, &[tenant], |used| used.wait_us, 1e-6);
        add(Id::LayerCompute, &[tenant], |used| used.compute_us, 1e-6);
        for (class, name) in CLASSES.iter().enumerate() {
            let grown = grown(now.rows[class], old.map(|old| old.rows[class]));
            if grown > 0 {
                store.number(Id::LayerRows, &[tenant, name]).add(float(grown));
            }
        }
        store.number(Id::LayerWaitingRows, &[tenant]).add(f64::from(of.waiting_rows));
    }

    /// Nobody rents anything of an executor that is not there.
    pub(super) fn lost(&self, store: &Store) {
        self.open.set(0.0);
        store.retain(Id::LayerWaitingRows, |_| false);
    }

    /// The tenant's own label while there are labels.
    fn label<'a>(&self, tenant: &'a str) -> &'a str {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if tenants.contains(tenant) {
            return tenant;
        }
        if tenant == OTHER || tenants.len() >= self.cap {
            return OTHER;
        }
        tenants.insert(tenant.to_owned());
        tenant
    }
}
