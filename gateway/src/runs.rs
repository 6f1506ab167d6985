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
    path::Path,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::sync::watch;

use self::{book::Book, kept::States, promises::Promises, worker::Means};
use crate::{adapters::Registry, lifecycle::Status, trainers::Trainers};

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
        loop {
            tokio::time::sleep(SWEEP).await;
            let Some(runs) = runs.upgrade() else { return };
            runs.book.sweep();
            runs.promises.sweep();
            for name in runs.abandoned() {
                // One that is gone already is no loss.
                let _ = runs.means.registry.unload(&name, None).await;
            }
        }
    }

    /// Snapshots whose model is gone, perhaps since before a restart.
    fn abandoned(&self) -> Vec<String> {
        let is_abandoned =
            |name: &&String| saved::run_of_snapshot(name).is_some_and(|run| !self.book.has_run(run));
        self.means.registry.entries().keys().filter(is_abandoned).cloned().collect()
    }
}
