//! Applies changes that other gateways of the fleet made: names appear, disappear or refer to other adapters,
//! as after a local change. Files are fetched when a request needs them, and at once for pinned adapters.

use std::{
    collections::HashSet,
    sync::{Arc, PoisonError},
};

use super::{
    database::Record,
    entry::AdapterEntry,
    records::{ReadScope, RegistryChanges, change_feed::ChangeSubscriber},
    registry::Registry,
    table::AdapterNames,
};
use crate::lock::lock;

/// A copy of the table to which changes are applied.
struct Merge {
    table: AdapterNames,
    /// Entries that left the table.
    gone: Vec<Arc<AdapterEntry>>,
    /// Entries to load into every executor.
    pinned: Vec<Arc<AdapterEntry>>,
}

impl Merge {
    /// Lets `name` refer to `record`, or removes the name if there is no record.
    fn set(&mut self, name: &str, record: Option<Record>) {
        let Some(record) = record else {
            if self.table.get(name).is_some_and(|old| old.is_durable()) {
                self.gone.extend(self.table.remove(name));
            }
            return;
        };
        let old = self.table.get(name);
        if old.is_some_and(|old| old.version() >= record.version) {
            return;
        }
        let entry = match old.filter(|old| old.is(&record)) {
            Some(old) => {
                old.set_pinned(record.pinned);
                old.set_expiry(record.expires_at);
                old.set_version(record.version);
                Arc::clone(old)
            }
            None => {
                let entry = Arc::new(AdapterEntry::new(record));
                self.gone.extend(self.table.insert(Arc::clone(&entry)));
                entry
            }
        };
        if entry.is_pinned() {
            self.pinned.push(entry);
        }
    }

    /// Removes all other names, except those of ephemeral adapters, which no registry has.
    fn keep_only(&mut self, names: &HashSet<String>) {
        let is_gone =
            |(name, entry): &(&String, &Arc<AdapterEntry>)| entry.is_durable() && !names.contains(*name);
        let others: Vec<_> = self.table.iter().filter(is_gone).map(|(name, _)| name.clone()).collect();
        self.gone.extend(others.iter().filter_map(|name| self.table.remove(name)));
    }
}

impl ChangeSubscriber for Registry {
    fn take_over(self: Arc<Self>, changes: RegistryChanges) -> bool {
        let editing = lock(&self.editing);
        if self.records.shared().is_some_and(|shared| changes.number < shared.own()) {
            return false;
        }
        if changes.records.is_empty() && changes.scope == ReadScope::Since {
            return true;
        }
        let mut merge =
            Merge { table: AdapterNames::clone(&self.entries()), gone: Vec::new(), pinned: Vec::new() };
        let names: HashSet<_> = changes.records.iter().map(|(name, _)| name.clone()).collect();
        for (name, record) in changes.records {
            merge.set(&name, record);
        }
        if changes.scope == ReadScope::Whole {
            merge.keep_only(&names);
        }
        lock(&self.draining).extend(merge.gone.iter().cloned());
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(merge.table);
        drop(editing);
        for entry in merge.gone {
            let registry = Arc::clone(&self);
            tokio::spawn(async move { registry.retire(&entry).await });
        }
        for entry in merge.pinned {
            let registry = Arc::clone(&self);
            tokio::spawn(async move { registry.load_everywhere(&entry).await });
        }
        true
    }
}
