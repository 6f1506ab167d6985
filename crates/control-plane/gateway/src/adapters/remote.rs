//! Fetches the files of adapters by URI from a hub, a bucket or the adapter root.
//!
//! - `source`: the places of adapters, of which `hub` is one; `byte_stream` has the bytes of a file.
//! - `stage`: copies and hashes the files.
//! - `single_flight`: lets all who wait share one fetch; `recent_failures` remembers failures.
//! - [`stats`]: the counters.

mod byte_stream;
mod hub;
mod recent_failures;
mod single_flight;
mod source;
mod stage;
pub mod stats;

use std::{fmt, path::Path, sync::Arc, time::Duration};

use model_files::hub_access::HubAccess;

pub(super) use self::stage::StagedAdapter;
use self::{
    recent_failures::RecentFailures,
    single_flight::SingleFlight,
    source::AdapterSource,
    stats::{FetchCounters, FetchOutcome, SchemeStats},
};
use super::{
    errors::{FetchError, FetchRefusal},
    store::AdapterStore,
    uri::{AdapterUri, UriScheme, allow_list::AllowList},
};
use crate::tenant_slots::{TenantSlot, TenantSlots};

/// Maximum number of fetches at once, of all tenants.
const MAX_FETCHES: usize = 8;
/// Maximum number of fetches of one tenant at once; further ones wait.
const MAX_FETCHES_PER_TENANT: usize = 2;
/// Maximum number of URIs for which requests of one tenant wait at once.
const MAX_PENDING: usize = 64;

/// Settings of fetches.
#[derive(Debug, Clone)]
pub struct RemoteOptions {
    pub allowed: AllowList,
    /// Maximum bytes of the adapters that one tenant's requests loaded by URI.
    pub tenant_bytes: u64,
    /// Time limit of one fetch.
    pub timeout: Duration,
    /// Time for which a failure is remembered.
    pub failure_time: Duration,
    pub hub: HubAccess,
    pub bucket: BucketAccess,
}

/// Variables with the server and the credentials of buckets, which are never shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BucketAccess(Vec<(String, String)>);

impl BucketAccess {
    /// Keeps those `variables` that begin with `AWS_`.
    pub fn of(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(variables.into_iter().filter(|(name, _)| name.starts_with("AWS_")).collect())
    }

    fn variables(&self) -> impl Iterator<Item = (String, String)> {
        self.0.iter().cloned()
    }
}

impl fmt::Debug for BucketAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BucketAccess").field(&self.0.len()).finish()
    }
}

impl Default for RemoteOptions {
    /// Allows nothing.
    fn default() -> Self {
        Self {
            allowed: AllowList::default(),
            tenant_bytes: 16 << 30,
            timeout: Duration::from_secs(300),
            failure_time: Duration::from_secs(30),
            hub: HubAccess { endpoint: String::new(), token: None, is_offline: true },
            bucket: BucketAccess::default(),
        }
    }
}

/// A fetch for an owner; `None` is an adapter for all tenants.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct FetchKey {
    pub(super) owner: Option<String>,
    pub(super) uri: AdapterUri,
}

impl FetchKey {
    /// Name of the loaded adapter.
    pub(super) fn name(&self) -> String {
        self.uri.name_for(self.owner.as_deref())
    }

    pub(super) fn stopped(&self) -> FetchError {
        FetchError::Stopped(self.uri.to_string())
    }
}

pub(super) type StagedFetch = Result<Arc<StagedAdapter>, FetchError>;

/// Settings, fetches under way, and recent failures.
#[derive(Debug)]
pub(super) struct RemoteAdapters {
    pub(super) options: RemoteOptions,
    slots: Arc<TenantSlots>,
    /// Fetches of an owner, which wait for a slot.
    fetches: Arc<SingleFlight<FetchKey, StagedFetch>>,
    /// Fetches that have a slot, which owners share.
    downloads: Arc<SingleFlight<AdapterUri, StagedFetch>>,
    /// Loads under the names of URIs.
    pub(super) loads: Arc<SingleFlight<FetchKey, Result<(), FetchRefusal>>>,
    pub(super) failures: RecentFailures,
    /// Held while the quota is checked and an adapter is loaded.
    pub(super) installing: tokio::sync::Mutex<()>,
    counters: FetchCounters,
    /// Adapter root, which contains all directories of URIs.
    root: Box<Path>,
    store: AdapterStore,
}

