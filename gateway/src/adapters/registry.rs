//! The registry: the table of names, the files and the database behind it, and the locks that keep them in step.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock, Weak, atomic::AtomicBool},
    time::Duration,
};

use ids::AdapterId;
use tokio::sync::Semaphore;

use super::{
    database::{self, Database, Lock},
    entry::{Entry, Lease},
    errors::{LeaseError, OpenError, Unusable},
    figures::{Counters, Figures},
    import,
    residency::{Home, Tier},
    store::{Store, Sweep},
    table::Table,
};
use crate::{caller::Caller, executors::Executors, lock::lock, thread};

/// Loads that may be under way; more are refused.
pub(super) const MAX_LOADS: usize = 8;
/// Copies made at once, each on a thread of its own.
const MAX_COPIES: usize = 2;
/// How often the times of last use are written down.
const SAVE_INTERVAL: Duration = Duration::from_secs(30);

/// What a registry is opened with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The directory of what outlives the process.
    pub state: PathBuf,
    /// Where adapters loaded over HTTP must be: absolute and without links.
    pub adapter_root: PathBuf,
    /// Most names.
    pub max_adapters: usize,
    /// Longest file of an adapter.
    pub max_adapter_file_bytes: u64,
}

/// Every adapter that is registered, and what is held to serve and to change them.
#[derive(Debug)]
pub struct Registry {
    pub(super) executors: Executors,
    pub(super) homes: Vec<Home>,
    pub(super) database: Database,
    pub(super) store: Store,
    pub(super) root: PathBuf,
    pub(super) max_adapters: usize,
    pub(super) table: RwLock<Arc<Table>>,
    /// Out of the table, but requests still use them.
    pub(super) draining: Mutex<Vec<Arc<Entry>>>,
    /// Held while the registry changes; readers never wait for it.
    pub(super) changing: tokio::sync::Mutex<()>,
    pub(super) loads: Semaphore,
    pub(super) copies: Arc<Semaphore>,
    /// True if the store may hold contents nothing refers to.
    pub(super) sweep_due: AtomicBool,
    pub(super) counters: Counters,
    /// Dropped last: the next gateway may open the directory then.
    _lock: Lock,
}

impl Registry {
    /// Opens the registry, or makes one where there never was one.
    ///
    /// # Errors
    /// If it is in use, damaged, or written by a later version; never an empty registry instead.
    pub async fn open(executors: Executors, options: Options) -> Result<Arc<Self>, OpenError> {
        let state = options.state;
        let lock = Lock::take(&state).await?;
        let is_new = !database::exists(&state)?;
        if is_new {
            database::check_not_lost(&state)?;
        }
        let store = Store::open(&state, options.max_adapter_file_bytes)?;
        if is_new {
            let (old, into) = (state.clone(), store.clone());
            let records = thread::run("registry-import", move || import::read(&old, &into)).await??;
            database::create(&state, &records).await?;
        }
        import::finish(&state)?;
        let (database, records) = Database::open(&state).await?;
        let (keep, sweeper) = (records.iter().map(|record| record.content).collect(), store.clone());
        let swept = thread::run("registry-sweep", move || sweeper.sweep(&keep, Sweep::Everything)).await??;
        tracing::info!(adapters = records.len(), swept, "registry opened");
        let entries = records.into_iter().map(|record| Arc::new(Entry::new(record)));
        let homes = executors.all().iter().enumerate();
        let homes = homes.map(|(index, member)| Home::new(index, member.executor().clone())).collect();
        let registry = Arc::new(Self {
            executors,
            homes,
            database,
            store,
            root: options.adapter_root,
            max_adapters: options.max_adapters,
            table: RwLock::new(Arc::new(entries.collect())),
            draining: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            loads: Semaphore::new(MAX_LOADS),
            copies: Arc::new(Semaphore::new(MAX_COPIES)),
            sweep_due: AtomicBool::new(false),
            counters: Counters::default(),
            _lock: lock,
        });
        tokio::spawn(save_uses(Arc::downgrade(&registry)));
        Ok(registry)
    }

    /// Every adapter, by name.
    #[must_use]
    pub fn entries(&self) -> Arc<Table> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adapters that have lost their name while requests still use them.
    #[must_use]
    pub fn draining(&self) -> Vec<Arc<Entry>> {
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

    /// What else must outlive the process is kept there too.
    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    /// The files of an adapter, as they were copied.
    pub(crate) fn files_of(&self, entry: &Entry) -> PathBuf {
        self.store.path(entry.record.content)
    }

    /// Directory below which adapters are loaded over HTTP; absolute.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Most names there may be.
    #[must_use]
    pub fn max_adapters(&self) -> usize {
        self.max_adapters
    }

    /// What has been counted since the process began.
    #[must_use]
    pub fn figures(&self) -> Figures {
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
            Some(reason) => Err(Unusable { name: name.to_owned(), reason }.into()),
            None => Ok(Some(entry.lease())),
        }
    }

    /// Where an adapter is.
    #[must_use]
    pub fn tier(&self, entry: &Entry) -> Tier {
        let is_host = self.homes.iter().any(|home| home.holds(entry.id()));
        if is_host { Tier::Host } else { Tier::Disk }
    }

    /// Whether an adapter is in the executor at `index`.
    #[must_use]
    pub fn is_at(&self, id: AdapterId, index: usize) -> bool {
        self.homes[index].holds(id)
    }

    /// Whether requests wait for an adapter to arrive.
    #[must_use]
    pub fn is_loading(&self, entry: &Entry) -> bool {
        self.homes.iter().any(|home| home.is_loading(entry.id()))
    }

    /// Adapters in the executors, and the bytes they take; one that is in two counts twice.
    #[must_use]
    pub fn resident(&self) -> (usize, u64) {
        let each = self.homes.iter().map(Home::resident);
        each.fold((0, 0), |(count, bytes), (more, of_them)| (count + more, bytes + of_them))
    }

    /// Bytes of adapters the executors can hold together; `None` as long as none is connected.
    #[must_use]
    pub fn budget_bytes(&self) -> Option<u64> {
        let each = self.homes.iter().filter_map(Home::budget_bytes);
        each.reduce(u64::saturating_add)
    }

    /// Where adapters are brought that no request has asked for: the executor in use with the least to do. With none in
    /// use, any, for its call says why.
    pub(super) fn calmest(&self) -> &Home {
        let in_use = self.in_use();
        let load = |home: &&Home| home.executor.load().held;
        in_use.into_iter().min_by_key(load).unwrap_or(&self.homes[0])
    }

    /// The executors that are used; of a single one it does not matter whether it is there.
    pub(super) fn in_use(&self) -> Vec<&Home> {
        let (members, is_only) = (self.executors.all(), !self.executors.are_several());
        let used = self.homes.iter().filter(|home| is_only || members[home.index].is_ready());
        used.collect()
    }

    /// All that has a name or a lease.
    pub(super) fn every_entry(&self) -> Vec<Arc<Entry>> {
        // In this order: an entry goes from the table to those that drain.
        let table = self.entries();
        table.values().cloned().chain(self.draining()).collect()
    }

    /// Writes down when adapters were last used.
    async fn save_uses(&self) {
        let used: Vec<_> = self.entries().values().filter_map(|entry| entry.unsaved_use()).collect();
        if used.is_empty() {
            return;
        }
        if let Err(error) = self.database.set_used(&used).await {
            tracing::warn!(%error, "the times of last use could not be saved");
        }
    }
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
