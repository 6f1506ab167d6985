//! The adapter registry maps the names that people use to adapter versions.
//!
//! A name is an alias of a content hash. Loading and replacing an adapter never change running requests. A
//! request leases the entry that it started with. An adapter version is freed when its last lease has ended
//! and no other name refers to it.
//!
//! # Where things are
//!
//! - [`registry`]: the parts of the registry, held together; the modules below add its operations.
//!   - [`operations`]: load and replace an adapter; [`request`] has the parameters of a load. `unload` frees
//!     what no name refers to.
//!   - `pin`: keeps an adapter resident.
//!   - `lifetime`: the time at which an adapter is unloaded.
//!   - `base`: the base model, and how the text files of an adapter differ from those of the base.
//!   - [`upload`]: loads an adapter from files that a request contains; [`push`] from weights alone, whose
//!     configuration `peft_config` finds.
//!   - [`uri`]: URIs of adapters; [`remote`] fetches the files, and `uri_loads` loads them.
//!   - `base_binding`: binds the adapters of one of several bases to its hash.
//!   - `detached_task`: runs a change to its end, even if the caller stops waiting.
//!   - `on_demand`: loads an adapter into an executor when a request needs it there, and evicts others.
//!   - `restore`: prepares an executor that was just connected.
//!   - `merged_load`: leases a merged adapter; `merged` parses, creates and remembers merged adapters.
//! - [`jail`]: opens adapter files by paths that came over HTTP, never outside of the adapter root.
//! - [`store`]: copies of adapter files by content, on this host or in a bucket.
//! - [`records`]: the registered adapters, on this host or in a PostgreSQL database of a fleet.
//! - [`replication`]: applies changes of other gateways of the fleet to this gateway.
//! - `record`: the stored data of one adapter.
//! - [`database`]: SQLite database of this host; `layout` has its tables, `import` reads older JSON
//!   registries.
//! - [`entry`]: an adapter under a name, its leases and its owner; [`table`] says who sees which names.
//! - [`residency`]: which adapters each executor holds or loads. Pinned adapters are in every executor,
//!   others where requests use them.
//! - `publication`: registers the result of a fine-tuning job for the gateway that works on the job.
//! - `download`: files of an adapter for download.
//! - `listing`: the adapters as reported to the endpoint picker.
//! - `tenant_quota`: number and bytes of the adapters that one tenant may publish.
//! - `names`: rules for adapter names; [`errors`] has the error types, [`stats`] the counters.
//!
//! # The life of a load
//!
//! 1. The files are copied out of the adapter root into the store, hashed, and synced.
//! 2. The copy is renamed to its content hash, and the rename is synced.
//! 3. The executor evicts other adapters if necessary and loads the copy.
//! 4. The name is committed to the database. From here on a crash leaves the adapter registered.
//! 5. The table of names changes, new requests see the adapter, and the caller gets an answer.
//!
//! A crash before step 4 leaves files without a reference; the next start deletes them.
//!
//! # Locks
//!
//! `changing` guards changes of the registry. Each executor's `moving` guards loads into it and evictions
//! from it. A task that needs both locks takes `changing` first. Requests with a resident adapter take
//! neither lock, and a stuck executor does not delay other executors.

mod base;
mod base_binding;
pub mod database;
mod detached_task;
pub(crate) mod download;
pub mod entry;
pub mod errors;
mod import;
pub mod jail;
mod layout;
mod lifetime;
mod listing;
mod merged;
mod merged_load;
mod names;
mod on_demand;
pub mod operations;
mod peft_config;
mod pin;
mod publication;
pub(crate) mod push;
mod record;
pub mod records;
pub mod registry;
pub mod remote;
mod replication;
pub mod request;
pub mod residency;
mod restore;
pub mod stats;
pub mod store;
pub mod table;
mod tenant_quota;
mod unload;
pub mod upload;
pub mod uri;
mod uri_loads;

pub(crate) use self::listing::{AdapterListing, ListedAdapters};
pub use self::{
    base::Base,
    database::{Labels, OwnTemplate, Record},
    entry::{AdapterEntry, ExecutorPin, Lease},
    errors::{
        AdapterError, FetchError, FetchFailure, FetchRefusal, LeaseError, OpenError, ResidencyError,
        UnusableAdapter, WeightedMergeError,
    },
    pin::Pin,
    publication::Publication,
    records::{address::PostgresAddress, change_feed::Freshness},
    registry::{FleetStorage, Registry, RegistryOptions},
    remote::{BucketAccess, RemoteOptions},
    request::{LoadRequest, Replace, Terms},
    residency::Tier,
    stats::RegistryStats,
    store::{BucketAddress, Durability, EphemeralStorage, IncomingAdapter, StoreError},
    uri::allow_list::{AllowList, AllowListError},
};

/// Failpoints where a test may kill or fail the gateway, in the order of an adapter's life.
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
    "gateway.fetched_before_load",
    "gateway.evict",
    "gateway.restore",
    "gateway.store_swept",
];
