//! The registry: the table of names, the files and database behind it, and the locks that keep them
//! consistent.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak, atomic::AtomicBool},
    time::Duration,
};

use control_protocol::status::shared::SharedStoreStatus;
use tokio::sync::{OnceCell, Semaphore};
use types::AdapterId;

use super::{
    database::{self, Database, Lock, Record},
    entry::{AdapterEntry, Lease},
    errors::{AdapterError, LeaseError, OpenError, ResidencyError, UnusableAdapter},
    import,
    merged::MergedAdapters,
    records::{
        RegistryBackend,
        address::PostgresAddress,
        change_feed::{Freshness, SharedRegistry},
    },
    remote::{RemoteAdapters, RemoteOptions},
    residency::{ExecutorAdapters, Tier},
    stats::{RegistryCounters, RegistryStats},
    store::{AdapterStore, BucketAddress, CacheHold, CleanupScope, EphemeralStorage, bucket::Bucket},
    table::AdapterNames,
    tenant_quota::TenantQuota,
};
use crate::{caller::Caller, executors::Executors, lock::lock, random::random_u64, thread};

/// Maximum number of concurrent loads; further loads are refused.
pub(super) const MAX_LOADS: usize = 8;
/// Maximum number of concurrent copies, each on its own thread.
const MAX_COPIES: usize = 2;
/// Interval at which times of last use are saved.
const SAVE_INTERVAL: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// Directory of the data that outlives the process.
    pub state: PathBuf,
    /// Directory that must contain adapters loaded over HTTP: absolute and without links.
    pub adapter_root: PathBuf,
    pub max_adapters: usize,
    pub max_adapter_file_bytes: u64,
    /// Maximum bytes of adapters that one tenant may publish.
    pub tenant_bytes: u64,
    /// Storage of adapters that end with the gateway.
    pub ephemeral: EphemeralStorage,
    pub remote: RemoteOptions,
    pub fleet: Option<FleetStorage>,
}

#[derive(Debug, Clone)]
pub struct FleetStorage {
    pub registry: PostgresAddress,
    /// Address of the adapters' files.
    pub store: BucketAddress,
    /// Maximum bytes of these files in this host's cache.
    pub cache_bytes: u64,
    /// File on this host that receives the registry's API keys, if they are wanted.
    pub key_file: Option<PathBuf>,
}

/// All registered adapters, and the resources to serve and change them.
#[derive(Debug)]
pub struct Registry {
    pub(super) executors: Executors,
    pub(super) homes: Vec<ExecutorAdapters>,
    /// The database of this host, which a gateway of a fleet has too.
    database: Arc<Database>,
    pub(super) records: RegistryBackend,
    pub(super) store: AdapterStore,
    state: PathBuf,
    pub(super) root: PathBuf,
    pub(super) max_adapters: usize,
    pub(super) share: TenantQuota,
    pub(super) table: RwLock<Arc<AdapterNames>>,
    /// Held while one table replaces another.
    pub(super) editing: Mutex<()>,
    /// Entries that left the table while requests still use them.
    pub(super) draining: Mutex<Vec<Arc<AdapterEntry>>>,
    pub(super) sums: MergedAdapters,
    /// Held while the registry changes; readers never wait for it.
    pub(super) changing: tokio::sync::Mutex<()>,
    pub(super) loads: Arc<Semaphore>,
    pub(super) copies: Arc<Semaphore>,
    /// Adapters that are named by URI.
    pub(super) remote: Arc<RemoteAdapters>,
    /// True if the store may hold contents without a reference.
    pub(super) sweep_due: AtomicBool,
    pub(super) counters: RegistryCounters,
    pub(super) instance: String,
    /// Registries of the gateway's other bases, with the names of the bases in requests.
    other_bases: OnceLock<Vec<(String, Weak<Registry>)>>,
    /// Secret that signs download addresses, once it is known.
    pub(super) download_secret: OnceCell<[u8; 32]>,
    /// Dropped last, because the next gateway may then open the directory.
    _lock: Lock,
}

