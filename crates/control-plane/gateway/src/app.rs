//! What every handler shares.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use scheduling::routing::RoutingPolicy;
use tokio::sync::watch;

use crate::{
    adapters::{AdapterListing, Registry},
    admission_queue::AdmissionQueue,
    body_workers::BodyWorkers,
    config::{AllowedHosts, ConnectionLimits, OutputParsers},
    executors::Executors,
    grammars::GrammarChecks,
    keys::Keys,
    lifecycle::{GatewayReadiness, ServingState, ServingUnavailable},
    limits::AdapterLimits,
    metrics::GatewayMetrics,
    random::random_u64,
    response_store::ResponseStore,
    service_classes::ServiceClasses,
    telemetry::Sinks,
    tenant_memory::TenantMemory,
    training::Training,
    training_sessions::Runs,
};

/// What every handler shares.
#[derive(Debug)]
pub struct App {
    /// The connections over which token ids travel; clones share them.
    pub executors: Executors,
    /// How one of several executors is chosen.
    pub routing: RoutingPolicy,
    /// How the model writes what is no plain text.
    pub parsers: OutputParsers,
    /// Service classes.
    pub classes: Arc<ServiceClasses>,
    /// Whose turn it is.
    pub turns: AdmissionQueue,
    /// Whether requests can be served, and what with.
    pub status: watch::Receiver<GatewayReadiness>,
    /// Adapters by name, and where they are.
    pub registry: Arc<Registry>,
    /// Files to learn from, and jobs.
    pub training: Arc<Training>,
    /// What Prometheus reads.
    pub metrics: Arc<GatewayMetrics>,
    /// Who is told about requests.
    pub sinks: Sinks,
    /// API keys with their roles; none where everybody may ask.
    pub keys: Keys,
    /// How often each adapter may be asked.
    pub adapter_limits: AdapterLimits,
    /// Where browsers may come from.
    pub origins: AllowedOrigins,
    /// What connections may cost.
    pub connections: ConnectionLimits,
    /// What requests keep in memory, by tenant.
    pub memory: Arc<TenantMemory>,
    /// Whether grammars can be honoured.
    pub grammars: GrammarChecks,
    /// Adapters that are trained order by order.
    pub runs: Arc<Runs>,
    /// Responses that somebody may go on with.
    pub kept: Arc<ResponseStore>,
    /// When the process began to listen, for its uptime.
    pub started: Instant,
    /// Its number, which the next process at its address has not.
    pub instance: u64,
    /// What is told of adapters to who chooses among hosts.
    pub(crate) listing: AdapterListing,
    draining: AtomicBool,
    /// Threads that work on long bodies.
    pub bodies: BodyWorkers,
}

/// Where browsers may come from, and what they may call us.
#[derive(Debug)]
pub struct AllowedOrigins {
    /// Under which names a gateway without keys answers.
    pub hosts: AllowedHosts,
    /// Web pages that may ask although they are not ours.
    pub allowed: Vec<String>,
}

/// What an [`App`] is put together from.
#[derive(Debug)]
pub struct AppBuilder {
    /// The connections over which token ids travel.
    pub executors: Executors,
    /// How one of several executors is chosen.
    pub routing: RoutingPolicy,
    /// How the model writes what is no plain text.
    pub parsers: OutputParsers,
    /// As they are set.
    pub classes: Arc<ServiceClasses>,
    /// Before these executors.
    pub turns: AdmissionQueue,
    /// Kept true by the lifecycle.
    pub status: watch::Receiver<GatewayReadiness>,
    /// Opened, and restored by the lifecycle each time an executor is reached.
    pub registry: Arc<Registry>,
    /// Opened.
    pub training: Arc<Training>,
    /// All at zero.
    pub metrics: Arc<GatewayMetrics>,
    /// Figures, and a collector of traces if there is one.
    pub sinks: Sinks,
    /// Read from the key file, and again while serving.
    pub keys: Keys,
    /// Requests a minute, each adapter.
    pub adapter_limits: AdapterLimits,
    /// Names the gateway answers under, and pages that may call it.
    pub origins: AllowedOrigins,
    /// Bounds on bodies, headers and times.
    pub connections: ConnectionLimits,
    /// Nothing is kept yet.
    pub memory: Arc<TenantMemory>,
    /// Nothing was checked yet.
    pub grammars: GrammarChecks,
    /// Threads that work on long bodies.
    pub bodies: BodyWorkers,
    /// Adapters that are trained order by order.
    pub runs: Arc<Runs>,
}

impl App {
    /// Puts it together.
    #[must_use]
    pub fn new(parts: AppBuilder) -> Self {
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
            kept: Arc::new(ResponseStore::new(Arc::clone(&parts.memory))),
            memory: parts.memory,
            grammars: parts.grammars,
            runs: parts.runs,
            started: Instant::now(),
            instance: random_u64(),
            listing: AdapterListing::default(),
            draining: AtomicBool::new(false),
            bodies: parts.bodies,
        }
    }

    /// What is served, or why nothing is.
    pub fn serving(&self) -> Result<Arc<ServingState>, ServingUnavailable> {
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
}
