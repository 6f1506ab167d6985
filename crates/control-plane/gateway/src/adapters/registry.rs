//! The registry: the table of names, the files and the database behind it, and the locks that keep them in step.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock, Weak, atomic::AtomicBool},
    time::Duration,
};

use tokio::sync::{OnceCell, Semaphore};
use types::AdapterId;

use super::{
    database::{self, Database, Lock, Record},
    entry::{AdapterEntry, Lease},
    errors::{LeaseError, OpenError, ResidencyError, UnusableAdapter},
    import,
    merged::MergedAdapters,
    records::{
        RegistryBackend,
        address::PostgresAddress,
        change_feed::{Freshness, SharedRegistry},
    },
    residency::{ExecutorAdapters, Tier},
    share::TenantQuota,
    stats::{RegistryCounters, RegistryStats},
    store::{AdapterStore, BucketAddress, CacheHold, CleanupScope, FetchStats, bucket::Bucket},
    table::AdapterNames,
};
use crate::{caller::Caller, executors::Executors, lock::lock, random::random_u64, thread};

/// Loads that may be under way; more are refused.
pub(super) const MAX_LOADS: usize = 8;
/// Copies made at once, each on a thread of its own.
const MAX_COPIES: usize = 2;
/// How often the times of last use are written down.
const SAVE_INTERVAL: Duration = Duration::from_secs(30);

/// What a registry is opened with.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// The directory of what outlives the process.
    pub state: PathBuf,
    /// Where adapters loaded over HTTP must be: absolute and without links.
    pub adapter_root: PathBuf,
    /// Most names.
    pub max_adapters: usize,
    /// Longest file of an adapter.
    pub max_adapter_file_bytes: u64,
    /// Most bytes of adapters that one tenant may publish.
    pub tenant_bytes: u64,
    /// What is shared with other hosts, if anything is.
    pub fleet: Option<FleetStorage>,
}

/// What the gateways of many hosts share.
#[derive(Debug, Clone)]
pub struct FleetStorage {
    /// Where it is written what is registered.
    pub registry: PostgresAddress,
    /// Where the adapters' files are.
    pub store: BucketAddress,
    /// How many bytes of them may lie on this host.
    pub cache_bytes: u64,
    /// The file that the registry's API keys are kept in on this host, if they are asked for.
    pub key_file: Option<PathBuf>,
}

/// Every adapter that is registered, and what is held to serve and to change them.
#[derive(Debug)]
pub struct Registry {
    pub(super) executors: Executors,
    pub(super) homes: Vec<ExecutorAdapters>,
    /// What belongs to this host, whoever else there is.
    database: Arc<Database>,
    pub(super) records: RegistryBackend,
    pub(super) store: AdapterStore,
    /// The directory of what outlives the process.
    state: PathBuf,
    pub(super) root: PathBuf,
    pub(super) max_adapters: usize,
    pub(super) share: TenantQuota,
    pub(super) table: RwLock<Arc<AdapterNames>>,
    /// Held for the moment in which one table takes the place of another.
    pub(super) editing: Mutex<()>,
    /// Out of the table, but requests still use them.
    pub(super) draining: Mutex<Vec<Arc<AdapterEntry>>>,
    pub(super) sums: MergedAdapters,
    /// Held while the registry changes; readers never wait for it.
    pub(super) changing: tokio::sync::Mutex<()>,
    pub(super) loads: Arc<Semaphore>,
    pub(super) copies: Arc<Semaphore>,
    /// True if the store may hold contents nothing refers to.
    pub(super) sweep_due: AtomicBool,
    pub(super) counters: RegistryCounters,
    /// See [`Registry::instance`].
    pub(super) instance: String,
    /// What addresses of downloads are signed with, once it is known.
    pub(super) download_secret: OnceCell<[u8; 32]>,
    /// Dropped last: the next gateway may open the directory then.
    _lock: Lock,
}