impl Registry {
    /// Opens the registry, or creates one if there never was one.
    ///
    /// # Errors
    /// If the registry is in use, damaged, or written by a later version. A damaged registry is never
    /// replaced by an empty one.
    pub async fn open(executors: Executors, options: RegistryOptions) -> Result<Arc<Self>, OpenError> {
        let lock = Lock::acquire(&options.state).await?;
        let (opened, store) = match options.fleet.clone() {
            None => open_host(&options).await?,
            Some(fleet) => open_fleet(&options, fleet).await?,
        };
        let RegistryContents { database, records, found } = opened;
        let (keep, sweeper) = (found.iter().map(|record| record.content).collect(), store.clone());
        let swept =
            thread::run("registry-sweep", move || sweeper.sweep(&keep, CleanupScope::Everything)).await??;
        tracing::info!(adapters = found.len(), swept, "registry opened");
        let entries = found.into_iter().map(|record| Arc::new(AdapterEntry::new(record)));
        let homes = executors.all().iter().enumerate();
        let homes =
            homes.map(|(index, member)| ExecutorAdapters::new(index, member.executor().clone())).collect();
        let registry = Arc::new(Self {
            executors,
            homes,
            database,
            records,
            remote: RemoteAdapters::new(options.remote, &options.adapter_root, &store),
            store,
            state: options.state,
            root: options.adapter_root,
            max_adapters: options.max_adapters,
            share: TenantQuota::of(options.max_adapters, options.tenant_bytes),
            table: RwLock::new(Arc::new(entries.collect())),
            editing: Mutex::default(),
            draining: Mutex::default(),
            sums: MergedAdapters::default(),
            changing: tokio::sync::Mutex::default(),
            loads: Arc::new(Semaphore::new(MAX_LOADS)),
            copies: Arc::new(Semaphore::new(MAX_COPIES)),
            sweep_due: AtomicBool::new(false),
            counters: RegistryCounters::default(),
            instance: format!("gateway-{:016x}{:016x}", random_u64(), random_u64()),
            other_bases: OnceLock::new(),
            download_secret: OnceCell::new(),
            _lock: lock,
        });
        tokio::spawn(save_uses(Arc::downgrade(&registry)));
        if let Some(shared) = registry.records.shared() {
            tokio::spawn(Arc::clone(shared).follow(Arc::downgrade(&registry)));
        }
        Ok(registry)
    }

    /// Makes names of adapters unique beside those of other bases.
    pub(crate) fn share_names(&self, others: Vec<(String, Weak<Self>)>) {
        // The gateway sets the bases once, when it starts.
        let _ = self.other_bases.set(others);
    }

    /// Fails if another base, or an adapter of another base, has this name.
    pub(super) fn check_other_bases(&self, name: &str) -> Result<(), AdapterError> {
        for (base, registry) in self.other_bases.get().into_iter().flatten() {
            if base == name {
                return Err(AdapterError::NameOfBase(name.to_owned()));
            }
            let registry = registry.upgrade();
            if registry.is_some_and(|registry| registry.entries().get(name).is_some()) {
                return Err(AdapterError::OfOtherBase { name: name.to_owned(), base: base.clone() });
            }
        }
        Ok(())
    }

    #[must_use]
    pub fn entries(&self) -> Arc<AdapterNames> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the adapters without a name that requests still use.
    #[must_use]
    pub(crate) fn draining(&self) -> Vec<Arc<AdapterEntry>> {
        lock(&self.draining).clone()
    }

    /// Returns the directory of the data that outlives the process.
    pub(super) fn state(&self) -> &Path {
        &self.state
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.entries().len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries().is_empty()
    }

    /// Database of this host, which also stores other persistent data of the host.
    pub(crate) fn database(&self) -> &Arc<Database> {
        &self.database
    }

    /// Shared registry and bucket, which also store other data of the fleet: rows and objects.
    pub(crate) fn shared(&self) -> Option<(&Arc<SharedRegistry>, &Arc<Bucket>)> {
        Some((self.records.shared()?, self.store.bucket()?))
    }

    /// Returns the path of an adapter's files as they were copied. The files stay until the hold is dropped.
    pub(crate) async fn files_of(
        &self,
        entry: &AdapterEntry,
    ) -> Result<(PathBuf, CacheHold), ResidencyError> {
        let held = self.fetch_files(&entry.record).await?;
        Ok((self.store.path(entry.record.content), held))
    }

    /// Age of the known records; `None` if no other host changes them.
    #[must_use]
    pub fn freshness(&self) -> Option<Freshness> {
        self.records.shared().map(|shared| shared.freshness())
    }

    #[must_use]
    pub fn bucket_status(&self) -> Option<SharedStoreStatus> {
        self.store.bucket_status()
    }

    /// Absolute path of the directory from which adapters are loaded over HTTP.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Path of an adapter's files in errors; the adapter's name replaces paths inside the state directory.
    pub(super) fn display_source<'a>(&self, name: &'a str, source: &'a Path) -> &'a Path {
        if source.starts_with(&self.state) { Path::new(name) } else { source }
    }

    #[must_use]
    pub fn max_adapters(&self) -> usize {
        self.max_adapters
    }

    #[must_use]
    pub fn stats(&self) -> RegistryStats {
        self.counters.read()
    }

    /// Leases the adapter that `name` refers to now. The adapter need not be resident; see
    /// [`Registry::load_on`]. Adapters of other tenants count as missing.
    ///
    /// # Errors
    /// If the adapter is registered but cannot be used, or is a draft adapter.
    pub fn lease(&self, name: &str, caller: &Caller) -> Result<Option<Lease>, LeaseError> {
        // The lock is held until the lease is taken, so a removal of the entry waits for the lease.
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = table.find(name, caller) else {
            return Ok(None);
        };
        match entry.fault() {
            _ if entry.record.draft_layers > 0 => Err(LeaseError::Draft(name.to_owned())),
            Some(reason) => Err(UnusableAdapter { name: name.to_owned(), reason }.into()),
            None => Ok(Some(entry.lease())),
        }
    }

