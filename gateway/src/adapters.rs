//! The adapter registry: names that people use, and the generations they stand for.
//!
//! A name is an alias of a content hash. Loading and replacing never touch what runs: a request leases the entry
//! it started with, and a generation is freed only when its last lease is gone and no other name stands for it.
//! The registry is on disk before a change is answered ([`journal`]), and every adapter is brought back when the
//! executor, or this process, starts again.

pub mod journal;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use model::generation::Generation;
use shmproto::message::{AdapterLoaded, GenerationBytes};
use tokio::sync::watch;

use self::journal::{Journal, JournalError, Record};
use crate::executor::{CallError, Executor};

/// Longest name of an adapter, in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Most adapters the registry holds.
const MAX_ADAPTERS: usize = 10_000;

/// Why the registry was not changed.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The name cannot be one.
    #[error(
        "'{0}' cannot be an adapter's name: use 1 to {MAX_NAME_BYTES} characters without ':' and control characters"
    )]
    BadName(String),
    /// The base model is called so.
    #[error("'{0}' is the name of the base model; choose another")]
    NameOfBase(String),
    /// The path is not there.
    #[error("'{}' cannot be opened ({reason}); give the directory that holds adapter_config.json", path.display())]
    NoSuchPath {
        /// As asked.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The path leads out of the root.
    #[error("'{}' is not inside the adapter root '{}'; move the adapter or start with another --adapter-root", path.display(), root.display())]
    OutsideRoot {
        /// After following links.
        path: PathBuf,
        /// Where adapters must be.
        root: PathBuf,
    },
    /// The name is taken and nothing says that it is to be replaced.
    #[error(
        "an adapter named '{0}' is loaded already; to replace it send load_inplace: true or expected_generation"
    )]
    NameTaken(String),
    /// The name stands for something else than the caller thinks.
    #[error("'{name}' stands for {found}, not for {expected}; look again before replacing it")]
    OtherGeneration {
        /// The name.
        name: String,
        /// As asked.
        expected: String,
        /// As it is.
        found: String,
    },
    /// No such name.
    #[error("no adapter is named '{0}'; GET /v1/lora_adapters lists them")]
    NotFound(String),
    /// Loaded, and changes nothing.
    #[error("the adapter in '{}' matches no layer of the base model, so it would change nothing", .0.display())]
    NoModules(PathBuf),
    /// The registry is full.
    #[error("the registry holds {MAX_ADAPTERS} adapters, which is its limit; unload some")]
    Full,
    /// The executor did not do it.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The change could not be made durable and was undone.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// An adapter under a name.
#[derive(Debug)]
pub struct Entry {
    /// What is on disk about it.
    pub record: Record,
    /// Why it cannot be used now, if it cannot.
    fault: Mutex<Option<String>>,
    /// Its receivers are the leases.
    leases: watch::Sender<()>,
}

impl Entry {
    fn new(record: Record) -> Self {
        Self { record, fault: Mutex::new(None), leases: watch::Sender::new(()) }
    }

    /// Requests that use it now.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.leases.receiver_count()
    }

    /// Why it cannot be used now, if it cannot.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_fault(&self, fault: Option<String>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }
}

/// Keeps a generation from being freed.
#[derive(Debug)]
pub struct Lease {
    /// The generation, whatever the name stands for by now.
    pub generation: Generation,
    _held: watch::Receiver<()>,
}

/// The name is there, but its adapter could not be brought back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the adapter '{name}' is registered but not usable: {reason}; load it again")]
pub struct Unusable {
    /// The name.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// A load as a caller asks for it.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// The name it will have.
    pub name: String,
    /// Where its files are.
    pub path: PathBuf,
    /// What to do if the name is taken.
    pub replace: Replace,
}

/// What to do with a name that is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replace {
    /// Refuse.
    Never,
    /// Replace whatever it is.
    Always,
    /// Replace only this generation (in hexadecimal).
    Only(String),
}

type Table = BTreeMap<String, Arc<Entry>>;

/// See the module's description.
#[derive(Debug)]
pub struct Registry {
    executor: Executor,
    journal: Journal,
    root: PathBuf,
    table: RwLock<Arc<Table>>,
    /// Out of the table, but requests still use them.
    draining: Mutex<Vec<Arc<Entry>>>,
    /// Held while the registry changes; readers never wait for it.
    changing: tokio::sync::Mutex<()>,
}

