//! What every handler shares.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tokio::sync::{Semaphore, watch};

use crate::{
    adapters::Registry,
    config::{ConnectionLimits, Hosts},
    errors::ApiError,
    executor::Executor,
    keys::Keys,
    lifecycle::{NotServing, Serving, Status},
    limits::AdapterLimits,
    metrics::Metrics,
    telemetry::Sinks,
};

/// Bodies above this are worked on where blocking does no harm.
const INLINE_BYTES: usize = 4 * 1024;
/// Large bodies worked on at once.
const HEAVY_WORK: usize = 2;
/// Large bodies held at once.
const LARGE_BODIES: usize = 32;

/// What every handler shares.
#[derive(Debug)]
pub struct App {
    /// The executor.
    pub executor: Executor,
    /// Whether requests can be served, and what with.
    pub status: watch::Receiver<Status>,
    /// The adapters.
    pub registry: Arc<Registry>,
    /// The figures.
    pub metrics: Arc<Metrics>,
    /// Who is told about requests.
    pub sinks: Sinks,
    /// Who may ask.
    pub keys: Keys,
    /// How often each adapter may be asked.
    pub adapter_limits: AdapterLimits,
    /// Where browsers may come from.
    pub origins: Origins,
    /// What connections may cost.
    pub connections: ConnectionLimits,
    /// When it began.
    pub started: Instant,
    /// Permits for large bodies.
    pub(crate) large_bodies: Semaphore,
    draining: AtomicBool,
    heavy: Semaphore,
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
    /// See [`App`].
    pub executor: Executor,
    /// See [`App`].
    pub status: watch::Receiver<Status>,
    /// See [`App`].
    pub registry: Arc<Registry>,
    /// See [`App`].
    pub metrics: Arc<Metrics>,
    /// See [`App`].
    pub sinks: Sinks,
    /// See [`App`].
    pub keys: Keys,
    /// See [`App`].
    pub adapter_limits: AdapterLimits,
    /// See [`App`].
    pub origins: Origins,
    /// See [`App`].
    pub connections: ConnectionLimits,
}

impl App {
    /// Puts it together.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self {
            executor: parts.executor,
            status: parts.status,
            registry: parts.registry,
            metrics: parts.metrics,
            sinks: parts.sinks,
            keys: parts.keys,
            adapter_limits: parts.adapter_limits,
            origins: parts.origins,
            connections: parts.connections,
            started: Instant::now(),
            large_bodies: Semaphore::new(LARGE_BODIES),
            draining: AtomicBool::new(false),
            heavy: Semaphore::new(HEAVY_WORK),
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

    /// Runs `work` on a body of `bytes`: at once if it is small, otherwise on a thread that may block.
    pub async fn work<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= INLINE_BYTES {
            return work();
        }
        // The semaphore is never closed.
        let _turn = self.heavy.acquire().await;
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|panic| Err(ApiError::internal(format!("reading the request failed: {panic}"))))
    }
}
