//! Adapters that are trained order by order, and sampled from meanwhile: the state behind Tinker's API.
//!
//! # Where things are
//!
//! - [`sessions`]: sessions, their models and samplers. [`work_queue`]: what one model is to do; [`worker`] does it, in the order of its
//!   numbers.
//! - `stage`: whether a model has a trainer; `suspension`: how it gets one when [`trainer_slots`](crate::trainer_client::trainer_slots) says that it
//!   is its turn, and gives it to others.
//! - [`trainer`]: orders to the process that learns. [`batch`]: sequences on their way there and back; [`parts`]: how much a
//!   request would take in memory.
//! - [`request_futures`], [`future_result`]: requests whose answers are fetched later, and what comes of them.
//! - [`expiry`]: when what is kept ends.
//! - [`checkpoint_path`]: names of what is kept, and where; [`checkpoint_store`]: what there is; [`transfer_directories`]: adapters on their way from trainers to
//!   the registry. [`wire`]: Tinker's messages in protobuf.
//!
//! # Principles
//!
//! - A request has a name made of what it is: sent again, it is the same.
//! - Everything belongs to its caller's tenant; to others it does not exist.
//! - A piece of work that is refused has had its turn: what waits behind it goes on.

pub mod batch;
pub mod checkpoint_path;
pub mod checkpoint_store;
pub mod expiry;
pub mod future_result;
pub mod parts;
pub mod request_futures;
pub mod sessions;
mod stage;
mod suspension;
pub mod trainer;
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

/// How often is looked for what nobody wants any more.
const SWEEP: Duration = Duration::from_secs(15);

/// See the module's description.
#[derive(Debug)]
pub struct Runs {
    /// What training is done with.
    pub means: WorkerContext,
    /// Who trains and samples.
    pub book: TrainingSessions,
    /// What they wait for.
    pub promises: RequestFutures,
    /// Snapshots that are being unloaded, each of which waits for whoever samples from it.
    unloading: Mutex<HashSet<String>>,
}

impl Runs {
    /// Nobody trains yet. States are kept below `state`, `tenant_bytes` of a tenant.
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

    /// Forgets what nobody wants any more, for as long as there is anything.
    pub async fn sweep(runs: Weak<Self>) {
        let mut suspects = HashSet::new();
        loop {
            tokio::time::sleep(SWEEP).await;
            let Some(runs) = runs.upgrade() else { return };
            runs.sweep_once();
            runs.unload_unwanted(&mut suspects).await;
        }
    }

    /// Waits for nothing: neither a slow reader nor a slow disk may hold up what others wait for.
    fn sweep_once(self: &Arc<Self>) {
        self.book.sweep();
        self.promises.sweep();
        tokio::spawn(Arc::clone(self).sweep_files());
    }

    /// Requests that use the adapter may finish first.
    async fn unload(self: Arc<Self>, name: String) {
        match self.means.registry.unload(&name, None).await {
            // Another gateway was first.
            Ok(_) | Err(AdapterError::NotFound(_) | AdapterError::Database(DatabaseError::Conflict(_))) => {}
            Err(error) => tracing::warn!(name, %error, "an adapter could not be unloaded; it is tried again"),
        }
        lock(&self.unloading).remove(&name);
    }

    /// Removes states whose time is over, and what models that have ended left behind.
    async fn sweep_files(self: Arc<Self>) {
        let (passages, states) = (self.means.passages.clone(), self.means.states.clone());
        let sweep = move || {
            let (left, over) = (passages.sweep(), states.sweep());
            left.and(over)
        };
        match thread::run("tinker-sweep", sweep).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "files of Tinker runs cannot be removed"),
            Err(error) => tracing::warn!(%error, "files of Tinker runs cannot be looked for"),
        }
    }

    /// Unloads adapters whose time is over, and snapshots whose model is gone. `suspects` are gateways that did not count as
    /// alive at the last call: a gateway counts as gone once two calls in a row have found it so, for after an outage of the
    /// registry every gateway is out of date for a moment.
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
                tracing::debug!(%error, "which gateways are alive is not known now");
                HashSet::new()
            }
        };
        for (name, why) in self.unwanted(&gone) {
            if lock(&self.unloading).insert(name.clone()) {
                tracing::info!(name, why, "an adapter of a Tinker run is unloaded");
                tokio::spawn(Arc::clone(self).unload(name));
            }
        }
    }

    /// Adapters that are to be unloaded, each with the reason: their time is over, their model has ended here, or the gateway
    /// that made them is one of those that are `gone`.
    fn unwanted(&self, gone: &HashSet<String>) -> Vec<(String, &'static str)> {
        let (now, own) = (seconds_since_1970(), self.means.registry.instance());
        let reason = |entry: &AdapterEntry| {
            let record = &entry.record;
            if entry.expires_at().is_some_and(|at| at <= now) {
                return Some("its ttl_seconds are over");
            }
            let maker = record.made_by.as_deref()?;
            if maker != own {
                return gone.contains(maker).then_some("the gateway that made it is gone");
            }
            let run = checkpoint_path::run_of_snapshot(&record.name)?;
            (!self.book.has_run(run)).then_some("its model has ended")
        };
        let entries = self.means.registry.entries();
        entries.iter().filter_map(|(name, entry)| Some((name.clone(), reason(entry)?))).collect()
    }
}