impl Registry {
    /// Opens the registry in `state`; adapters loaded over HTTP must be inside `root`.
    pub fn open(executor: Executor, state: &Path, root: PathBuf) -> Result<Self, JournalError> {
        let (journal, records) = Journal::open(state)?;
        let table =
            records.into_iter().map(|record| (record.name.clone(), Arc::new(Entry::new(record)))).collect();
        Ok(Self {
            executor,
            journal,
            root,
            table: RwLock::new(Arc::new(table)),
            draining: Mutex::new(Vec::new()),
            changing: tokio::sync::Mutex::new(()),
        })
    }

    /// Every adapter, by name.
    #[must_use]
    pub fn entries(&self) -> Arc<Table> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
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

    /// Takes a lease on what `name` stands for now.
    pub fn lease(&self, name: &str) -> Result<Option<Lease>, Unusable> {
        // The lock is held until the lease is taken: whoever removes the entry then waits for it.
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = table.get(name) else {
            return Ok(None);
        };
        match entry.fault() {
            Some(reason) => Err(Unusable { name: name.to_owned(), reason }),
            None => {
                Ok(Some(Lease { generation: entry.record.generation(), _held: entry.leases.subscribe() }))
            }
        }
    }

    /// Loads an adapter from inside the root.
    pub async fn load(
        self: &Arc<Self>,
        request: LoadRequest,
        base_name: &str,
    ) -> Result<Arc<Entry>, AdapterError> {
        let path = canonical(&request.path)?;
        if !path.starts_with(&self.root) {
            return Err(AdapterError::OutsideRoot { path, root: self.root.clone() });
        }
        self.load_checked(LoadRequest { path, ..request }, base_name).await
    }

    /// Loads an adapter the operator named at start, from anywhere, replacing what has the name.
    pub async fn load_trusted(
        self: &Arc<Self>,
        name: &str,
        path: &Path,
        base_name: &str,
    ) -> Result<Arc<Entry>, AdapterError> {
        let request = LoadRequest { name: name.to_owned(), path: canonical(path)?, replace: Replace::Always };
        self.load_checked(request, base_name).await
    }

    async fn load_checked(
        self: &Arc<Self>,
        request: LoadRequest,
        base_name: &str,
    ) -> Result<Arc<Entry>, AdapterError> {
        check_name(&request.name, base_name)?;
        let changing = self.changing.lock().await;
        let table = self.entries();
        let old = table.get(&request.name).cloned();
        check_replace(&request, old.as_deref())?;
        if old.is_none() && table.len() >= MAX_ADAPTERS {
            return Err(AdapterError::Full);
        }
        let loaded = self.executor.load_adapter(&request.path).await?;
        if loaded.modules == 0 {
            self.free(loaded.generation).await;
            return Err(AdapterError::NoModules(request.path));
        }
        let entry = Arc::new(Entry::new(record(&request, &loaded)));
        let mut changed = Table::clone(&table);
        changed.insert(request.name.clone(), Arc::clone(&entry));
        if let Err(error) = self.commit(changed).await {
            self.free(loaded.generation).await;
            return Err(error.into());
        }
        tracing::info!(name = %request.name, generation = %entry.record.generation, "adapter loaded");
        if let Some(old) = old {
            self.draining().push(Arc::clone(&old));
            let registry = Arc::clone(self);
            tokio::spawn(async move { registry.retire(&old).await });
        }
        drop(changing);
        Ok(entry)
    }

    /// Refuses new requests on `name`, waits for those that run, frees the adapter, and returns the bytes freed.
    pub async fn unload(self: &Arc<Self>, name: &str) -> Result<u64, AdapterError> {
        let changing = self.changing.lock().await;
        let mut changed = Table::clone(&self.entries());
        let entry = changed.remove(name).ok_or_else(|| AdapterError::NotFound(name.to_owned()))?;
        self.commit(changed).await?;
        self.draining().push(Arc::clone(&entry));
        drop(changing);
        let freed = self.retire(&entry).await;
        tracing::info!(name, generation = %entry.record.generation, freed, "adapter unloaded");
        Ok(freed)
    }

