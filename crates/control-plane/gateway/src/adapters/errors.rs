//! Errors of adapters, for clients that change the registry and for requests that use adapters.

mod fetch;

use std::{io, path::PathBuf};

use text::adapter_text::AdapterTextError;

pub use self::fetch::{FetchError, FetchRefusal};
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
    #[error("{attempt} '{}' failed: {source}; check that the state directory is writable and has free \
             space", path.display())]
    Io { attempt: &'static str, path: PathBuf, source: io::Error },
    #[error("the state directory '{}' is in use by another gateway; stop that gateway or use another \
             --state", .0.display())]
    Locked(PathBuf),
    #[error("'{}' is damaged ({reason}); restore a copy, or move it and the directory 'adapters' beside \
             it away to start with an empty registry", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("'{}' has layout {found}, and this version supports layouts up to {known}; use the version \
             that wrote it", path.display())]
    Newer {
        path: PathBuf,
        found: i64,
        /// Latest layout number that this version of the program knows.
        known: i64,
    },
    #[error("'{}' is missing, but there are adapters in the directory beside it; restore the file, or \
             remove the adapters to start with an empty registry", .0.display())]
    Missing(PathBuf),
    #[error(
        "the disk of the state directory is full, so the registry was not changed; free some space and try again"
    )]
    Full,
    #[error("cannot change the registry: {0}; check the state directory's disk, then try again")]
    Failed(sqlx::Error),
    /// The registry of the fleet cannot be reached.
    #[error(
        "cannot reach the registry at {address} ({reason}), so nothing was changed; known adapters are \
         still served; try again later"
    )]
    Unreachable {
        /// Address of the registry, without secrets.
        address: String,
        reason: String,
    },
    #[error(
        "the connection to the registry at {address} broke during a change ({reason}); check whether the \
         change was made before you repeat it"
    )]
    Unclear {
        /// Address of the registry, without secrets.
        address: String,
        reason: String,
    },
    #[error("another gateway changed '{0}' at the same time; check it before you change it")]
    Conflict(String),
    #[error(
        "the fine-tuning job '{0}' ended or moved to another gateway, so its adapter was not registered here"
    )]
    NotHeld(String),
    /// The contents of the fleet's registry cannot be read.
    #[error("the registry at {address} is not usable ({reason}); {next}")]
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
    #[error("opening the registry failed: {0}; see the log")]
    Stopped(String),
}

#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    #[error(
        "'{0}' is not a valid adapter name; use 1 to {MAX_NAME_BYTES} bytes without ':' and control \
         characters"
    )]
    BadName(String),
    #[error("'{0}' begins with '{RESERVED_PREFIX}', which is reserved for Tinker's API; choose another name")]
    ReservedName(String),
    #[error("'{0}' is the name of the base model; choose another name")]
    NameOfBase(String),
    #[error(
        "the adapter '{name}' belongs to the base '{base}', and names of adapters are unique; unload it there, \
         or choose another name"
    )]
    OfOtherBase {
        name: String,
        /// Name of the base that has the adapter.
        base: String,
    },
    #[error(
        "'{0}' is not a valid tenant; use 1 to 64 of the characters A-Z a-z 0-9 _ . -, as in the API key file"
    )]
    BadTenant(String),
    #[error("'{0}' belongs to another tenant; unload it before you load an adapter for this tenant")]
    OtherTenant(String),
    #[error(
        "an adapter named '{0}' is loaded already; to replace it send load_inplace: true or expected_generation"
    )]
    NameTaken(String),
    #[error(
        "the adapter '{0}' is durable, and a restart would return to it; unload it before you push an ephemeral \
         adapter of that name, or send durable=true"
    )]
    DurableName(String),
    #[error("'{name}' has the generation {found}, not {expected}; check it before you change it")]
    OtherGeneration { name: String, expected: String, found: String },
    #[error("there is no adapter '{0}'; GET /v1/lora_adapters lists all")]
    NotFound(String),
    #[error("the adapter in '{0}' matches no layer of the base model, so it would have no effect")]
    NoModules(String),
    #[error("the registry has {0} adapters, which is the limit (--max-adapters); unload some")]
    Full(usize),
    #[error(
        "you have {adapters} adapters of {held_bytes} bytes, and this one has {bytes}; the limits are \
         {max_adapters} adapters (--max-adapters) and {max_bytes} bytes (--tenant-state-bytes); remove \
         some with DELETE /v1/models/NAME"
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
    #[error("{0} adapters are being loaded, which is the limit; try again later")]
    Busy(usize),
    #[error(
        "'{name}' would raise pinned adapters to {pinned_bytes} bytes, but the executor has \
         {budget_bytes} bytes for adapters; unpin another, or raise --adapter-bytes"
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
    #[error("changing the registry failed: {0}; see the log")]
    Stopped(String),
    /// The adapter was not fetched from its URI.
    #[error(transparent)]
    Fetch(#[from] FetchRefusal),
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
#[error("cannot get the files of the adapter '{name}' now: {reason}; try again shortly")]
pub struct FetchFailure {
    pub name: String,
    pub reason: String,
}

/// The adapter is registered, but cannot answer requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    #[error(transparent)]
    Unusable(#[from] UnusableAdapter),
    #[error("'{0}' is a draft adapter and answers no requests; use the base or another adapter")]
    Draft(String),
    #[error(transparent)]
    Sum(#[from] WeightedMergeError),
}

/// Why an expression is not a valid merged adapter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightedMergeError {
    #[error("a part of the sum has no name; write a+b, or a:0.7+b:0.3")]
    NoName,
    #[error("'{weight}' is not a weight for the adapter '{name}'; write a number other than 0, such as 0.7")]
    Weight {
        name: String,
        /// Weight as requested, shortened.
        weight: String,
    },
    #[error("it names the adapter '{0}' twice; give it one weight instead")]
    Twice(String),
    #[error("it names {0} adapters, and the limit is {MAX_PARTS}; name fewer")]
    TooMany(usize),
    #[error("there is no adapter '{0}'; GET /v1/models lists all models")]
    Unknown(String),
    #[error("'{0}' is the base, to which all adapters are added anyway; remove it")]
    Base(String),
    #[error("the adapter '{0}' is not a LoRA, and only LoRAs can be merged; remove it")]
    NoRank(String),
    #[error("it names adapters of different tenants; name adapters of one tenant")]
    Owners,
    #[error("the adapters have different chat templates; name adapters with the same template")]
    Templates,
    #[error("{0} merged adapters are in use, which is the limit; try again shortly")]
    Busy(usize),
    /// The executor refuses the merged adapter.
    #[error("cannot get '{name}': {reason}")]
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