impl Registry {
    /// Opens the registry, or makes one where there never was one.
    ///
    /// # Errors
    /// If it is in use, damaged, or written by a later version; never an empty registry instead.
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
            download_secret: OnceCell::new(),
            _lock: lock,
        });
        tokio::spawn(save_uses(Arc::downgrade(&registry)));
        if let Some(shared) = registry.records.shared() {
            tokio::spawn(Arc::clone(shared).follow(Arc::downgrade(&registry)));
        }
        Ok(registry)
    }

    /// Every adapter, by name.
    #[must_use]
    pub fn entries(&self) -> Arc<AdapterNames> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adapters that have lost their name while requests still use them.
    #[must_use]
    pub fn draining(&self) -> Vec<Arc<AdapterEntry>> {
        lock(&self.draining).clone()
    }

    /// Adapters in all.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries().len()
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries().is_empty()
    }

    /// What else of this host must outlive the process is kept there too.
    pub(crate) fn database(&self) -> &Arc<Database> {
        &self.database
    }

    /// What else the hosts of a fleet share is kept there too: rows in its PostgreSQL, bytes in its bucket.
    pub(crate) fn shared(&self) -> Option<(&Arc<SharedRegistry>, &Arc<Bucket>)> {
        Some((self.records.shared()?, self.store.bucket()?))
    }

    /// The files of an adapter, as they were copied; they stay as long as what else is returned lives.
    pub(crate) async fn files_of(
        &self,
        entry: &AdapterEntry,
    ) -> Result<(PathBuf, CacheHold), ResidencyError> {
        let held = self.fetch_files(&entry.record).await?;
        Ok((self.store.path(entry.record.content), held))
    }

    /// How old what is known is, if other hosts change it too.
    #[must_use]
    pub fn freshness(&self) -> Option<Freshness> {
        self.records.shared().map(|shared| shared.freshness())
    }

    /// What is counted of the bucket, if there is one.
    #[must_use]
    pub fn fetch_figures(&self) -> Option<FetchStats> {
        self.store.fetch_figures()
    }

    /// Directory below which adapters are loaded over HTTP; absolute.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What errors call the files of the adapter `name` that came from `source`: by name where that is a place of the gateway's own.
    pub(super) fn display_source<'a>(&self, name: &'a str, source: &'a Path) -> &'a Path {
        if source.starts_with(&self.state) { Path::new(name) } else { source }
    }

    /// Most names there may be.
    #[must_use]
    pub fn max_adapters(&self) -> usize {
        self.max_adapters
    }

    /// What has been counted since the process began.
    #[must_use]
    pub fn figures(&self) -> RegistryStats {
        self.counters.read()
    }

    /// Takes a lease on what `name` stands for now; it may have to be brought in ([`Registry::ensure_resident`]). Another
    /// tenant's adapter is not there.
    ///
    /// # Errors
    /// If it is registered, but cannot be used, or answers nobody.
    pub fn lease(&self, name: &str, caller: &Caller) -> Result<Option<Lease>, LeaseError> {
        // The lock is held until the lease is taken: whoever removes the entry then waits for it.
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

    /// Where an adapter is.
    #[must_use]
    pub fn tier(&self, entry: &AdapterEntry) -> Tier {
        let is_host = self.homes.iter().any(|home| home.holds(entry.id()));
        if is_host { Tier::Host } else { Tier::Disk }
    }

    /// Whether an adapter is in the executor at `index`.
    #[must_use]
    pub fn is_at(&self, id: AdapterId, index: usize) -> bool {
        self.homes[index].holds(id)
    }

    /// The adapters in the executor at `index`.
    #[must_use]
    pub fn held_at(&self, index: usize) -> Vec<AdapterId> {
        self.homes[index].held()
    }

    /// Whether requests wait for an adapter to arrive.
    #[must_use]
    pub fn is_loading(&self, entry: &AdapterEntry) -> bool {
        self.homes.iter().any(|home| home.is_loading(entry.id()))
    }

    /// Adapters in the executors, and the bytes they take; one that is in two counts twice.
    #[must_use]
    pub fn resident(&self) -> (usize, u64) {
        let each = self.homes.iter().map(ExecutorAdapters::resident);
        each.fold((0, 0), |(count, bytes), (more, of_them)| (count + more, bytes + of_them))
    }

    /// Bytes of adapters the executors can hold together; `None` as long as none is connected.
    #[must_use]
    pub fn budget_bytes(&self) -> Option<u64> {
        let each = self.homes.iter().filter_map(ExecutorAdapters::budget_bytes);
        each.reduce(u64::saturating_add)
    }

    /// Where adapters are brought that no request has asked for: the executor in use with the least to do. With none in
    /// use, any, for its call says why.
    pub(super) fn least_loaded(&self) -> &ExecutorAdapters {
        let in_use = self.in_use();
        let load = |home: &&ExecutorAdapters| home.executor.load().held;
        in_use.into_iter().min_by_key(load).unwrap_or(&self.homes[0])
    }

    /// The executors that are used; of a single one it does not matter whether it is there.
    pub(super) fn in_use(&self) -> Vec<&ExecutorAdapters> {
        let (members, is_only) = (self.executors.all(), !self.executors.are_several());
        let used = self.homes.iter().filter(|home| is_only || members[home.index].is_ready());
        used.collect()
    }

    /// All that has a name or a lease, and all that is made of these.
    pub(super) fn every_entry(&self) -> Vec<Arc<AdapterEntry>> {
        // In this order: an entry goes from the table to those that drain.
        let table = self.entries();
        table.values().cloned().chain(self.draining()).chain(self.sums.all()).collect()
    }

    /// Writes down when adapters were last used.
    async fn save_uses(&self) {
        let used: Vec<_> = self.entries().values().filter_map(|entry| entry.unsaved_use()).collect();
        if used.is_empty() {
            return;
        }
        if let Err(error) = self.records.set_used(&used).await {
            tracing::warn!(%error, "the times of last use could not be saved");
        }
    }
}

/// What a registry is read from, and what was read.
struct RegistryContents {
    database: Arc<Database>,
    records: RegistryBackend,
    found: Vec<Record>,
}

/// Opens the registry of one host.
async fn open_host(options: &RegistryOptions) -> Result<(RegistryContents, AdapterStore), OpenError> {
    let state = &options.state;
    let is_new = !database::exists(state)?;
    if is_new {
        database::check_not_lost(state)?;
    }
    let store = AdapterStore::open(state, options.max_adapter_file_bytes)?;
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

/// Opens the registry of many hosts. This host's own database keeps what else belongs to it.
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
            "what this host has registered for itself is not served; see 'holobiont registry move'"
        );
    }
    let store = AdapterStore::open(state, options.max_adapter_file_bytes)?;
    let store = store.of_bucket(fleet.store, fleet.cache_bytes)?;
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