    /// Brings every adapter back into an executor that holds `resident`. False if the executor went away.
    pub async fn restore(&self, resident: &[GenerationBytes], base_name: &str) -> bool {
        let _changing = self.changing.lock().await;
        let draining = self.draining().clone();
        for entry in self.entries().values().chain(&draining) {
            let name = entry.record.name.as_str();
            if name == base_name {
                entry.set_fault(Some("the base model has the same name now".to_owned()));
                continue;
            }
            if resident.contains(&entry.record.generation().0) {
                entry.set_fault(None);
                continue;
            }
            match self.bring_back(entry).await {
                Ok(()) => entry.set_fault(None),
                Err(AdapterError::Call(CallError::Unavailable(_))) => return false,
                Err(error) => {
                    tracing::error!(name, %error, "an adapter could not be brought back");
                    entry.set_fault(Some(error.to_string()));
                }
            }
        }
        // Whatever else is resident was loaded just before a crash and is in nobody's registry.
        for generation in resident {
            self.free(*generation).await;
        }
        true
    }

    async fn bring_back(&self, entry: &Entry) -> Result<(), AdapterError> {
        let loaded = self.executor.load_adapter(&entry.record.path).await?;
        let expected = entry.record.generation();
        if loaded.generation == expected.0 {
            return Ok(());
        }
        self.free(loaded.generation).await;
        Err(AdapterError::OtherGeneration {
            name: entry.record.path.display().to_string(),
            expected: expected.to_string(),
            found: Generation(loaded.generation).to_string(),
        })
    }

    /// Writes the table to disk, then makes it the one that is read.
    async fn commit(&self, table: Table) -> Result<(), JournalError> {
        let records = table.values().map(|entry| entry.record.clone()).collect();
        self.journal.write(records).await?;
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
        Ok(())
    }

    /// Waits for the leases of an entry that has been taken out of the table, then frees its generation.
    async fn retire(&self, entry: &Arc<Entry>) -> u64 {
        entry.leases.closed().await;
        let _changing = self.changing.lock().await;
        self.draining().retain(|other| !Arc::ptr_eq(other, entry));
        self.free(entry.record.generation().0).await
    }

    /// Frees a generation in the executor unless it is needed; returns the bytes freed. Call it with `changing`
    /// held.
    async fn free(&self, generation: GenerationBytes) -> u64 {
        if self.needs(generation) {
            return 0;
        }
        match self.executor.unload_adapter(generation).await {
            Ok(unloaded) => unloaded.freed_bytes,
            Err(error) => {
                // An executor that is gone holds nothing, and one that does not know it neither.
                tracing::warn!(generation = %Generation(generation), %error, "a generation could not be freed");
                0
            }
        }
    }

    /// True if a name stands for the generation or a request still uses it.
    fn needs(&self, generation: GenerationBytes) -> bool {
        let is = |entry: &Arc<Entry>| entry.record.generation().0 == generation;
        self.entries().values().any(is) || self.draining().iter().any(is)
    }

    fn draining(&self) -> MutexGuard<'_, Vec<Arc<Entry>>> {
        self.draining.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn record(request: &LoadRequest, loaded: &AdapterLoaded) -> Record {
    Record {
        name: request.name.clone(),
        path: request.path.clone(),
        generation: Generation(loaded.generation).into(),
        rank: loaded.rank,
        bytes: loaded.bytes,
        modules: loaded.modules,
        loaded_at: crate::seconds_since_1970(),
    }
}

fn canonical(path: &Path) -> Result<PathBuf, AdapterError> {
    path.canonicalize()
        .map_err(|error| AdapterError::NoSuchPath { path: path.to_owned(), reason: error.to_string() })
}

fn check_name(name: &str, base_name: &str) -> Result<(), AdapterError> {
    let bad =
        name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(|c| c == ':' || c.is_control());
    if bad {
        return Err(AdapterError::BadName(name.to_owned()));
    }
    if name == base_name {
        return Err(AdapterError::NameOfBase(name.to_owned()));
    }
    Ok(())
}

fn check_replace(request: &LoadRequest, old: Option<&Entry>) -> Result<(), AdapterError> {
    let found = old.map_or_else(|| "nothing".to_owned(), |old| old.record.generation.to_string());
    match &request.replace {
        Replace::Always => Ok(()),
        Replace::Never if old.is_none() => Ok(()),
        Replace::Never => Err(AdapterError::NameTaken(request.name.clone())),
        Replace::Only(expected) if *expected == found => Ok(()),
        Replace::Only(expected) => Err(AdapterError::OtherGeneration {
            name: request.name.clone(),
            expected: expected.clone(),
            found,
        }),
    }
}
