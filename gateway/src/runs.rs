//! Adapters that are trained order by order, and sampled from meanwhile: the state behind Tinker's API.
//!
//! # Where things are
//!
//! - [`book`]: sessions, their models and samplers. [`desk`]: what one model is to do; [`worker`] does it, in the order of its
//!   numbers.
//! - [`trainer`]: orders to the process that learns. [`batch`]: sequences on their way there and back; [`parts`]: how much a
//!   request would take in memory.
//! - [`promises`], [`outcome`]: requests whose answers are fetched later, and what comes of them.
//! - [`saved`]: names of what is kept, and where; [`kept`]: what there is. [`wire`]: Tinker's messages in protobuf.
//!
//! # Principles
//!
//! - A request has a name made of what it is: sent again, it is the same.
//! - Everything belongs to its caller's tenant; to others it does not exist.
//! - A piece of work that is refused has had its turn: what waits behind it goes on.

pub mod batch;
pub mod book;
pub mod desk;
pub mod kept;
pub mod outcome;
pub mod parts;
pub mod promises;
pub mod saved;
pub mod trainer;
pub mod wire;
pub mod worker;

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::sync::watch;

use self::{book::Book, kept::States, promises::Promises, worker::Means};
use crate::{
    adapters::{AdapterError, Entry, Registry, database::DatabaseError},
    clock::seconds_since_1970,
    lifecycle::Status,
    trainers::Trainers,
};

/// How often is looked for what nobody wants any more.
const SWEEP: Duration = Duration::from_secs(15);

/// See the module's description.
#[derive(Debug)]
pub struct Runs {
    /// What training is done with.
    pub means: Means,
    /// Who trains and samples.
    pub book: Book,
    /// What they wait for.
    pub promises: Promises,
}

impl Runs {
    /// Nobody trains yet. States are kept below `state`, `tenant_bytes` of a tenant.
    #[must_use]
    pub fn new(
        trainers: Trainers,
        registry: Arc<Registry>,
        status: watch::Receiver<Status>,
        state: &Path,
        tenant_bytes: u64,
    ) -> Arc<Self> {
        let means = Means { trainers, registry, status, states: States::below(state, tenant_bytes) };
        Arc::new(Self { means, book: Book::default(), promises: Promises::default() })
    }

    /// Forgets what nobody wants any more, for as long as there is anything.
    pub async fn sweep(runs: Weak<Self>) {
        let mut suspects = HashSet::new();
        loop {
            tokio::time::sleep(SWEEP).await;
            let Some(runs) = runs.upgrade() else { return };
            runs.book.sweep();
            runs.promises.sweep();
            runs.unload_unwanted(&mut suspects).await;
        }
    }

    /// Unloads adapters whose time is over, and snapshots whose model is gone. `suspects` are gateways that did not count as
    /// alive at the last call: a gateway counts as gone once two calls in a row have found it so, for after an outage of the
    /// registry every gateway is out of date for a moment.
    pub async fn unload_unwanted(&self, suspects: &mut HashSet<String>) {
        let registry = &self.means.registry;
        let gone = match registry.stay().await {
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
            tracing::info!(name, why, "an adapter of a Tinker run is unloaded");
            let registry = Arc::clone(registry);
            // Requests that use the adapter may finish, and the next sweep does not wait for them.
            tokio::spawn(async move {
                match registry.unload(&name, None).await {
                    // Another gateway was first.
                    Ok(_)
                    | Err(AdapterError::NotFound(_) | AdapterError::Database(DatabaseError::Conflict(_))) => {
                    }
                    Err(error) => {
                        tracing::warn!(name, %error, "an adapter could not be unloaded; it is tried again")
                    }
                }
            });
        }
    }

    /// Adapters that are to be unloaded, each with the reason: their time is over, their model has ended here, or the gateway
    /// that made them is one of those that are `gone`.
    fn unwanted(&self, gone: &HashSet<String>) -> Vec<(String, &'static str)> {
        let (now, own) = (seconds_since_1970(), self.means.registry.instance());
        let reason = |entry: &Entry| {
            let record = &entry.record;
            if entry.expires_at().is_some_and(|at| at <= now) {
                return Some("its ttl_seconds are over");
            }
            let maker = record.made_by.as_deref()?;
            if maker != own {
                return gone.contains(maker).then_some("the gateway that made it is gone");
            }
            let run = saved::run_of_snapshot(&record.name)?;
            (!self.book.has_run(run)).then_some("its model has ended")
        };
        let entries = self.means.registry.entries();
        entries.iter().filter_map(|(name, entry)| Some((name.clone(), reason(entry)?))).collect()
    }
}
