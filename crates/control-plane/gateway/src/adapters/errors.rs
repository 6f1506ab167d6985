//! What may go wrong with an adapter, for those who change the registry and for those who use it.

use std::{io, path::PathBuf};

use text::adapter_text::AdapterTextError;

use super::{jail::JailError, store::StoreError};
use crate::{executor::CallError, thread::ThreadError};

/// How the names of adapters begin that come of models of Tinker's API. Names of this kind are swept with their model.
pub(super) const RESERVED_PREFIX: &str = "tinker-";
/// Longest name of an adapter, in bytes.
pub(super) const MAX_NAME_BYTES: usize = 256;
/// Most adapters of a sum.
pub(super) const MAX_PARTS: usize = 8;

/// Why the registry could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// The system refused.
    #[error("{attempt} '{}' failed: {source}; check that the state directory is writable and has room", path.display())]
    Io {
        /// What was tried.
        attempt: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process has it.
    #[error("the state directory '{}' is in use by another gateway; stop it or give another --state", .0.display())]
    Locked(PathBuf),
    /// The file is not a registry.
    #[error("'{}' is damaged ({reason}); put back a copy of it, or move it and the directory 'adapters' beside it away to start with an empty registry", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A later version wrote it.
    #[error("'{}' has layout {found}, this version knows up to {known}; start the version that wrote it", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its layout.
        found: i64,
        /// The latest layout that is known here.
        known: i64,
    },
    /// The adapters are there, what they are called is not.
    #[error("'{}' is missing, but there are adapters in the directory beside it; put it back, or remove them too to start with an empty registry", .0.display())]
    Missing(PathBuf),
    /// No room for a change, which was undone.
    #[error(
        "the disk of the state directory is full, so the registry was not changed; free some space and try again"
    )]
    Full,
    /// A change failed and was undone.
    #[error("the registry could not be changed: {0}; check the state directory's disk, then try again")]
    Failed(sqlx::Error),
    /// The registry of many hosts cannot be had now.
    #[error(
        "the registry at {address} cannot be reached ({reason}), so nothing was changed; adapters that are known are \
         served as before; try again when it is back"
    )]
    Unreachable {
        /// Where it is, without what is secret.
        address: String,
        /// What was said of it.
        reason: String,
    },
    /// The registry of many hosts was lost while it was changed.
    #[error(
        "the registry at {address} was lost in the middle of a change ({reason}), which may have happened; look again \
         before you repeat it"
    )]
    Unclear {
        /// Where it is, without what is secret.
        address: String,
        /// What was said of it.
        reason: String,
    },
    /// Another gateway was first.
    #[error("another gateway has changed '{0}' at the same moment; look again before you change it")]
    Conflict(String),
    /// An adapter is the result of a fine-tuning job that has ended, or that another gateway works on now.
    #[error(
        "the fine-tuning job '{0}' has ended, or another gateway works on it now, so its adapter was not registered"
    )]
    NotHeld(String),
    /// What is written there cannot be read.
    #[error("the registry at {address} is not as it should be ({reason}); {next}")]
    Foreign {
        /// Where it is, without what is secret.
        address: String,
        /// What is wrong.
        reason: String,
        /// What to do.
        next: &'static str,
    },
}

/// Why the registry could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its database.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// Its files.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The thread that opened it is gone.
    #[error("opening the registry stopped: {0}; the log says why")]
    Stopped(String),
}

