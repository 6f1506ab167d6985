//! What every handler shares.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use policy::routing::Policy;
use tokio::sync::{Semaphore, watch};

use crate::{
    adapters::{Listing, Registry},
    classes::Classes,
    config::{ConnectionLimits, Hosts, Parsers},
    errors::ApiError,
    executors::Executors,
    grammars::GrammarChecks,
    kept::Kept,
    keys::Keys,
    lifecycle::{NotServing, Serving, Status},
    limits::AdapterLimits,
    metrics::Metrics,
    random::random_u64,
    runs::Runs,
    telemetry::Sinks,
    tenant_memory::TenantMemory,
    training::Training,
    turns::Turns,
};

/// Bodies above this are worked on where blocking does no harm.
const INLINE_BYTES: usize = 4 * 1024;
/// Bodies above that which are worked on at once, each on a thread that may block.
pub(crate) const HEAVY_WORK: usize = 2;

/// What every handler shares.
#[derive(Debug)]
pub struct App {
    /// The connections over which token ids travel; clones share them.
    pub executors: Executors,
    /// How one of several executors is chosen.
    pub routing: Policy,
    /// How the model writes what is no plain text.
    pub parsers: Parsers,
    /// Service classes.
    pub classes: Arc<Classes>,
    /// Whose turn it is.
    pub turns: Turns,
    /// Whether requests can be served, and what with.
    pub status: watch::Receiver<Status>,
    /// Adapters by name, and where they are.
    pub registry: Arc<Registry>,
    /// Files to learn from, and jobs.
    pub training: Arc<Training>,
    /// What Prometheus reads.
    pub metrics: Arc<Metrics>,
    /// Who is told about requests.
    pub sinks: Sinks,
    /// API keys with their roles; none where everybody may ask.
    pub keys: Keys,
    /// How often each adapter may be asked.
    pub adapter_limits: AdapterLimits,
    /// Where browsers may come from.
    pub origins: Origins,
    /// What connections may cost.
    pub connections: ConnectionLimits,
    /// What requests keep in memory, by tenant.
    pub memory: Arc<TenantMemory>,
    /// Whether grammars can be honoured.
    pub grammars: GrammarChecks,
    /// Adapters that are trained order by order.
    pub runs: Arc<Runs>,
    /// Responses that somebody may go on with.
    pub kept: Arc<Kept>,
    /// When the process began to listen, for its uptime.
    pub started: Instant,
    /// Its number, which the next process at its address has not.
    pub instance: u64,
    /// What is told of adapters to who chooses among hosts.
    pub(crate) listing: Listing,
    draining: AtomicBool,
    /// Permits for work on a thread that may block.
    heavy: Arc<Semaphore>,
}

/// Where browsers may come from, and what they may call us.
#[derive(Debug)]
pub struct Origins {
    /// Under which names a gateway without keys answers.
    pub hosts: Hosts,
    /// Web pages that may ask although they are not ours.
    pub allowed: Vec<String>,
}

/// What an [`App`] is put together from.
#[derive(Debug)]
pub struct Parts {
    /// The connections over which token ids travel.
    pub executors: Executors,
    /// How one of several executors is chosen.
    pub routing: Policy,
    /// How the model writes what is no plain text.
    pub parsers: Parsers,
    /// As they are set.
    pub classes: Arc<Classes>,
    /// Before these executors.
    pub turns: Turns,
    /// Kept true by the lifecycle.
    pub status: watch::Receiver<Status>,
    /// Opened, and restored by the lifecycle each time an executor is reached.
    pub registry: Arc<Registry>,
    /// Opened.
    pub training: Arc<Training>,
    /// All at zero.
    pub metrics: Arc<Metrics>,
    /// Figures, and a collector of traces if there is one.
    pub sinks: Sinks,
    /// Read from the key file, and again while serving.
    pub keys: Keys,
    /// Requests a minute, each adapter.
    pub adapter_limits: AdapterLimits,
    /// Names the gateway answers under, and pages that may call it.
    pub origins: Origins,
    /// Bounds on bodies, headers and times.
    pub connections: ConnectionLimits,
    /// Nothing is kept yet.
    pub memory: Arc<TenantMemory>,
    /// Nothing was checked yet.
    pub grammars: GrammarChecks,
    /// Adapters that are trained order by order.
    pub runs: Arc<Runs>,
}

impl App {
    /// Puts it together.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self {
            executors: parts.executors,
            routing: parts.routing,
            parsers: parts.parsers,
            classes: parts.classes,
            turns: parts.turns,
            status: parts.status,
            registry: parts.registry,
            training: parts.training,
            metrics: parts.metrics,
            sinks: parts.sinks,
            keys: parts.keys,
            adapter_limits: parts.adapter_limits,
            origins: parts.origins,
            connections: parts.connections,
            kept: Arc::new(Kept::new(Arc::clone(&parts.memory))),
            memory: parts.memory,
            grammars: parts.grammars,
            runs: parts.runs,
            started: Instant::now(),
            instance: random_u64(),
            listing: Listing::default(),
            draining: AtomicBool::new(false),
            heavy: Arc::new(Semaphore::new(HEAVY_WORK)),
        }
    }

    /// What is served, or why nothing is.
    pub fn serving(&self) -> Result<Arc<Serving>, NotServing> {
        self.status.borrow().serving()
    }

    /// From now on no request is taken.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// True if no request is taken any more.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Runs `work` on a body of `bytes`: at once if it is small, otherwise on a thread that may block. Work that has begun
    /// keeps its permit to its end, also if nobody waits for it any more; work that has not is forgotten.
    pub async fn work<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= INLINE_BYTES {
            return work();
        }
        // The semaphore is never closed.
        let turn = Arc::clone(&self.heavy).acquire_owned().await;
        let done = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        let done = done.await;
        done.unwrap_or_else(|panic| Err(ApiError::internal(format!("reading the request failed: {panic}"))))
    }
}