impl RemoteAdapters {
    pub(super) fn new(options: RemoteOptions, root: &Path, store: &AdapterStore) -> Arc<Self> {
        Arc::new(Self {
            slots: TenantSlots::new(MAX_FETCHES, MAX_FETCHES_PER_TENANT),
            fetches: SingleFlight::new(),
            downloads: SingleFlight::new(),
            loads: SingleFlight::new(),
            failures: RecentFailures::new(options.failure_time),
            installing: tokio::sync::Mutex::default(),
            counters: FetchCounters::default(),
            options,
            root: root.into(),
            store: store.clone(),
        })
    }

    pub(super) fn stats(&self) -> [SchemeStats; UriScheme::EACH.len()] {
        self.counters.read()
    }

    /// Fails if the URI is not allowed, or a fetch of it failed recently.
    pub(super) fn check(&self, key: &FetchKey) -> Result<(), FetchRefusal> {
        let count = |outcome| self.counters.count(key.uri.scheme(), outcome);
        let allowed = &self.options.allowed;
        if !allowed.allows(&key.uri, key.owner.as_deref()) {
            count(FetchOutcome::Refused);
            let uri = key.uri.to_string();
            let error =
                if allowed.is_empty() { FetchError::Disabled(uri) } else { FetchError::NotAllowed(uri) };
            return Err(error.into());
        }
        match self.failures.find(key) {
            Some(failure) => {
                count(FetchOutcome::Remembered);
                Err(failure)
            }
            None => Ok(()),
        }
    }

    /// Fetches the files of an adapter. All requests of one owner that wait for the URI share a slot.
    pub(super) async fn fetch(self: &Arc<Self>, key: &FetchKey) -> StagedFetch {
        let fetches = &self.fetches;
        if fetches.count(|other| other.owner == key.owner && other != key) >= MAX_PENDING {
            return Err(FetchError::Busy(MAX_PENDING));
        }
        let work = || Arc::clone(self).fetch_in_slot(key.clone());
        fetches.run(key, work).await.unwrap_or_else(|| Err(key.stopped()))
    }

    /// Fetches the files of an adapter as soon as its owner has a slot. All owners share one download.
    async fn fetch_in_slot(self: Arc<Self>, key: FetchKey) -> StagedFetch {
        let _slot = self.slot(&key).await?;
        let work = || Arc::clone(&self).download(key.uri.clone());
        self.downloads.run(&key.uri, work).await.unwrap_or_else(|| Err(key.stopped()))
    }

    /// Waits for a slot of the owner.
    async fn slot(&self, key: &FetchKey) -> Result<TenantSlot, FetchError> {
        // No tenant has an empty name.
        let owner = key.owner.as_deref().unwrap_or_default().into();
        let slot = self.slots.acquire(&owner, self.options.timeout).await;
        slot.ok_or(FetchError::Busy(MAX_FETCHES_PER_TENANT))
    }

    async fn download(self: Arc<Self>, uri: AdapterUri) -> StagedFetch {
        let (limit, scheme) = (self.options.timeout, uri.scheme());
        let fetch = async {
            let source = AdapterSource::open(&uri, &self.root, &self.options).await?;
            stage::stage(&uri, &source, &self.store, &self.counters.bytes(scheme)).await
        };
        let timed_out = |_| FetchError::Timeout { uri: uri.to_string(), limit_ms: limit.as_millis() };
        let fetched = tokio::time::timeout(limit, fetch).await.map_err(timed_out).flatten();
        let outcome = if fetched.is_ok() { FetchOutcome::Fetched } else { FetchOutcome::Failed };
        self.counters.count(scheme, outcome);
        match &fetched {
            Ok(staged) => tracing::info!(uri = %staged.pinned, bytes = staged.bytes, "adapter fetched"),
            Err(error) => tracing::warn!(%uri, %error, "cannot fetch an adapter"),
        }
        fetched.map(Arc::new)
    }
}
