//! Adapters that clients train command by command and sample from meanwhile: the state behind Tinker's API.
//!
//! # Modules
//!
//! - [`sessions`]: sessions with their models and samplers. [`work_queue`]: commands for one model;
//!   [`worker`]: their execution in the order of their numbers.
//! - `stage`: whether a model has a trainer. `suspension`: how a model gets a trainer when
//!   [`trainer_slots`](crate::trainer_client::trainer_slots) grants it, and gives it to others.
//! - `export`: serves the adapter of a model, whose weights its trainer sends.
//! - [`trainer`]: commands to the trainer process. [`batch`]: conversion of batches for the trainer and of
//!   its results; [`parts`]: number of parts of a request, which bounds its memory after decoding.
//! - [`request_futures`], [`future_result`]: requests whose results are fetched later, and these results.
//! - [`expiry`]: expiry times of checkpoints.
//! - [`checkpoint_path`]: names of checkpoints; [`checkpoint_store`]: their storage.
//!   [`transfer_directories`]: states on their way from one trainer to the next. [`wire`]: Tinker's messages
//!   in protobuf.
//!
//! # Principles
//!
//! - A future is named by model or sampler and request number, so a repeated request finds its future.
//! - Every object belongs to its caller's tenant; other tenants cannot see it.
//! - A refused command uses up its number, so the commands after it proceed.

pub mod batch;
pub mod checkpoint_path;
pub mod checkpoint_store;
pub(crate) mod expiry;
mod export;
pub mod future_result;
pub(crate) mod parts;
pub mod request_futures;
pub mod sessions;
mod stage;
mod suspension;
pub(crate) mod trainer;
pub mod transfer_directories;
pub mod wire;
pub mod work_queue;
pub mod worker;

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use tokio::sync::watch;

use self::{
    checkpoint_store::CheckpointStore, request_futures::RequestFutures, sessions::TrainingSessions,
    transfer_directories::TransferDirectories, worker::WorkerContext,
};
use crate::{
    adapters::{AdapterEntry, AdapterError, Registry, database::DatabaseError},
    clock::seconds_since_1970,
    lifecycle::GatewayReadiness,
    lock::lock,
    thread,
    trainer_client::TrainerClient,
};

/// Interval between sweeps for unused objects.
const SWEEP: Duration = Duration::from_secs(15);

/// State of all training sessions.
#[derive(Debug)]
pub struct Runs {
    /// Trainers, registry and directories that the workers use.
    pub means: WorkerContext,
    /// Sessions with their models and samplers.
    pub book: TrainingSessions,
    pub promises: RequestFutures,
    /// Snapshots that are being unloaded, each of which waits for requests that sample from it.
    unloading: Mutex<HashSet<String>>,
}

impl Runs {
    /// Creates the state without sessions. States lie below `state`; each tenant may keep `tenant_bytes` of
    /// them.
    #[must_use]
    pub fn new(
        trainers: TrainerClient,
        registry: Arc<Registry>,
        status: watch::Receiver<GatewayReadiness>,
        state: &Path,
        tenant_bytes: u64,
    ) -> Arc<Self> {
        let (states, passages) =
            (CheckpointStore::below(state, tenant_bytes), TransferDirectories::below(state));
        let means = WorkerContext { trainers, registry, status, states, passages };
        let (book, promises) = (TrainingSessions::default(), RequestFutures::default());
        Arc::new(Self { means, book, promises, unloading: Mutex::default() })
    }

    /// Sweeps unused objects at intervals until `runs` is dropped.
    pub async fn sweep(runs: Weak<Self>) {
        let mut suspects = HashSet::new();
        loop {
            tokio::time::sleep(SWEEP).await;
            let Some(runs) = runs.upgrade() else { return };
            runs.sweep_once();
            runs.unload_unwanted(&mut suspects).await;
        }
    }

    /// Spawns the removal of files, so that a slow disk delays neither this sweep nor other requests.
    fn sweep_once(self: &Arc<Self>) {
        self.book.sweep();
        self.promises.sweep();
        tokio::spawn(Arc::clone(self).sweep_files());
    }

    /// Unloads the adapter `name` after its running requests have finished.
    async fn unload(self: Arc<Self>, name: String) {
        match self.means.registry.unload(&name, None).await {
            // Another gateway has unloaded it first.
            Ok(_) | Err(AdapterError::NotFound(_) | AdapterError::Database(DatabaseError::Conflict(_))) => {}
            Err(error) => tracing::warn!(name, %error, "cannot unload an adapter; trying again"),
        }
        lock(&self.unloading).remove(&name);
    }

    /// Removes expired states, and files that ended models left behind.
    async fn sweep_files(self: Arc<Self>) {
        let (passages, states) = (self.means.passages.clone(), self.means.states.clone());
        let sweep = move || {
            let (left, over) = (passages.sweep(), states.sweep());
            left.and(over)
        };
        match thread::run("tinker-sweep", sweep).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "cannot remove files of Tinker runs"),
            Err(error) => tracing::warn!(%error, "cannot list files of Tinker runs"),
        }
    }

    /// Unloads expired adapters, and snapshots whose model is gone. `suspects` are gateways that did not
    /// count as alive at the last call. A gateway counts as gone after two calls in a row, because an outage
    /// of the registry makes every gateway look dead for a moment.
    pub async fn unload_unwanted(self: &Arc<Self>, suspects: &mut HashSet<String>) {
        let registry = &self.means.registry;
        let gone = match registry.renew_presence().await {
            Ok(living) => {
                let entries = registry.entries();
                let makers = entries.values().filter_map(|entry| entry.record.made_by.clone());
                let missing: HashSet<String> = makers.filter(|maker| !living.contains(maker)).collect();
                let gone = missing.intersection(suspects).cloned().collect();
                *suspects = missing;
                gone
            }
            Err(error) => {
                tracing::debug!(%error, "cannot read which gateways are alive");
                HashSet::new()
            }
        };
        for (name, why) in self.unwanted(&gone) {
            if lock(&self.unloading).insert(name.clone()) {
                tracing::info!(name, why, "unloaded an adapter of a Tinker run");
                tokio::spawn(Arc::clone(self).unload(name));
            }
        }
    }

    /// Returns the adapters to unload, each with its reason: it expired, its model ended on this gateway, or
    /// its gateway is among `gone`.
    fn unwanted(&self, gone: &HashSet<String>) -> Vec<(String, &'static str)> {
        let (now, own) = (seconds_since_1970(), self.means.registry.instance());
        let reason = |entry: &AdapterEntry| {
            let record = &entry.record;
            if entry.expires_at().is_some_and(|at| at <= now) {
                return Some("its ttl_seconds have passed");
            }
            let maker = record.made_by.as_deref()?;
            if maker != own {
                return gone.contains(maker).then_some("the gateway that created it no longer runs");
            }
            let run = checkpoint_path::run_of_snapshot(&record.name)?;
            (!self.book.has_run(run)).then_some("its model has ended")
        };
        let entries = self.means.registry.entries();
        entries.iter().filter_map(|(name, entry)| Some((name.clone(), reason(entry)?))).collect()
    }
}
