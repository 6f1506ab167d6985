//! `gateway registry`: checks, cleans and copies registries and buckets; `holobiont registry` runs it.

use std::{
    io::{self, Write as _},
    time::Duration,
};

use clap::Parser;
use security::keys::{Key, KeyHash, MAX_KEYS};
use settings::ByteCount;

use crate::adapters::{
    BucketAddress, PostgresAddress,
    database::DatabaseError,
    records::{
        address::AddressError,
        cleanup::{CleanupError, CleanupMode, OrphanedFiles, sweep},
        read_only,
        transfer::{RegistryLocation, TransferError, transfer},
    },
    store::{self, StoreError, address::environment},
};

/// Checks registries and buckets that hosts share, manages their API keys, and copies registries
#[derive(Debug, Parser)]
#[command(name = "gateway registry", version)]
pub enum MaintenanceTask {
    /// Reports what a registry and a bucket contain, and changes nothing
    Check {
        /// Registry, as `[gateway] registry` names it
        #[arg(long, value_name = "URL")]
        registry: Option<String>,
        /// Bucket, as `[gateway] store` names it
        #[arg(long, value_name = "URL")]
        store: Option<String>,
    },
    /// Adds and revokes API keys of a registry, and prints its resulting keys as lines of a key file
    Keys {
        /// Registry, as `[gateway] registry` names it
        #[arg(long, value_name = "URL")]
        registry: String,
        /// Key to add, as a line of a key file
        #[arg(long, value_name = "LINE", value_parser = Key::parse)]
        add: Vec<Key>,
        /// Hash of a key to revoke, in 64 hexadecimal digits
        #[arg(long, value_name = "HASH", value_parser = hash)]
        revoke: Vec<KeyHash>,
    },
    /// Removes files from the bucket whose adapters are no longer registered
    Sweep {
        /// Registry, as `[gateway] registry` names it
        #[arg(long, value_name = "URL")]
        registry: String,
        /// Bucket, as `[gateway] store` names it
        #[arg(long, value_name = "URL")]
        store: String,
        /// Minimum age in hours of the files to remove
        #[arg(long, value_name = "HOURS", default_value_t = 24)]
        older_than_hours: u64,
        /// Counts the files and removes nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Copies a registry with its adapters
    Move {
        /// Source: a state directory, or postgres://USER@HOST/DATABASE
        #[arg(long, value_name = "DIR_OR_URL")]
        from: String,
        /// Destination: the other of the two kinds, and empty
        #[arg(long, value_name = "DIR_OR_URL")]
        to: String,
        /// Bucket that receives or supplies the adapter files
        #[arg(long, value_name = "URL")]
        store: String,
        /// Maximum length of an adapter file
        #[arg(long, value_name = "N", default_value = "2GiB")]
        max_adapter_file_bytes: ByteCount,
    },
}

/// Error of a maintenance task.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    #[error("the registry's address is not valid: {0}")]
    Address(#[from] AddressError),
    #[error("'{0}' is neither a bucket nor a directory; write s3://BUCKET/PREFIX or file:///DIRECTORY")]
    Store(String),
    #[error(transparent)]
    Registry(#[from] DatabaseError),
    #[error("{0}; check its name and the AWS_... variables")]
    Bucket(#[source] StoreError),
    #[error("a registry can have at most {MAX_KEYS} API keys; revoke some")]
    TooManyKeys,
    #[error(transparent)]
    Sweep(#[from] CleanupError),
    #[error("{0}")]
    Transfer(String),
    #[error("cannot start threads: {0}")]
    System(#[from] io::Error),
}

impl From<TransferError> for TaskError {
    fn from(error: TransferError) -> Self {
        Self::Transfer(error.to_string())
    }
}

/// Runs a task and writes its results to standard output.
///
/// # Errors
/// If the task cannot be completed.
pub fn run(task: MaintenanceTask) -> Result<(), TaskError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    for said in runtime.block_on(done(task))? {
        writeln!(io::stdout(), "{said}")?;
    }
    Ok(())
}

async fn done(task: MaintenanceTask) -> Result<Vec<String>, TaskError> {
    let mut said = Vec::new();
    match task {
        MaintenanceTask::Check { registry, store } => {
            if let Some(registry) = registry {
                said.push(look_at_registry(PostgresAddress::parse(&registry)?).await?);
            }
            if let Some(store) = store {
                said.push(look_at_store(bucket(&store)?).await?);
            }
        }
        MaintenanceTask::Keys { registry, add, revoke } => {
            let address = PostgresAddress::parse(&registry)?;
            // Above `MAX_KEYS` gateways refuse the whole list, and so would miss the revoked keys.
            if !add.is_empty()
                && read_only::keys(address.clone(), &[], &[]).await?.len() + add.len() > MAX_KEYS
            {
                return Err(TaskError::TooManyKeys);
            }
            said.extend(read_only::keys(address, &add, &revoke).await?);
        }
        MaintenanceTask::Sweep { registry, store, older_than_hours, dry_run } => {
            let found = if dry_run { CleanupMode::Counted } else { CleanupMode::Removed };
            let age = Duration::from_secs(older_than_hours.saturating_mul(3600));
            let OrphanedFiles { contents, bytes } =
                sweep(PostgresAddress::parse(&registry)?, bucket(&store)?, age, found).await?;
            let done = if dry_run { "would go" } else { "removed" };
            said.push(format!("{contents} adapters that are no longer registered, {bytes} bytes: {done}"));
        }
        MaintenanceTask::Move { from, to, store, max_adapter_file_bytes } => {
            let (from, to) = (RegistryLocation::parse(&from)?, RegistryLocation::parse(&to)?);
            let count = transfer(&from, &to, bucket(&store)?, max_adapter_file_bytes.0).await?;
            said.push(format!("{count} adapters copied from {from} to {to} and verified"));
        }
    }
    Ok(said)
}

fn hash(digits: &str) -> Result<KeyHash, &'static str> {
    KeyHash::from_hex(digits).ok_or("a hash has 64 hexadecimal digits")
}

async fn look_at_registry(address: PostgresAddress) -> Result<String, TaskError> {
    Ok(match read_only::count_adapters(&address).await? {
        Some(count) => format!("{address}: {count} adapters"),
        None => format!("{address}: no registry yet; the first gateway creates it"),
    })
}

async fn look_at_store(address: BucketAddress) -> Result<String, TaskError> {
    store::try_out(&address).await.map_err(|error| TaskError::Bucket(error.into()))?;
    Ok(format!("{address}: wrote, read and removed a test file"))
}

fn bucket(text: &str) -> Result<BucketAddress, TaskError> {
    BucketAddress::parse(text, environment()).ok_or_else(|| TaskError::Store(text.to_owned()))
}
