//! State that all request handlers share.

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
    batches::Batches,
    body_workers::BodyWorkers,
    config::{AllowedHosts, ConnectionLimits, OutputParsers, ScoringDefaults},
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

#[derive(Debug)]
pub struct App {
    /// Connections to the executors; clones share them.
    pub executors: Executors,
    pub routing: RoutingPolicy,
    /// Parsers of reasoning content and tool calls in the model's output.
    pub parsers: OutputParsers,
    /// Tokens and prompt of scoring requests that name none.
    pub scoring: ScoringDefaults,
    pub classes: Arc<ServiceClasses>,
    pub turns: AdmissionQueue,
    /// Whether requests can be served, and the tokenizer and base that serve them.
    pub status: watch::Receiver<GatewayReadiness>,
    /// Adapters by name, with the place of their files.
    pub registry: Arc<Registry>,
    /// Training files and fine-tuning jobs.
    pub training: Arc<Training>,
    /// Files of requests that are answered in the background.
    pub batches: Arc<Batches>,
    /// Metrics that Prometheus reads.
    pub metrics: Arc<GatewayMetrics>,
    /// Receivers of request records: metrics, and a trace collector if one is set.
    pub sinks: Sinks,
    /// API keys with their roles; empty if no key is required.
    pub keys: Keys,
    /// Rate limit per adapter.
    pub adapter_limits: AdapterLimits,
    pub origins: AllowedOrigins,
    /// Limits on connections, bodies, headers and times.
    pub connections: ConnectionLimits,
    /// Bytes that requests keep in memory, by tenant.
    pub memory: Arc<TenantMemory>,
    /// Checks whether a grammar can be compiled.
    pub grammars: GrammarChecks,
    /// Adapters that clients train step by step over Tinker's API.
    pub runs: Arc<Runs>,
    /// Responses that a client may continue with `previous_response_id`.
    pub kept: Arc<ResponseStore>,
    /// Time when the process began to listen, for its uptime.
    pub started: Instant,
    /// Random number of this process; another process at the same address has a different one.
    pub instance: u64,
    /// Adapter lists that `/v1/load` reports to the endpoint picker.
    pub(crate) listing: AdapterListing,
    draining: AtomicBool,
    /// Threads that process long bodies.
    pub bodies: BodyWorkers,
}

/// Web origins that may call the gateway, and host names under which it answers.
#[derive(Debug)]
pub struct AllowedOrigins {
    /// Host names under which a gateway without keys answers.
    pub hosts: AllowedHosts,
    /// Origins of foreign web pages that may call the gateway.
    pub allowed: Vec<String>,
}

/// Parts from which [`App`] is assembled.
#[derive(Debug)]
pub struct AppBuilder {
    pub executors: Executors,
    pub routing: RoutingPolicy,
    pub parsers: OutputParsers,
    pub scoring: ScoringDefaults,
    pub classes: Arc<ServiceClasses>,
    pub turns: AdmissionQueue,
    /// Status that the lifecycle keeps up to date.
    pub status: watch::Receiver<GatewayReadiness>,
    /// Open registry, which the lifecycle restores each time it connects to an executor.
    pub registry: Arc<Registry>,
    pub training: Arc<Training>,
    pub batches: Arc<Batches>,
    pub metrics: Arc<GatewayMetrics>,
    pub sinks: Sinks,
    /// Keys of the key file, which is read again while the gateway serves.
    pub keys: Keys,
    /// Limit in requests per minute and adapter.
    pub adapter_limits: AdapterLimits,
    pub origins: AllowedOrigins,
    pub connections: ConnectionLimits,
    pub memory: Arc<TenantMemory>,
    pub grammars: GrammarChecks,
    pub bodies: BodyWorkers,
    pub runs: Arc<Runs>,
}

impl App {
    #[must_use]
    pub fn new(parts: AppBuilder) -> Self {
        Self {
            executors: parts.executors,
            routing: parts.routing,
            parsers: parts.parsers,
            scoring: parts.scoring,
            classes: parts.classes,
            turns: parts.turns,
            status: parts.status,
            registry: parts.registry,
            training: parts.training,
            batches: parts.batches,
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

    /// Returns the serving state, or the reason why no request can be served.
    pub(crate) fn serving(&self) -> Result<Arc<ServingState>, ServingUnavailable> {
        self.status.borrow().serving()
    }

    /// Refuses all requests from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// True if the gateway refuses all requests.
    #[must_use]
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}
