//! What is told of adapters to whoever chooses among hosts.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use control_protocol::fleet::{ReportedAdapter, Tagged, beginning_of};
use types::AdapterId;

use super::{entry::AdapterEntry, registry::Registry, table::AdapterNames};
use crate::lock::lock;

/// After so long it is looked again which adapters can be used.
const LOOK: Duration = Duration::from_secs(1);

/// Which adapters there are, put together once for all who ask: thousands of them do not change ten times a second.
#[derive(Debug, Default)]
pub struct AdapterListing(Mutex<Option<Arc<ListedAdapters>>>);

/// All adapters at one moment.
#[derive(Debug)]
pub struct ListedAdapters {
    table: Arc<AdapterNames>,
    at: Instant,
    /// Those that answer.
    pub(crate) registered: Tagged<Vec<ReportedAdapter>>,
    /// What is in an executor, by the names it has.
    names: HashMap<AdapterId, Vec<String>>,
}

impl AdapterListing {
    /// What is true now.
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

    /// Names of what is in an executor, in their order.
    pub(crate) fn resident(&self, ids: &[AdapterId]) -> Vec<String> {
        let mut names: Vec<_> = ids.iter().filter_map(|id| self.names.get(id)).flatten().cloned().collect();
        names.sort_unstable();
        names
    }
}

/// Whether it answers requests.
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
