//! The adapter registry: names that people use, and the generations they stand for.
//!
//! A name is an alias of a content hash. Loading and replacing never touch what runs: a request leases the entry
//! it started with, and a generation is freed only when its last lease is gone and no other name stands for it.
//!
//! # Where things are
//!
//! - [`jail`]: adapter files opened by paths that came over HTTP, never outside of the adapter root.
//! - [`store`]: copies of those files by content; what the executor loads and a restart brings back.
//! - [`database`]: what is registered, on disk before a change is answered; [`import`] reads what was there before it.
//! - [`entry`]: an adapter under a name, its leases and its owner; [`table`] says who sees which names.
//! - [`residency`]: which adapters are in the executor, and who makes room for whom.
//! - [`change`]: load, replace, unload, pin. [`errors`] says what may go wrong, [`figures`] counts.
//!
//! # The life of a load
//!
//! 1. The files are copied out of the adapter root into the store, hashed, and synced.
//! 2. The copy gets its content's name; that name is synced.
//! 3. The executor loads the copy, after others have made room for it.
//! 4. The name is committed to the database: from here on a crash leaves the adapter registered.
//! 5. The table of names changes, requests see it, and the caller gets an answer.
//!
//! A crash before step 4 leaves files that nothing refers to; the next start sweeps them.
//!
//! # Locks
//!
//! `changing` is held by whoever changes the registry or moves adapters (the executor loads one at a time anyhow).
//! Requests whose adapter is resident never wait for it.

pub mod change;
pub mod database;
pub mod entry;
pub mod errors;
pub mod figures;
mod import;
pub mod jail;
pub mod residency;
pub mod store;
pub mod table;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock, Weak, atomic::AtomicBool},
    time::Duration,
};

use model::generation::AdapterId;
use shmproto::message::AdapterIdBytes;
use tokio::sync::Semaphore;

use self::{
    change::MAX_LOADS,
    database::{Database, Lock},
    entry::lock,
    figures::Counters,
    residency::Residency,
    store::{Store, Sweep},
    table::Table,
};
pub use self::{
    change::{LoadRequest, Pin, Replace},
    database::Record,
    entry::{EVERYBODY, Entry, Lease},
    errors::{AdapterError, BringError, OpenError, Unusable},
    figures::Figures,
    residency::Tier,
};
use crate::{
    caller::Caller,
    config::Config,
    executor::{CallError, Executor, link::Link},
};

/// Places where a test may make the gateway die or fail, in the order of an adapter's life.
pub const FAILPOINTS: &[&str] = &[
    "gateway.copy_begun",
    "gateway.copy_fails",
    "gateway.copied_before_sync",
    "gateway.synced_before_rename",
    "gateway.renamed_before_load",
    "gateway.loaded_before_commit",
    "gateway.before_commit",
    "gateway.commit_fails",
    "gateway.after_commit_before_answer",
    "gateway.pin_committed",
    "gateway.unload_committed",
    "gateway.unload_drained",
    "gateway.evict",
    "gateway.restore",
    "gateway.store_swept",
];

/// Copies made at once: they must not take all threads that block.
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

impl From<&Config> for Options {
    fn from(config: &Config) -> Self {
        Self {
            state: config.state.clone(),
            adapter_root: config.adapter_root.clone(),
            max_adapters: config.max_adapters,
            max_adapter_file_bytes: config.max_adapter_file_bytes,
        }
    }
}

/// See the module's description.
#[derive(Debug)]
pub struct Registry {
    executor: Executor,
    database: Database,
    store: Store,
    root: PathBuf,
    max_adapters: usize,
    table: RwLock<Arc<Table>>,
    /// Out of the table, but requests still use them.
    draining: Mutex<Vec<Arc<Entry>>>,
    residency: Mutex<Residency>,
    /// Held while the registry changes; readers never wait for it.
    changing: tokio::sync::Mutex<()>,
    loads: Semaphore,
    copies: Semaphore,
    /// True if the store may hold contents nothing refers to.
    sweep_due: AtomicBool,
    counters: Counters,
    /// Dropped last: the next gateway may open the directory then.
    _lock: Lock,
}