/// Why the registry was not changed.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The name cannot be one.
    #[error(
        "'{0}' cannot be an adapter's name: use 1 to {MAX_NAME_BYTES} bytes without ':' and control characters"
    )]
    BadName(String),
    /// The name could be that of a model that is trained over Tinker's API.
    #[error(
        "names that begin with '{RESERVED_PREFIX}', such as '{0}', belong to models of Tinker's API; choose another"
    )]
    ReservedName(String),
    /// The base model is called so.
    #[error("'{0}' is the name of the base model; choose another")]
    NameOfBase(String),
    /// The tenant cannot be one.
    #[error(
        "'{0}' cannot be a tenant: use 1 to 64 of the characters A-Z a-z 0-9 _ . -, as in the API key file"
    )]
    BadTenant(String),
    /// The name belongs to another tenant.
    #[error(
        "'{0}' belongs to another tenant; unload it first, so that nobody gets what was not meant for them"
    )]
    OtherTenant(String),
    /// The name is taken and nothing says that it is to be replaced.
    #[error(
        "an adapter named '{0}' is loaded already; to replace it send load_inplace: true or expected_generation"
    )]
    NameTaken(String),
    /// The name stands for something else than the caller thinks.
    #[error("'{name}' stands for {found}, not for {expected}; look again before changing it")]
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
    #[error("the adapter in '{0}' matches no layer of the base model, so it would change nothing")]
    NoModules(String),
    /// The registry is full.
    #[error("the registry holds {0} adapters, which is its limit (--max-adapters); unload some")]
    Full(usize),
    /// The tenant has published as much as one may.
    #[error(
        "you have {adapters} adapters of {held_bytes} bytes and this one takes {bytes}, but a tenant may publish \
         {max_adapters} adapters (--max-adapters) of {max_bytes} bytes (--tenant-state-bytes): remove some with \
         DELETE /v1/models/NAME"
    )]
    TenantFull {
        /// Adapters that the tenant has.
        adapters: usize,
        /// Bytes of these.
        held_bytes: u64,
        /// Bytes of the adapter that was to be published.
        bytes: u64,
        /// Most adapters of a tenant.
        max_adapters: usize,
        /// Most bytes of a tenant's adapters.
        max_bytes: u64,
    },
    /// Too many loads are under way.
    #[error("{0} adapters are being loaded, which is the limit; try again when some are done")]
    Busy(usize),
    /// Pinned adapters alone would not leave room for it.
    #[error(
        "pinning '{name}' would pin {pinned_bytes} bytes, but the executor holds {budget_bytes} bytes of adapters; \
         unpin another or start it with a larger --adapter-bytes"
    )]
    PinsExceedBudget {
        /// The adapter.
        name: String,
        /// What all pinned adapters would take.
        pinned_bytes: u64,
        /// What the executor has.
        budget_bytes: u64,
    },
    /// It may not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The text files beside it cannot be used.
    #[error(transparent)]
    Text(#[from] AdapterTextError),
    /// The executor could not take it.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// The change could not be made durable and was undone.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The thread or the task that worked on it is gone.
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

/// Why a registered adapter is not in the executor now. Everybody who waits for it gets the same one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResidencyError {
    /// All that is resident is in use, or too many requests wait already.
    #[error("{0}; try again shortly")]
    Busy(String),
    /// It is larger than what may ever be free.
    #[error("{0}")]
    NeverFits(String),
    /// Its files, or the executor's idea of them, are not what was registered.
    #[error(transparent)]
    Unusable(#[from] UnusableAdapter),
    /// The executor did not do it.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Its files are in the bucket, and do not come.
    #[error(transparent)]
    Unfetched(#[from] FetchFailure),
    /// They do not add up.
    #[error(transparent)]
    Sum(#[from] WeightedMergeError),
}

/// The name is there, but the store that its files are in does not give them now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the files of the adapter '{name}' cannot be had now: {reason}; others are served, try this one again shortly"
)]
pub struct FetchFailure {
    /// The name requests use.
    pub name: String,
    /// What the store said, for a person.
    pub reason: String,
}

/// The name is there, but no answer can be had from it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// It could not be brought back.
    #[error(transparent)]
    Unusable(#[from] UnusableAdapter),
    /// It guesses for the base.
    #[error("'{0}' is a draft: it answers nobody; ask the base, or an adapter that is none")]
    Draft(String),
    /// What it names does not add up.
    #[error(transparent)]
    Sum(#[from] WeightedMergeError),
}

/// Why what was asked for is no sum of adapters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightedMergeError {
    /// Nothing stands before or behind a `+`, or before a colon.
    #[error("a part of it has no name; write a+b, or a:0.7+b:0.3")]
    NoName,
    /// What stands behind a colon is no weight.
    #[error("'{weight}' is no weight of the adapter '{name}'; write a number other than 0, such as 0.7")]
    Weight {
        /// The adapter.
        name: String,
        /// As asked, shortened.
        weight: String,
    },
    /// One adapter is named more than once.
    #[error("it names the adapter '{0}' twice; give it one weight instead")]
    Twice(String),
    /// Too many are named.
    #[error("it names {0} adapters, and {MAX_PARTS} is the most that are added up; name fewer")]
    TooMany(usize),
    /// One is not there.
    #[error("no adapter is named '{0}'; GET /v1/models lists what is served")]
    Unknown(String),
    /// One is the base.
    #[error("'{0}' is the base, which every adapter is added to anyway; leave it out")]
    Base(String),
    /// One is of another kind.
    #[error("the adapter '{0}' is no LoRA, and only LoRAs add up; leave it out")]
    NoRank(String),
    /// An administrator names what belongs to several tenants.
    #[error(
        "it names adapters of different tenants, whose sum would belong to none of them; name those of one"
    )]
    Owners,
    /// They are shown conversations in different ways.
    #[error(
        "the adapters it names have different chat templates, and one conversation has one; name those of one template"
    )]
    Templates,
    /// All that are remembered are in use.
    #[error("{0} sums of adapters are in use, which is the limit; try again shortly")]
    Busy(usize),
    /// The executor does not add them up.
    #[error("'{name}' cannot be had: {reason}")]
    Refused {
        /// The sum.
        name: String,
        /// What it said, for a person.
        reason: String,
    },
}

/// The name is there, but its adapter could not be brought back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the adapter '{name}' is registered but not usable: {reason}; load it again")]
pub struct UnusableAdapter {
    /// The name requests use.
    pub name: String,
    /// What is wrong with its files or its weights, for a person.
    pub reason: String,
}