    #[must_use]
    pub fn tier(&self, entry: &AdapterEntry) -> Tier {
        let is_host = self.homes.iter().any(|home| home.holds(entry.id()));
        match is_host {
            true => Tier::Host,
            false if entry.is_durable() => Tier::Disk,
            false => Tier::Memory,
        }
    }

    #[must_use]
    pub(crate) fn is_at(&self, id: AdapterId, index: usize) -> bool {
        self.homes[index].holds(id)
    }

    #[must_use]
    pub(crate) fn held_at(&self, index: usize) -> Vec<AdapterId> {
        self.homes[index].held()
    }

    /// Whether requests wait for the adapter to be loaded.
    #[must_use]
    pub(crate) fn is_loading(&self, entry: &AdapterEntry) -> bool {
        self.homes.iter().any(|home| home.is_loading(entry.id()))
    }

    /// Number and bytes of resident adapters; an adapter in two executors counts twice.
    #[must_use]
    pub fn resident(&self) -> (usize, u64) {
        let each = self.homes.iter().map(ExecutorAdapters::resident);
        each.fold((0, 0), |(count, bytes), (more, of_them)| (count + more, bytes + of_them))
    }

    /// Bytes of adapters that all executors together can hold; `None` while no executor is connected.
    #[must_use]
    pub fn budget_bytes(&self) -> Option<u64> {
        let each = self.homes.iter().filter_map(ExecutorAdapters::budget_bytes);
        each.reduce(u64::saturating_add)
    }

    /// Executor for loads that no request asked for: the ready executor with the least load. If none is
    /// ready, the first executor, whose call reports the reason.
    pub(super) fn least_loaded(&self) -> &ExecutorAdapters {
        let in_use = self.in_use();
        let load = |home: &&ExecutorAdapters| home.executor.load().held;
        in_use.into_iter().min_by_key(load).unwrap_or(&self.homes[0])
    }

    /// Returns the ready executors; a single executor is returned even if it is not ready.
    pub(super) fn in_use(&self) -> Vec<&ExecutorAdapters> {
        let (members, is_only) = (self.executors.all(), !self.executors.are_several());
        let used = self.homes.iter().filter(|home| is_only || members[home.index].is_ready());
        used.collect()
    }

    /// Returns all entries with a name or a lease, and all merged adapters.
    pub(super) fn every_entry(&self) -> Vec<Arc<AdapterEntry>> {
        // The table is read first, because entries move from the table to `draining`.
        let table = self.entries();
        table.values().cloned().chain(self.draining()).chain(self.sums.all()).collect()
    }

    async fn save_uses(&self) {
        let used: Vec<_> = self.entries().values().filter_map(|entry| entry.unsaved_use()).collect();
        if used.is_empty() {
            return;
        }
        if let Err(error) = self.records.set_used(&used).await {
            tracing::warn!(%error, "cannot save the times of last use");
        }
    }
}

struct RegistryContents {
    database: Arc<Database>,
    records: RegistryBackend,
    found: Vec<Record>,
}

async fn open_host(options: &RegistryOptions) -> Result<(RegistryContents, AdapterStore), OpenError> {
    let state = &options.state;
    let is_new = !database::exists(state)?;
    if is_new {
        database::check_not_lost(state)?;
    }
    let store = AdapterStore::open(state, options.max_adapter_file_bytes)?;
    let store = store.with_ephemeral(&options.ephemeral);
    if is_new {
        let (old, into) = (state.clone(), store.clone());
        let records = thread::run("registry-import", move || import::read(&old, &into)).await??;
        database::create(state, &records).await?;
    }
    import::finish(state)?;
    let (database, found) = Database::open(state).await?;
    let database = Arc::new(database);
    Ok((RegistryContents { records: RegistryBackend::Host(Arc::clone(&database)), database, found }, store))
}

/// Opens the shared registry of a fleet. The database of this host keeps the host's other data.
async fn open_fleet(
    options: &RegistryOptions,
    fleet: FleetStorage,
) -> Result<(RegistryContents, AdapterStore), OpenError> {
    let state = &options.state;
    if !database::exists(state)? {
        database::create(state, &[]).await?;
    }
    let (database, own) = Database::open(state).await?;
    if !own.is_empty() {
        let adapters = own.len();
        tracing::warn!(
            adapters,
            "adapters in this host's own registry are not served; see 'holobiont registry move'"
        );
    }
    let store = AdapterStore::open(state, options.max_adapter_file_bytes)?;
    let store = store.with_ephemeral(&options.ephemeral).of_bucket(fleet.store, fleet.cache_bytes)?;
    let (shared, found) = SharedRegistry::open_kept(fleet.registry, state, fleet.key_file).await?;
    Ok((
        RegistryContents {
            database: Arc::new(database),
            records: RegistryBackend::Shared(Arc::new(shared)),
            found,
        },
        store,
    ))
}

async fn save_uses(registry: Weak<Registry>) {
    loop {
        tokio::time::sleep(SAVE_INTERVAL).await;
        match registry.upgrade() {
            Some(registry) => registry.save_uses().await,
            None => return,
        }
    }
}