impl Registry {
    /// Opens the registry, or makes one where there never was one.
    ///
    /// # Errors
    /// If it is in use, damaged, or written by a later version; never an empty registry instead.
    pub async fn open(executor: Executor, options: Options) -> Result<Arc<Self>, OpenError> {
        let state = options.state;
        let lock = Lock::take(&state).await?;
        let is_new = !database::exists(&state)?;
        if is_new {
            database::check_not_lost(&state)?;
        }
        let store = Store::open(&state, options.max_adapter_file_bytes)?;
        if is_new {
            let (old, into) = (state.clone(), store.clone());
            let records = blocking(move || import::read(&old, &into)).await??;
            database::create(&state, &records).await?;
        }
        import::finish(&state)?;
        let (database, records) = Database::open(&state).await?;
        let (keep, sweeper) = (records.iter().map(|record| record.content).collect(), store.clone());
        let swept = blocking(move || sweeper.sweep(&keep, Sweep::Everything)).await??;
        tracing::info!(adapters = records.len(), swept, "registry opened");
        let entries = records.into_iter().map(|record| Arc::new(Entry::new(record)));
        let registry = Arc::new(Self {
            executor,
            database,
            store,
            root: options.adapter_root,
            max_adapters: options.max_adapters,
            table: RwLock::new(Arc::new(entries.collect())),
            draining: Mutex::default(),
            residency: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            loads: Semaphore::new(MAX_LOADS),
            copies: Semaphore::new(MAX_COPIES),
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

    /// Takes a lease on what `name` stands for now; it may have to be brought in ([`Registry::bring`]). Another
    /// tenant's adapter is not there.
    ///
    /// # Errors
    /// If it is registered, but cannot be used.
    pub fn lease(&self, name: &str, caller: &Caller) -> Result<Option<Lease>, Unusable> {
        // The lock is held until the lease is taken: whoever removes the entry then waits for it.
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = table.find(name, caller) else {
            return Ok(None);
        };
        match entry.fault() {
            Some(reason) => Err(Unusable { name: name.to_owned(), reason }),
            None => Ok(Some(entry.lease())),
        }
    }

    /// Makes an executor that was just connected, and that holds `resident`, ready: adapters that requests wait for
    /// and pinned ones are loaded before this returns, others in the background as long as there is room. False if
    /// the executor went away.
    pub async fn restore(self: &Arc<Self>, resident: &[AdapterIdBytes], base_name: &str) -> bool {
        let _changing = self.changing.lock().await;
        let entries = self.every_entry();
        let bytes = |id| entries.iter().find(|entry| entry.id() == id).map(|entry| entry.record.bytes);
        let known = resident.iter().map(|id| AdapterId(*id)).map(|id| (id, bytes(id).unwrap_or(0)));
        self.reset_residency(known);
        for entry in &entries {
            let is_base = entry.record.name == base_name;
            entry.set_fault(is_base.then(|| "the base model has the same name now".to_owned()));
        }
        // Whatever else is resident was loaded just before a crash and is in nobody's registry.
        for id in resident {
            self.free(AdapterId(*id)).await;
        }
        failpoint::pass("gateway.restore");
        let mut needed: Vec<_> =
            entries.iter().filter(|entry| entry.requests() > 0 || entry.is_pinned()).collect();
        needed.sort_by_key(|entry| (entry.requests() == 0, u64::MAX - entry.last_used_us()));
        for entry in needed {
            if !self.bring_back(entry).await {
                return false;
            }
        }
        tokio::spawn(warm_up(Arc::downgrade(self), self.epoch()));
        true
    }

    /// Brings a registered adapter into the executor, and notes if that cannot be. False if the executor is gone.
    async fn bring_back(&self, entry: &Entry) -> bool {
        if entry.fault().is_some() {
            return true;
        }
        match self.move_in(entry).await {
            Ok(()) => true,
            Err(BringError::Call(CallError::Unavailable(_))) => false,
            Err(error) => {
                tracing::error!(name = %entry.record.name, %error, "an adapter could not be brought back");
                if matches!(error, BringError::Unusable(_)) {
                    entry.set_fault(Some(error.to_string()));
                }
                true
            }
        }
    }

    /// Number of the connection, if there is one.
    fn epoch(&self) -> Option<u64> {
        match &*self.executor.link().borrow() {
            Link::Up { epoch, .. } => Some(*epoch),
            _ => None,
        }
    }

    /// All that has a name or a lease.
    fn every_entry(&self) -> Vec<Arc<Entry>> {
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

/// Brings adapters in as long as there is room, those used last first, while the same connection lasts.
async fn warm_up(registry: Weak<Registry>, epoch: Option<u64>) {
    let Some(mut entries) = registry.upgrade().map(|registry| registry.every_entry()) else {
        return;
    };
    entries.sort_by_key(|entry| u64::MAX - entry.last_used_us());
    for entry in entries {
        let Some(registry) = registry.upgrade() else {
            return;
        };
        // Taken for each anew, so that requests and changes get their turn.
        let _changing = registry.changing.lock().await;
        let fits =
            registry.resident().1.saturating_add(entry.record.bytes) <= registry.budget_bytes().unwrap_or(0);
        let is_registered =
            registry.entries().get(&entry.record.name).is_some_and(|now| Arc::ptr_eq(now, &entry));
        if registry.epoch() != epoch || !fits {
            return;
        }
        if is_registered && !registry.bring_back(&entry).await {
            return;
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

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, OpenError> {
    tokio::task::spawn_blocking(work).await.map_err(|panic| OpenError::Stopped(panic.to_string()))
}
