//! The adapter registry: names that people use, and the generations they stand for.
//!
//! A name is an alias of a content hash. Loading and replacing never touch what runs: a request leases the entry
//! it started with, and a generation is freed only when its last lease is gone and no other name stands for it.
//!
//! # Where things are
//!
//! - [`registry`]: all of it held together. What is done with it is told in the rooms of the doing:
//!   - [`operations`]: load, replace, unload; `pin`; `lifetime`: until when; [`request`] is what a load says.
//!   - `base`: the model that adapters are loaded for, and how the text of an adapter differs from it.
//!   - [`upload`]: the same with files that are sent along.
//!   - `to_end`: what lets a change run to its end, whoever stops waiting for it.
//!   - `on_demand`: an adapter loaded into an executor when a request needs it there, others making room.
//!   - `restore`: an executor that was just connected made ready.
//!   - `merged_load`: several adapters leased at once, as their sum; `merged` says what that is, and which there are.
//! - [`jail`]: adapter files opened by paths that came over HTTP, never outside of the adapter root.
//! - [`store`]: copies of those files by content, here or in a bucket; what the executor loads and a restart brings back.
//! - [`records`]: what is registered, here or in a PostgreSQL that many hosts share; [`replication`] takes over what other
//!   gateways have changed there.
//! - `record`: what is remembered of an adapter.
//! - [`database`]: this host's own, on disk before a change is answered; [`import`] reads what was there before it.
//!   `layout` has its tables.
//! - [`entry`]: an adapter under a name, its leases and its owner; [`table`] says who sees which names.
//! - [`residency`]: which adapters are in each executor, and which are on their way. What is pinned is in all of them,
//!   anything else where requests asked for it.
//! - `publication`: the result of a fine-tuning job, registered by whoever works on the job.
//! - `download`: files of an adapter for people to take away.
//! - `listing`: what is told of them to whoever chooses among hosts.
//! - `share`: how many adapters, and of how many bytes, one tenant may publish.
//! - `names`: what adapters may be called; [`errors`] says what may go wrong, [`stats`] counts.
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
//! `changing` is held by whoever changes the registry, `moving` of an executor's home by whoever moves adapters in or out
//! of it (an executor loads one at a time anyhow); who needs both takes `changing` first. Requests whose adapter is
//! resident wait for neither, and an executor that is stuck holds up no other's.

mod base;
pub mod database;
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
mod pin;
mod publication;
mod record;
pub mod records;
pub mod registry;
mod replication;
pub mod request;
pub mod residency;
mod restore;
mod share;
pub mod stats;
pub mod store;
pub mod table;
mod to_end;
pub mod upload;

pub use self::{
    base::Base,
    database::{OwnTemplate, Record},
    entry::{AdapterEntry, ExecutorPin, Lease},
    errors::{
        AdapterError, FetchFailure, LeaseError, OpenError, ResidencyError, UnusableAdapter,
        WeightedMergeError,
    },
    listing::{AdapterListing, ListedAdapters},
    pin::Pin,
    publication::Publication,
    records::{address::PostgresAddress, change_feed::Freshness},
    registry::{FleetStorage, Registry, RegistryOptions},
    request::{LoadRequest, Replace, Terms},
    residency::Tier,
    stats::RegistryStats,
    store::{BucketAddress, FetchStats, IncomingAdapter, StoreError},
};

pub(crate) use self::to_end::to_end;

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
