//! Changes of the registry: load and replace. A change is answered when it is on disk, unless the adapter is
//! ephemeral, and runs to its end even if its caller goes away (`detached_task`).

use std::{
    path::Path,
    sync::{Arc, PoisonError},
    time::Duration,
};

use shmproto::message::AdapterLoaded;
use text::adapter_text::AdapterText;
use types::{AdapterId, AdapterVersion, TenantId};

use super::{
    base::{Base, ComparedText},
    database::{DatabaseError, Labels, OwnTemplate, Record},
    detached_task::run_detached,
    entry::AdapterEntry,
    errors::AdapterError,
    jail::AdapterLocation,
    names::{check_chosen_name, check_name},
    on_demand::LoadFiles,
    publication::Publication,
    registry::Registry,
    request::{LoadRequest, Replace, Terms, check_replace},
    store::{CacheHold, Durability, Incoming},
    table::AdapterNames,
    tenant_quota::LoadOrigin,
};
use crate::{
    clock::{now_us, seconds_since_1970},
    lock::lock,
    text::Text,
    thread,
};

/// Time after which this gateway knows the change of another gateway that caused a conflict.
pub(super) const AFTER_CONFLICT: Duration = Duration::from_secs(2);

impl Registry {
    /// Loads an adapter from inside the adapter root.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub async fn load(
        self: &Arc<Self>,
        request: LoadRequest,
        base: Base<'_>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let slot = self.begin_load()?;
        self.check_load(&request, base.name)?;
        let place = AdapterLocation::inside(&self.root, &request.path)?;
        self.load_from(place, request, base, LoadOrigin::Administrator, slot).await
    }

    /// Loads an adapter that the operator named at start, from any path, in place of one with that name.
    ///
    /// # Errors
    /// See [`AdapterError`].
    pub async fn load_trusted(
        self: &Arc<Self>,
        name: &str,
        path: &Path,
        base: Base<'_>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        check_chosen_name(name, base.name)?;
        let place = AdapterLocation::anywhere(path)?;
        let (name, path) = (name.to_owned(), path.to_owned());
        let request = LoadRequest { name, path, replace: Replace::Always, tenant: None, pinned: None };
        match self.load_from(place, request.clone(), base, LoadOrigin::Administrator, ()).await {
            // The gateways of a fleet start at once with the same adapters, so one retry follows.
            Err(AdapterError::Database(DatabaseError::Conflict(_))) => {
                tokio::time::sleep(AFTER_CONFLICT).await;
                let place = AdapterLocation::anywhere(&request.path)?;
                self.load_from(place, request, base, LoadOrigin::Administrator, ()).await
            }
            done => done,
        }
    }

    /// Loads an adapter that was made for a tenant, from any path, within the tenant's limits.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub async fn load_made(
        self: &Arc<Self>,
        request: LoadRequest,
        base: Base<'_>,
        terms: Terms,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        check_name(&request.name, base.name)?;
        let place = AdapterLocation::anywhere(&request.path)?.displayed_as(Path::new(&request.name));
        self.load_from(place, request, base, LoadOrigin::Tenant(terms), ()).await
    }

    /// Loads an adapter from `place`. `held` is dropped when the load has ended.
    pub(super) async fn load_from(
        self: &Arc<Self>,
        place: AdapterLocation,
        request: LoadRequest,
        base: Base<'_>,
        by: LoadOrigin,
        held: impl Send + 'static,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let (registry, text) = (Arc::clone(self), base.text.cloned());
        let load = async move {
            let _held = held;
            registry.copy_and_load(place, request, text, by).await
        };
        run_detached(load).await
    }

    async fn copy_and_load(
        self: &Arc<Self>,
        place: AdapterLocation,
        request: LoadRequest,
        base: Option<Arc<dyn Text>>,
        by: LoadOrigin,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let tenant = self.owner_of(&request);
        let (incoming, text) = self.copy(place, tenant.clone(), base).await?;
        self.replace(request, tenant, incoming, text, by).await
    }

    /// Loads and registers an adapter of `tenant` from files that have no name yet, under the request's name.
    pub(super) async fn replace(
        self: &Arc<Self>,
        request: LoadRequest,
        tenant: Option<String>,
        incoming: Incoming,
        text: ComparedText,
        by: LoadOrigin,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let changing = self.changing.lock().await;
        let table = self.entries();
        let old = table.get(&request.name).cloned();
        check_replace(&request, old.as_deref())?;
        if old.as_ref().is_some_and(|old| old.record.tenant != tenant) {
            return Err(AdapterError::OtherTenant(request.name));
        }
        if incoming.durability() == Durability::Ephemeral && old.as_ref().is_some_and(|old| old.is_durable())
        {
            return Err(AdapterError::DurableName(request.name));
        }
        if old.is_none() && table.len() >= self.max_adapters {
            return Err(AdapterError::Full(self.max_adapters));
        }
        let terms = match by {
            LoadOrigin::Administrator => Terms::default(),
            LoadOrigin::Tenant(terms) => {
                let bytes = incoming.bytes.saturating_add(text.template_bytes());
                self.share.check(&table, tenant.as_deref(), &request.name, bytes)?;
                terms
            }
        };
        if let Some(same) = self.already(&request, old.as_ref(), &incoming, &text).await? {
            same.set_warnings(text.warnings);
            return Ok(same);
        }
        let content = incoming.content;
        let entry = match self.admit(&request, tenant, incoming, text, old.as_deref(), &terms).await {
            Ok(entry) => entry,
            Err(error) => {
                self.discard(content, &error);
                return Err(error);
            }
        };
        if let Some(old) = old {
            let registry = Arc::clone(self);
            tokio::spawn(async move { registry.retire(&old).await });
        }
        drop(changing);
        self.trim().await;
        failpoint::pass("gateway.after_commit_before_answer");
        Ok(entry)
    }

    /// Returns the owner of the adapter to load: the named one, or that of the adapter to replace.
    pub(super) fn owner_of(&self, request: &LoadRequest) -> Option<String> {
        request.tenant.clone().or_else(|| self.entries().get(&request.name)?.record.tenant.clone())
    }

    /// Copies an adapter into the store, still without a name, and compares its text files with the base's.
    async fn copy(
        &self,
        place: AdapterLocation,
        tenant: Option<String>,
        base: Option<Arc<dyn Text>>,
    ) -> Result<(Incoming, ComparedText), AdapterError> {
        // The semaphore is never closed.
        let turn = Arc::clone(&self.copies).acquire_owned().await;
        let store = self.store.clone();
        let copied = thread::run("adapter-copy", move || {
            let _turn = turn;
            let incoming = store.copy(&place, TenantId::of(tenant.as_deref()))?;
            let beside = AdapterText::read(|name, limit| place.beside(name, limit))?;
            Ok((incoming, ComparedText::of(&beside, base.as_deref())?))
        });
        copied.await?
    }

    /// Returns the existing entry if the request asks for exactly that. The adapter is made resident, and
    /// nothing is written. A fleet's registry is asked first, because another gateway may have just changed
    /// the entry.
    async fn already(
        &self,
        request: &LoadRequest,
        old: Option<&Arc<AdapterEntry>>,
        incoming: &Incoming,
        text: &ComparedText,
    ) -> Result<Option<Arc<AdapterEntry>>, AdapterError> {
        let same = |old: &&Arc<AdapterEntry>| {
            let pinned = request.pinned.is_none_or(|pinned| pinned == old.is_pinned());
            let same_files = old.record.content == incoming.content && text.is_of(&old.record);
            same_files && pinned && old.fault().is_none()
        };
        let Some(old) = old.filter(same) else {
            return Ok(None);
        };
        self.records.confirm(old).await?;
        let _held = if self.store.has(incoming.content) {
            self.store.fetch(incoming.content, TenantId::of(old.record.tenant.as_deref())).await?
        } else {
            self.store.install(incoming)?
        };
        if !self.in_use().into_iter().any(|home| home.holds(old.id())) {
            let home = self.least_loaded();
            let _moving = home.moving.lock().await;
            self.make_resident(home, old).await?;
        }
        Ok(Some(Arc::clone(old)))
    }

    /// Stores, loads and registers an adapter. After an error, only the store may have changed.
    async fn admit(
        &self,
        request: &LoadRequest,
        tenant: Option<String>,
        incoming: Incoming,
        text: ComparedText,
        old: Option<&AdapterEntry>,
        terms: &Terms,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let (content, durability) = (incoming.content, incoming.durability());
        let _held = self.install(incoming).await?;
        let home = self.least_loaded();
        // `moving` is held until the adapter is registered; otherwise `restore` would free it.
        let moving = home.moving.lock().await;
        let files = LoadFiles {
            content,
            display_path: self.display_source(&request.name, &request.path),
            weight: 1.0,
        };
        let loaded = self.load_files(home, &[files], tenant.as_deref()).await?;
        failpoint::pass("gateway.loaded_before_commit");
        // No request uses a draft adapter, so only its pin keeps it in the executors.
        let is_draft = loaded.draft_layers > 0;
        let pinned = request.pinned.unwrap_or_else(|| is_draft || old.is_some_and(AdapterEntry::is_pinned));
        let (generation, template) = OwnTemplate::over(AdapterVersion(loaded.generation), text.template);
        let record = Record {
            name: request.name.clone(),
            tenant,
            content,
            generation,
            template,
            rank: loaded.rank,
            bytes: loaded.bytes,
            modules: loaded.modules,
            draft_layers: loaded.draft_layers,
            labels: Labels(loaded.labels.clone().into()),
            source: request.path.clone(),
            loaded_at: seconds_since_1970(),
            last_used_us: now_us(),
            pinned,
            version: 0,
            made_by: terms.made_by.clone(),
            expires_at: terms.expires_at,
        };
        let warnings = [text.warnings, loaded.warnings.clone()].concat();
        let entry = (record, durability, warnings);
        let registered = self.register(entry, &loaded, old, terms.publication.as_ref()).await;
        if registered.is_err() {
            self.free(home, AdapterId(loaded.adapter)).await;
        }
        drop(moving);
        if registered.as_ref().is_ok_and(|entry| entry.is_durable())
            && let Err(error) = self.store.assure(content).await
        {
            tracing::warn!(name = %request.name, %error, "cannot check whether other hosts can fetch an \
                adapter");
        }
        if let Some(entry) = registered.as_ref().ok().filter(|entry| entry.is_pinned()) {
            self.load_everywhere(entry).await;
        }
        registered
    }

    /// Stores the files under their content id, for all hosts that may serve the adapter.
    async fn install(&self, incoming: Incoming) -> Result<CacheHold, AdapterError> {
        if incoming.durability() == Durability::Ephemeral {
            return Ok(self.store.install(&incoming)?);
        }
        let (store, content) = (self.store.clone(), incoming.content);
        let held = thread::run("adapter-install", move || store.install(&incoming)).await??;
        self.store.publish(content).await?;
        Ok(held)
    }

    async fn register(
        &self,
        (mut record, durability, warnings): (Record, Durability, Vec<String>),
        loaded: &AdapterLoaded,
        old: Option<&AdapterEntry>,
        of: Option<&Publication>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        if loaded.modules == 0 {
            return Err(AdapterError::NoModules(record.source.display().to_string()));
        }
        if record.pinned {
            self.check_pins(&record.name, AdapterId(loaded.adapter), loaded.bytes)?;
        }
        failpoint::pass("gateway.before_commit");
        if durability == Durability::Durable {
            let old = old.filter(|old| old.is_durable());
            record.version = self.records.put(&record, old, of).await?;
        }
        let entry = self.insert_entry(Arc::new(AdapterEntry::new(record).with_durability(durability)));
        entry.set_warnings(warnings);
        tracing::info!(name = %entry.record.name, generation = %entry.record.generation, "adapter loaded");
        self.after_commit().await;
        Ok(entry)
    }

    pub(super) fn entry(&self, name: &str) -> Result<Arc<AdapterEntry>, AdapterError> {
        self.entries().get(name).cloned().ok_or_else(|| AdapterError::NotFound(name.to_owned()))
    }

    /// Inserts an entry into the table, unless replication has already inserted the same or a later version.
    fn insert_entry(&self, entry: Arc<AdapterEntry>) -> Arc<AdapterEntry> {
        let mut entered = Arc::clone(&entry);
        self.change_table(|table| match table.get(&entry.record.name) {
            Some(there) if there.version() > 0 && there.version() >= entry.version() => {
                entered = Arc::clone(there);
                None
            }
            _ => table.insert(entry),
        });
        entered
    }

    /// Publishes a changed table. An entry that was removed from the table moves to `draining`.
    pub(super) fn change_table(&self, change: impl FnOnce(&mut AdapterNames) -> Option<Arc<AdapterEntry>>) {
        let _editing = lock(&self.editing);
        let mut table = AdapterNames::clone(&self.entries());
        // The entry enters `draining` before it leaves the table, so readers always find it.
        let old = change(&mut table);
        lock(&self.draining).extend(old);
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
    }
}
