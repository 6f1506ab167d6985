//! Errors of adapters, for clients that change the registry and for requests that use adapters.

use std::{io, path::PathBuf};

use text::adapter_text::AdapterTextError;

use super::{jail::JailError, store::StoreError};
use crate::{executor::CallError, thread::ThreadError};

/// Prefix of adapters of Tinker's API models, which are deleted with their model.
pub(super) const RESERVED_PREFIX: &str = "tinker-";
pub(super) const MAX_NAME_BYTES: usize = 256;
/// Maximum number of parts of a merged adapter.
pub(super) const MAX_PARTS: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// A system call on a file of the registry failed.
    #[error("{attempt} '{}' failed: {source}; check that the state directory is writable and has room", path.display())]
    Io { attempt: &'static str, path: PathBuf, source: io::Error },
    #[error("the state directory '{}' is in use by another gateway; stop it or give another --state", .0.display())]
    Locked(PathBuf),
    #[error("'{}' is damaged ({reason}); put back a copy of it, or move it and the directory 'adapters' beside it away to start with an empty registry", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("'{}' has layout {found}, this version knows up to {known}; start the version that wrote it", path.display())]
    Newer {
        path: PathBuf,
        found: i64,
        /// Latest layout number that this version of the program knows.
        known: i64,
    },
    #[error("'{}' is missing, but there are adapters in the directory beside it; put it back, or remove them too to start with an empty registry", .0.display())]
    Missing(PathBuf),
    #[error(
        "the disk of the state directory is full, so the registry was not changed; free some space and try again"
    )]
    Full,
    #[error("the registry could not be changed: {0}; check the state directory's disk, then try again")]
    Failed(sqlx::Error),
    /// The registry of the fleet cannot be reached.
    #[error(
        "the registry at {address} cannot be reached ({reason}), so nothing was changed; adapters that are known are \
         served as before; try again when it is back"
    )]
    Unreachable {
        /// Address of the registry, without secrets.
        address: String,
        reason: String,
    },
    #[error(
        "the registry at {address} was lost in the middle of a change ({reason}), which may have happened; look again \
         before you repeat it"
    )]
    Unclear {
        /// Address of the registry, without secrets.
        address: String,
        reason: String,
    },
    #[error("another gateway has changed '{0}' at the same moment; look again before you change it")]
    Conflict(String),
    #[error(
        "the fine-tuning job '{0}' has ended, or another gateway works on it now, so its adapter was not registered"
    )]
    NotHeld(String),
    /// The contents of the fleet's registry cannot be read.
    #[error("the registry at {address} is not as it should be ({reason}); {next}")]
    Foreign {
        /// Address of the registry, without secrets.
        address: String,
        reason: String,
        /// Advice for the operator.
        next: &'static str,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("opening the registry stopped: {0}; the log says why")]
    Stopped(String),
}

