//! Storage of the registered adapters: the database of this host, or a PostgreSQL database of a fleet.
//!
//! - [`address`]: the address of the PostgreSQL database, which never contains a password.
//! - `changes`: changes of records by gateways; [`instances`]: which gateways are alive.
//! - [`change_feed`]: the connection to PostgreSQL, which delivers changes; also the age of the known
//!   records.
//! - [`cache`]: a copy of the records on this host, for times when PostgreSQL is unreachable.
//! - [`postgres`]: the queries; `layout` has the tables.
//! - [`cleanup`]: removes objects of the bucket that belong to no adapter.
//! - [`transfer`]: copies a registry from a host to a fleet, or back.
//! - [`read_only`]: queries for programs that are not gateways.
//!
//! Each change of a fleet's record names the version that it changes, and fails if another gateway changed
//! the record first.

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

/// Records that were read: all, or those that changed.
#[derive(Debug)]
pub(super) struct RegistryChanges {
    /// Number of the last change that these records contain.
    pub(super) number: u64,
    /// Whether names without a record here are unregistered.
    pub(super) scope: ReadScope,
    /// Names with their current records; `None` for a name that is no longer registered.
    pub(super) records: Vec<(String, Option<Record>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadScope {
    Whole,
    /// Records that changed since the last read.
    Since,
}

#[derive(Debug)]
pub(super) enum RegistryBackend {
    /// The database of a single host; the process holds the registry's lock.
    Host(Arc<Database>),
    Shared(Arc<SharedRegistry>),
}

impl RegistryBackend {
    /// Durably registers an adapter in place of `old`, and returns the new record version.
    ///
    /// # Errors
    /// See [`DatabaseError`]; nothing has changed then, except perhaps after [`DatabaseError::Unclear`].
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

    /// Durably deletes an adapter. An ephemeral adapter has no record to delete.
    ///
    /// # Errors
    /// Fails as [`RegistryBackend::put`] does.
    pub(super) async fn remove(&self, entry: &AdapterEntry) -> Result<(), DatabaseError> {
        match self {
            _ if !entry.is_durable() => Ok(()),
            Self::Host(database) => database.remove(&entry.record.name).await,
            Self::Shared(shared) => shared.remove(&entry.record.name, entry.version()).await,
        }
    }

    /// Durably stores whether an adapter is pinned, and returns the new record version.
    ///
    /// # Errors
    /// Fails as [`RegistryBackend::put`] does.
    pub(super) async fn set_pinned(&self, entry: &AdapterEntry, pinned: bool) -> Result<u64, DatabaseError> {
        let name = &entry.record.name;
        match self {
            _ if !entry.is_durable() => Ok(entry.version()),
            Self::Host(database) => database.set_pinned(name, pinned).await.map(|()| 0),
            Self::Shared(shared) => shared.set_pinned(name, entry.version(), pinned).await,
        }
    }

    /// Durably stores when an adapter is to be unloaded, and returns the new record version.
    ///
    /// # Errors
    /// Fails as [`RegistryBackend::put`] does.
    pub(super) async fn set_expiry(
        &self,
        entry: &AdapterEntry,
        at: Option<u64>,
    ) -> Result<u64, DatabaseError> {
        let name = &entry.record.name;
        match self {
            _ if !entry.is_durable() => Ok(entry.version()),
            Self::Host(database) => database.set_expiry(name, at).await.map(|()| 0),
            Self::Shared(shared) => shared.set_expiry(name, entry.version(), at).await,
        }
    }

    /// Fails unless the record version of `entry` is the one in the registry.
    ///
    /// # Errors
    /// Fails as [`RegistryBackend::put`] does.
    pub(super) async fn confirm(&self, entry: &AdapterEntry) -> Result<(), DatabaseError> {
        match self {
            Self::Host(_) => Ok(()),
            _ if !entry.is_durable() => Ok(()),
            Self::Shared(shared) => shared.confirm(&entry.record.name, entry.version()).await,
        }
    }

    /// Stores when adapters were last used, in microseconds since 1970.
    ///
    /// # Errors
    /// Fails as [`RegistryBackend::put`] does.
    pub(super) async fn set_used(&self, used: &[(String, u64)]) -> Result<(), DatabaseError> {
        match self {
            Self::Host(database) => database.set_used(used).await,
            Self::Shared(shared) => shared.set_used(used).await,
        }
    }

    pub(super) fn shared(&self) -> Option<&Arc<SharedRegistry>> {
        match self {
            Self::Host(_) => None,
            Self::Shared(shared) => Some(shared),
        }
    }
}
