//! The names of adapters, and who sees them.
//!
//! A name is looked up only among the caller's own adapters and those without a tenant. So the duration of a
//! lookup cannot reveal whether another tenant has an adapter of that name.

use std::{collections::BTreeMap, ops::Deref, sync::Arc};

use super::{
    entry::AdapterEntry,
    uri::{AdapterUri, is_uri},
};
use crate::caller::{Caller, KeyRole};

type AdaptersByName = BTreeMap<String, Arc<AdapterEntry>>;

/// The table dereferences to a map of all adapters; [`AdapterNames::find`] searches the caller's part.
#[derive(Debug, Clone, Default)]
pub struct AdapterNames {
    all: AdaptersByName,
    /// Adapters without a tenant.
    everybodys: AdaptersByName,
    /// Adapters with a tenant, by tenant; no map is empty.
    tenants: BTreeMap<String, AdaptersByName>,
}

impl AdapterNames {
    /// Returns the adapter `name`, if `caller` may know that it exists. The name may be any text of a URI.
    #[must_use]
    pub fn find(&self, name: &str, caller: &Caller) -> Option<&Arc<AdapterEntry>> {
        self.find_exactly(name, caller).or_else(|| self.find_uri(name, caller))
    }

    /// Returns the adapter that was loaded by the URI `text`: the caller's own, or one of all tenants.
    fn find_uri(&self, text: &str, caller: &Caller) -> Option<&Arc<AdapterEntry>> {
        if !is_uri(text) {
            return None;
        }
        let uri: AdapterUri = text.parse().ok()?;
        let own = self.find_exactly(&uri.name_for(Some(&caller.tenant)), caller);
        own.or_else(|| self.find_exactly(&uri.name_for(None), caller))
    }

    fn find_exactly(&self, name: &str, caller: &Caller) -> Option<&Arc<AdapterEntry>> {
        if caller.role == KeyRole::Admin {
            return self.all.get(name);
        }
        let own = self.tenants.get(&*caller.tenant).and_then(|own| own.get(name));
        own.or_else(|| self.everybodys.get(name))
    }

    /// Adds an entry under its name, and returns the previous entry with that name.
    pub(super) fn insert(&mut self, entry: Arc<AdapterEntry>) -> Option<Arc<AdapterEntry>> {
        let name = entry.record.name.clone();
        let old = self.remove(&name);
        let part = match &entry.record.tenant {
            Some(tenant) => self.tenants.entry(tenant.clone()).or_default(),
            None => &mut self.everybodys,
        };
        part.insert(name.clone(), Arc::clone(&entry));
        self.all.insert(name, entry);
        old
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Arc<AdapterEntry>> {
        let old = self.all.remove(name)?;
        match &old.record.tenant {
            None => drop(self.everybodys.remove(name)),
            Some(tenant) => {
                let own = self.tenants.get_mut(tenant);
                if own.is_some_and(|own| own.remove(name).is_some() && own.is_empty()) {
                    self.tenants.remove(tenant);
                }
            }
        }
        Some(old)
    }
}

impl Deref for AdapterNames {
    type Target = BTreeMap<String, Arc<AdapterEntry>>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl FromIterator<Arc<AdapterEntry>> for AdapterNames {
    fn from_iter<I: IntoIterator<Item = Arc<AdapterEntry>>>(entries: I) -> Self {
        let mut table = Self::default();
        for entry in entries {
            table.insert(entry);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use types::AdapterVersion;

    use super::*;
    use crate::{
        adapters::{Labels, Record, store::ContentId},
        caller::RequestPriority,
        limits::KeyLimit,
    };

    fn entry(name: &str, tenant: Option<&str>) -> Arc<AdapterEntry> {
        Arc::new(AdapterEntry::new(Record {
            name: name.to_owned(),
            tenant: tenant.map(str::to_owned),
            content: ContentId([0; 32]),
            generation: AdapterVersion([0; 32]),
            template: None,
            rank: 1,
            bytes: 1,
            modules: 1,
            draft_layers: 0,
            labels: Labels::default(),
            source: "adapter".into(),
            loaded_at: 0,
            last_used_us: 0,
            pinned: false,
            version: 0,
            made_by: None,
            expires_at: None,
        }))
    }

    fn caller(tenant: &str, role: KeyRole) -> Caller {
        Caller { tenant: tenant.into(), role, limit: KeyLimit::new(None), priority: RequestPriority::Online }
    }

    #[test]
    fn a_caller_finds_their_own_and_everybodys_and_an_administrator_finds_all() {
        let table: AdapterNames =
            [entry("a", Some("alice")), entry("b", Some("bob")), entry("e", None)].into_iter().collect();
        let found = |caller: &Caller| {
            let names = ["a", "b", "e", "nothing"].into_iter();
            names.filter(|name| table.find(name, caller).is_some()).collect::<String>()
        };
        assert_eq!(found(&caller("alice", KeyRole::User)), "ae");
        assert_eq!(found(&caller("bob", KeyRole::User)), "be");
        assert_eq!(found(&caller("carol", KeyRole::User)), "e");
        assert_eq!(found(&caller("ops", KeyRole::Admin)), "abe");
        for seen in ["alice", "bob", "carol"].map(|tenant| caller(tenant, KeyRole::User)) {
            for (name, entry) in table.iter() {
                assert_eq!(table.find(name, &seen).is_some(), entry.is_for(&seen), "the rule is one");
            }
        }
    }

    #[test]
    fn what_is_taken_out_or_replaced_is_found_by_nobody() {
        let mut table: AdapterNames = [entry("a", Some("alice")), entry("e", None)].into_iter().collect();
        let (first, second) = (Arc::clone(&table["a"]), entry("a", Some("alice")));
        let old = table.insert(Arc::clone(&second));
        assert!(old.is_some_and(|old| Arc::ptr_eq(&old, &first)));
        let alice = caller("alice", KeyRole::User);
        assert!(table.find("a", &alice).is_some_and(|now| Arc::ptr_eq(now, &second)));
        assert!(table.remove("a").is_some() && table.remove("e").is_some() && table.remove("a").is_none());
        assert!(table.find("a", &alice).is_none() && table.find("e", &alice).is_none());
        assert!(table.is_empty() && table.tenants.is_empty(), "no tenant is remembered");
    }
}
