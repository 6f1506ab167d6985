//! Copies a registry from a host to a shared registry, or back. The source stays unchanged.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use types::TenantId;

use super::{
    address::{AddressError, PostgresAddress, SCHEMES},
    change_feed::SharedRegistry,
};
use crate::adapters::{
    database::{self, Database, DatabaseError, Lock, Record},
    store::{AdapterStore, BucketAddress, StoreError},
};

#[derive(Debug, Clone)]
pub(crate) enum RegistryLocation {
    /// State directory of one host.
    Host(PathBuf),
    Shared(PostgresAddress),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error("one of --from and --to must be a state directory, and the other postgres://USER@HOST/DATABASE")]
    SameKind,
    #[error("{to} has {found} adapters already, so nothing was copied; unload them, or use another target")]
    NotEmpty { to: RegistryLocation, found: usize },
    #[error(
        "{from} has {jobs} unfinished fine-tuning jobs, which cannot be copied; wait until they end or \
         cancel them, then copy"
    )]
    Unfinished { from: RegistryLocation, jobs: u64 },
    #[error("'{name}' differs between {to} and {from}; empty {to} and copy again")]
    Different {
        /// Name of the first adapter that differs.
        name: String,
        from: RegistryLocation,
        to: RegistryLocation,
    },
    #[error("cannot copy the files of '{name}': {cause}")]
    Files { name: String, cause: Box<StoreError> },
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RegistryLocation {
    /// Parses an address of PostgreSQL or the path of a state directory.
    pub(crate) fn parse(text: &str) -> Result<Self, AddressError> {
        match SCHEMES.iter().any(|scheme| text.starts_with(scheme)) {
            true => PostgresAddress::parse(text).map(Self::Shared),
            false => Ok(Self::Host(PathBuf::from(text))),
        }
    }
}

impl fmt::Display for RegistryLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(state) => write!(f, "'{}'", state.display()),
            Self::Shared(address) => write!(f, "{address}"),
        }
    }
}

enum OpenedRegistry {
    Host(Database, #[expect(dead_code, reason = "held, not read")] Lock),
    Shared(Box<SharedRegistry>),
}

impl OpenedRegistry {
    /// Opens a registry and reads it. A missing registry of a host is created if `missing` allows it.
    async fn open(
        location: &RegistryLocation,
        missing: MissingPolicy,
    ) -> Result<(Self, Vec<Record>), DatabaseError> {
        match location {
            RegistryLocation::Host(state) => {
                let lock = Lock::acquire(state).await?;
                if missing == MissingPolicy::Made && !database::exists(state)? {
                    database::create(state, &[]).await?;
                }
                let (database, records) = Database::open(state).await?;
                Ok((Self::Host(database, lock), records))
            }
            RegistryLocation::Shared(address) => {
                let (shared, records) = SharedRegistry::open(address.clone()).await?;
                Ok((Self::Shared(Box::new(shared)), records))
            }
        }
    }

    async fn unfinished_jobs(&self) -> Result<u64, DatabaseError> {
        match self {
            Self::Host(database, _) => database.count_unfinished_jobs().await,
            Self::Shared(shared) => shared.count_unfinished_jobs().await,
        }
    }

    async fn fill(&self, records: &[Record]) -> Result<(), DatabaseError> {
        match self {
            Self::Host(database, _) => database.put_all(records).await,
            Self::Shared(shared) => shared.fill(records).await,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MissingPolicy {
    Refused,
    Made,
}

/// Copies a registry with its files, compares the copy with the source, and returns the number of adapters.
pub(crate) async fn transfer(
    from: &RegistryLocation,
    to: &RegistryLocation,
    bucket: BucketAddress,
    max_file_bytes: u64,
) -> Result<usize, TransferError> {
    let ((RegistryLocation::Host(state), RegistryLocation::Shared(_))
    | (RegistryLocation::Shared(_), RegistryLocation::Host(state))) = (from, to)
    else {
        return Err(TransferError::SameKind);
    };
    let (source, records) = OpenedRegistry::open(from, MissingPolicy::Refused).await?;
    let jobs = source.unfinished_jobs().await?;
    if jobs > 0 {
        return Err(TransferError::Unfinished { from: from.clone(), jobs });
    }
    let (target, there) = OpenedRegistry::open(to, MissingPolicy::Made).await?;
    if !there.is_empty() {
        return Err(TransferError::NotEmpty { to: to.clone(), found: there.len() });
    }
    copy_files(&records, to, state, bucket, max_file_bytes).await?;
    target.fill(&records).await?;
    drop(target);
    let (_, written) = OpenedRegistry::open(to, MissingPolicy::Refused).await?;
    compare(&records, written, from, to)?;
    Ok(records.len())
}

async fn copy_files(
    records: &[Record],
    to: &RegistryLocation,
    state: &Path,
    bucket: BucketAddress,
    max_file_bytes: u64,
) -> Result<(), TransferError> {
    let store = Arc::new(AdapterStore::open(state, max_file_bytes)?.of_bucket(bucket, u64::MAX)?);
    for record in records {
        let owner = TenantId::of(record.tenant.as_deref());
        let copied = match to {
            RegistryLocation::Shared(_) => store.publish(record.content).await,
            RegistryLocation::Host(_) => store.fetch(record.content, owner).await.map(drop),
        };
        copied.map_err(|cause| TransferError::Files { name: record.name.clone(), cause: Box::new(cause) })?;
    }
    Ok(())
}

/// Compares the records except for their versions, which each registry numbers itself.
fn compare(
    records: &[Record],
    written: Vec<Record>,
    from: &RegistryLocation,
    to: &RegistryLocation,
) -> Result<(), TransferError> {
    let mut written: BTreeMap<_, _> = written.into_iter().map(|one| (one.name.clone(), one)).collect();
    let different =
        |name: &str| TransferError::Different { name: name.to_owned(), from: from.clone(), to: to.clone() };
    for record in records {
        let found = written.remove(&record.name).map(|found| Record { version: record.version, ..found });
        if found.as_ref() != Some(record) {
            return Err(different(&record.name));
        }
    }
    written.keys().next().map_or(Ok(()), |name| Err(different(name)))
}
