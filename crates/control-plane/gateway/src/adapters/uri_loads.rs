//! Loads adapters by URI: under the URI as the name for a request, or under a chosen name.
//!
//! `quota` unloads adapters of a tenant for another one.
//!
//! # The life of a load by URI
//!
//! 1. The URI must be below an allowed prefix, and must not have failed recently.
//! 2. A slot of the tenant is taken. The source is opened: a revision of a hub becomes a commit.
//! 3. The files are copied to a directory for incoming files, hashed, and compared with the digest.
//! 4. The least recently used adapters of the tenant are unloaded until the quota suffices.
//! 5. The files are loaded as from any other path. The record has the pinned URI as its source.
//!
//! A crash before the end of step 5 leaves incoming files, which the next start removes.

mod quota;

use std::sync::Arc;

use super::{
    base::Base,
    entry::AdapterEntry,
    errors::{AdapterError, DatabaseError, FetchError, FetchRefusal},
    operations::AFTER_CONFLICT,
    registry::Registry,
    remote::{FetchKey, StagedAdapter, stats::SchemeStats},
    request::{LoadRequest, Replace},
    tenant_quota::LoadOrigin,
    uri::{AdapterUri, UriScheme},
};
use crate::{
    caller::{Caller, KeyRole},
    text::Text,
};

/// Owned parts of a [`Base`].
struct OwnedBase {
    name: String,
    text: Option<Arc<dyn Text>>,
}

impl Registry {
    /// Returns the counts of fetches by URI, by scheme.
    pub(crate) fn fetch_stats(&self) -> [SchemeStats; UriScheme::EACH.len()] {
        self.remote.stats()
    }

    /// Fetches and loads the adapter `uri` for `caller` under the URI as its name, unless it is loaded. All
    /// requests of a tenant that wait for the adapter share one load. The tenant owns the adapter; an
    /// administrator loads it for all tenants.
    ///
    /// # Errors
    /// See [`FetchError`]; all who wait get the same error.
    pub async fn load_named(
        self: &Arc<Self>,
        uri: AdapterUri,
        caller: &Caller,
        base: Base<'_>,
    ) -> Result<(), FetchRefusal> {
        if self.entries().find(&uri.to_string(), caller).is_some() {
            return Ok(());
        }
        let owner = (caller.role != KeyRole::Admin).then(|| caller.tenant.to_string());
        let key = FetchKey { owner, uri };
        self.remote.check(&key)?;
        let base = OwnedBase { name: base.name.to_owned(), text: base.text.cloned() };
        let work = || Arc::clone(self).load_unless_loaded(key.clone(), base);
        self.remote.loads.run(&key, work).await.unwrap_or_else(|| Err(key.stopped().into()))
    }

    async fn load_unless_loaded(self: Arc<Self>, key: FetchKey, base: OwnedBase) -> Result<(), FetchRefusal> {
        // An earlier load may have ended since this one was asked for.
        if self.entries().contains_key(&key.name()) {
            return Ok(());
        }
        let failures = &self.remote.failures;
        match failures.find(&key) {
            Some(failure) => Err(failure),
            None => self.fetch_and_load(&key, &base).await.map_err(|error| failures.remember(&key, error)),
        }
    }

    /// Fetches the adapter `uri` and loads it as `request` asks.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub(crate) async fn load_uri(
        self: &Arc<Self>,
        uri: AdapterUri,
        request: LoadRequest,
        base: Base<'_>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        self.check_load(&request, base.name)?;
        let key = FetchKey { owner: request.tenant.clone(), uri };
        self.remote.check(&key)?;
        let staged = self.remote.fetch(&key).await;
        let staged = staged.map_err(|error| self.remote.failures.remember(&key, error))?;
        let turn = self.begin_load()?;
        let request = LoadRequest { path: staged.pinned.to_string().into(), ..request };
        self.load_from(staged.place()?, request, base, LoadOrigin::Administrator, (staged, turn)).await
    }

    async fn fetch_and_load(self: &Arc<Self>, key: &FetchKey, base: &OwnedBase) -> Result<(), FetchError> {
        let staged = self.remote.fetch(key).await?;
        failpoint::pass("gateway.fetched_before_load");
        // Otherwise two loads of a tenant could exceed the quota together.
        let _installing = self.remote.installing.lock().await;
        self.apply_quota(key, staged.bytes).await?;
        let loaded = match self.load_staged(key, &staged, base).await {
            // Another gateway of the fleet loaded the adapter meanwhile, and this gateway will know soon.
            Err(AdapterError::Database(DatabaseError::Conflict(_))) => {
                tokio::time::sleep(AFTER_CONFLICT).await;
                self.load_staged(key, &staged, base).await?
            }
            loaded => loaded?,
        };
        // The adapter may have other bytes in memory than in its files.
        match self.apply_quota(key, loaded.record.tenant_bytes()).await {
            Err(FetchError::Quota { .. }) => Ok(()),
            applied => applied,
        }
    }

    async fn load_staged(
        self: &Arc<Self>,
        key: &FetchKey,
        staged: &Arc<StagedAdapter>,
        base: &OwnedBase,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let request = LoadRequest {
            name: key.name(),
            path: staged.pinned.to_string().into(),
            replace: Replace::Always,
            tenant: key.owner.clone(),
            pinned: None,
        };
        let base = Base { name: &base.name, text: base.text.as_ref() };
        // The limits of the tenant are those of `apply_quota`.
        let held = Arc::clone(staged);
        self.load_from(staged.place()?, request, base, LoadOrigin::Administrator, held).await
    }
}
