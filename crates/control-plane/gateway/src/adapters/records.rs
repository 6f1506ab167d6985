//! Where it is written what is registered: in the database of this host, or in a PostgreSQL that the gateways of many hosts
//! share.
//!
//! - [`address`]: where that PostgreSQL is, as it is set: never with a password in it.
//! - `changes`: what gateways change; [`instances`]: which of them are alive.
//! - [`change_feed`]: the connection to it: changes of other gateways as they come, and how old what is known is.
//! - [`cache`]: what of it lies on this host, for when it is away.
//! - [`postgres`]: what is said to it; `layout` has its tables.
//! - [`cleanup`]: what of the bucket belongs to no adapter, removed.
//! - [`transfer`]: a registry copied from the one kind to the other.
//! - [`read_only`]: what is asked of it by who is none of its gateways.
//!
//! A change names the version of what it changes, and is refused if another gateway was first.

pub mod address;
mod cache;
pub(crate) mod change_feed;
mod changes;
pub(crate) mod cleanup;
pub(super) mod instances;
mod layout;
mod postgres;
pub(crate) mod read_only;
pub(crate) mod transfer;

use std::sync::Arc;

use self::change_feed::SharedRegistry;
use super::{
    database::{Database, DatabaseError, Record},
    entry::AdapterEntry,
    publication::Publication,
};

/// What was read, of all or of what has changed.
#[derive(Debug)]
pub(super) struct RegistryChanges {
    /// Number of the last change that is in here.
    pub(super) number: u64,
    /// Whether names that are not in here are not registered.
    pub(super) scope: ReadScope,
    /// Each name, and what it stands for now.
    pub(super) records: Vec<(String, Option<Record>)>,
}

/// How much was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadScope {
    /// Everything there is.
    Whole,
    /// What has changed since what was read last.
    Since,
}

/// See the module's description.
#[derive(Debug)]
pub(super) enum RegistryBackend {
    /// Of this host alone; whoever changes it holds the registry's lock.
    Host(Arc<Database>),
    /// Of many hosts.
    Shared(Arc<SharedRegistry>),
}

impl RegistryBackend {
    /// Registers an adapter in place of `old`, and returns the version it has. Durable when this returns.
    ///
    /// # Errors
    /// See [`DatabaseError`]; nothing has changed then, but after [`DatabaseError::Unclear`].
    pub(super) async fn put(
        &self,
        record: &Record,
        old: Option<&AdapterEntry>,
        of: Option<&Publication>,
    ) -> Result<u64, DatabaseError> {
        match self {
            Self::Host(database) => database.put(record, of).await.map(|()| 0),
            Self::Shared(shared) => shared.put(record, old.map(AdapterEntry::version), of).await,
        }
    }

    /// Forgets an adapter. Durable when this returns.
    ///
    /// # Errors
    /// As [`RegistryBackend::put`].
    pub(super) async fn remove(&self, entry: &AdapterEntry) -> Result<(), DatabaseError> {
        match self {
            Self::Host(database) => database.remove(&entry.record.name).await,
            Self::Shared(shared) => shared.remove(&entry.record.name, entry.version()).await,
        }
    }

    /// Remembers whether an adapter is pinned, and returns the version it has then. Durable when this returns.
    ///
    /// # Errors
    /// As [`RegistryBackend::put`].
    pub(super) async fn set_pinned(&self, entry: &AdapterEntry, pinned: bool) -> Result<u64, DatabaseError> {
        let name = &entry.record.name;
        match self {
            Self::Host(database) => database.set_pinned(name, pinned).await.map(|()| 0),
            Self::Shared(shared) => shared.set_pinned(name, entry.version(), pinned).await,
        }
    }

    /// Remembers when an adapter is to be unloaded, and returns the version it has then. Durable when this returns.
    ///
    /// # Errors
    /// As [`RegistryBackend::put`].
    pub(super) async fn set_expiry(
        &self,
        entry: &AdapterEntry,
        at: Option<u64>,
    ) -> Result<u64, DatabaseError> {
        let name = &entry.record.name;
        match self {
            Self::Host(database) => database.set_expiry(name, at).await.map(|()| 0),
            Self::Shared(shared) => shared.set_expiry(name, entry.version(), at).await,
        }
    }

    /// Fails unless an adapter is registered as it is known here.
    ///
    /// # Errors
    /// As [`RegistryBackend::put`].
    pub(super) async fn confirm(&self, entry: &AdapterEntry) -> Result<(), DatabaseError> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Shared(shared) => shared.confirm(&entry.record.name, entry.version()).await,
        }
    }

    /// Remembers when adapters were last used, in microseconds since 1970.
    ///
    /// # Errors
    /// As [`RegistryBackend::put`].
    pub(super) async fn set_used(&self, used: &[(String, u64)]) -> Result<(), DatabaseError> {
        match self {
            Self::Host(database) => database.set_used(used).await,
            Self::Shared(shared) => shared.set_used(used).await,
        }
    }

    /// The registry of many hosts, if that is what it is.
    pub(super) fn shared(&self) -> Option<&Arc<SharedRegistry>> {
        match self {
            Self::Host(_) => None,
            Self::Shared(shared) => Some(shared),
        }
    }
}