#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    #[error(
        "'{0}' cannot be an adapter's name: use 1 to {MAX_NAME_BYTES} bytes without ':' and control characters"
    )]
    BadName(String),
    #[error(
        "names that begin with '{RESERVED_PREFIX}', such as '{0}', belong to models of Tinker's API; choose another"
    )]
    ReservedName(String),
    #[error("'{0}' is the name of the base model; choose another")]
    NameOfBase(String),
    #[error(
        "'{0}' cannot be a tenant: use 1 to 64 of the characters A-Z a-z 0-9 _ . -, as in the API key file"
    )]
    BadTenant(String),
    #[error(
        "'{0}' belongs to another tenant; unload it first, so that nobody gets what was not meant for them"
    )]
    OtherTenant(String),
    #[error(
        "an adapter named '{0}' is loaded already; to replace it send load_inplace: true or expected_generation"
    )]
    NameTaken(String),
    #[error("'{name}' stands for {found}, not for {expected}; look again before changing it")]
    OtherGeneration { name: String, expected: String, found: String },
    #[error("no adapter is named '{0}'; GET /v1/lora_adapters lists them")]
    NotFound(String),
    #[error("the adapter in '{0}' matches no layer of the base model, so it would change nothing")]
    NoModules(String),
    #[error("the registry holds {0} adapters, which is its limit (--max-adapters); unload some")]
    Full(usize),
    #[error(
        "you have {adapters} adapters of {held_bytes} bytes and this one takes {bytes}, but a tenant may publish \
         {max_adapters} adapters (--max-adapters) of {max_bytes} bytes (--tenant-state-bytes): remove some with \
         DELETE /v1/models/NAME"
    )]
    TenantFull {
        adapters: usize,
        /// Bytes of the tenant's adapters.
        held_bytes: u64,
        /// Bytes of the new adapter.
        bytes: u64,
        max_adapters: usize,
        max_bytes: u64,
    },
    #[error("{0} adapters are being loaded, which is the limit; try again when some are done")]
    Busy(usize),
    #[error(
        "pinning '{name}' would pin {pinned_bytes} bytes, but the executor holds {budget_bytes} bytes of adapters; \
         unpin another or start it with a larger --adapter-bytes"
    )]
    PinsExceedBudget {
        name: String,
        /// Bytes of all pinned adapters, with this one.
        pinned_bytes: u64,
        budget_bytes: u64,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Text(#[from] AdapterTextError),
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// The change could not be made durable and was undone.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error("changing the registry stopped: {0}; the log says why")]
    Stopped(String),
}

impl From<ThreadError> for OpenError {
    fn from(error: ThreadError) -> Self {
        Self::Stopped(error.to_string())
    }
}

impl From<ThreadError> for AdapterError {
    fn from(error: ThreadError) -> Self {
        Self::Stopped(error.to_string())
    }
}

impl From<JailError> for AdapterError {
    fn from(error: JailError) -> Self {
        Self::Store(error.into())
    }
}

impl From<CallError> for AdapterError {
    fn from(error: CallError) -> Self {
        Self::Residency(error.into())
    }
}

/// Why a registered adapter is not in the executor now. All requests that wait for the adapter get the same
/// error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResidencyError {
    /// All resident adapters are in use, or too many requests wait already.
    #[error("{0}; try again shortly")]
    Busy(String),
    /// The adapter is larger than the memory that can ever be free.
    #[error("{0}")]
    NeverFits(String),
    /// The adapter's files, or the executor's version of them, are not what was registered.
    #[error(transparent)]
    Unusable(#[from] UnusableAdapter),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Unfetched(#[from] FetchFailure),
    #[error(transparent)]
    Sum(#[from] WeightedMergeError),
}

/// The adapter is registered, but the store cannot deliver its files now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the files of the adapter '{name}' cannot be had now: {reason}; others are served, try this one again shortly"
)]
pub struct FetchFailure {
    pub name: String,
    pub reason: String,
}

/// The adapter is registered, but cannot answer requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    #[error(transparent)]
    Unusable(#[from] UnusableAdapter),
    #[error("'{0}' is a draft: it answers nobody; ask the base, or an adapter that is none")]
    Draft(String),
    #[error(transparent)]
    Sum(#[from] WeightedMergeError),
}

/// Why an expression is not a valid merged adapter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightedMergeError {
    #[error("a part of it has no name; write a+b, or a:0.7+b:0.3")]
    NoName,
    #[error("'{weight}' is no weight of the adapter '{name}'; write a number other than 0, such as 0.7")]
    Weight {
        name: String,
        /// Weight as requested, shortened.
        weight: String,
    },
    #[error("it names the adapter '{0}' twice; give it one weight instead")]
    Twice(String),
    #[error("it names {0} adapters, and {MAX_PARTS} is the most that are added up; name fewer")]
    TooMany(usize),
    #[error("no adapter is named '{0}'; GET /v1/models lists what is served")]
    Unknown(String),
    #[error("'{0}' is the base, which every adapter is added to anyway; leave it out")]
    Base(String),
    #[error("the adapter '{0}' is no LoRA, and only LoRAs add up; leave it out")]
    NoRank(String),
    #[error(
        "it names adapters of different tenants, whose sum would belong to none of them; name those of one"
    )]
    Owners,
    #[error(
        "the adapters it names have different chat templates, and one conversation has one; name those of one template"
    )]
    Templates,
    #[error("{0} sums of adapters are in use, which is the limit; try again shortly")]
    Busy(usize),
    /// The executor refuses the merged adapter.
    #[error("'{name}' cannot be had: {reason}")]
    Refused {
        /// Name of the merged adapter.
        name: String,
        reason: String,
    },
}

/// The adapter is registered, but could not be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the adapter '{name}' is registered but not usable: {reason}; load it again")]
pub struct UnusableAdapter {
    pub name: String,
    pub reason: String,
}
