//! The adapters as reported to the endpoint picker, which chooses the host of a request.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use control_protocol::fleet::{ReportedAdapter, Tagged, beginning_of};
use types::AdapterId;

use super::{entry::AdapterEntry, registry::Registry, table::AdapterNames};
use crate::lock::lock;

/// Maximum age of a listing.
const LOOK: Duration = Duration::from_secs(1);

/// Listing shared by all callers, because thousands of adapters do not change ten times a second.
#[derive(Debug, Default)]
pub(crate) struct AdapterListing(Mutex<Option<Arc<ListedAdapters>>>);

#[derive(Debug)]
pub(crate) struct ListedAdapters {
    table: Arc<AdapterNames>,
    at: Instant,
    /// Adapters that answer requests.
    pub(crate) registered: Tagged<Vec<ReportedAdapter>>,
    /// Names by which each adapter id is registered.
    names: HashMap<AdapterId, Vec<String>>,
}

impl AdapterListing {
    pub(crate) fn now(&self, registry: &Registry) -> Arc<ListedAdapters> {
        let mut listed = lock(&self.0);
        let table = registry.entries();
        let is_true = |old: &&Arc<ListedAdapters>| Arc::ptr_eq(&old.table, &table) && old.at.elapsed() < LOOK;
        if let Some(old) = listed.as_ref().filter(is_true) {
            return Arc::clone(old);
        }
        let now = Arc::new(ListedAdapters::of(table));
        *listed = Some(Arc::clone(&now));
        now
    }
}

impl ListedAdapters {
    fn of(table: Arc<AdapterNames>) -> Self {
        let registered = table.values().filter(|entry| answers(entry)).map(|entry| adapter(entry)).collect();
        let mut names: HashMap<_, Vec<_>> = HashMap::with_capacity(table.len());
        for (name, entry) in table.iter() {
            names.entry(entry.id()).or_default().push(name.clone());
        }
        Self { registered: Tagged::of(registered, None), names, at: Instant::now(), table }
    }

    /// Returns the sorted names of the adapters with `ids`.
    pub(crate) fn resident(&self, ids: &[AdapterId]) -> Vec<String> {
        let mut names: Vec<_> = ids.iter().filter_map(|id| self.names.get(id)).flatten().cloned().collect();
        names.sort_unstable();
        names
    }
}

fn answers(entry: &AdapterEntry) -> bool {
    entry.record.draft_layers == 0 && entry.fault().is_none()
}

fn adapter(entry: &AdapterEntry) -> ReportedAdapter {
    ReportedAdapter {
        name: entry.record.name.clone(),
        rank: entry.record.rank.into(),
        bytes: entry.record.bytes,
        generation: beginning_of(&entry.record.generation.to_string()).unwrap_or_default(),
    }
}
