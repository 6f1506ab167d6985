//! State of the request handlers: that of one base, and what all bases share.

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use receipts::SigningKey;
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
    served_base::ServedBase,
    service_classes::ServiceClasses,
    telemetry::Sinks,
    tenant_memory::TenantMemory,
    training::{Training, records::JobStatus, stats::JobInProgress},
    training_sessions::Runs,
};

/// State of all bases: keys, limits, and what requests keep.
#[derive(Debug)]
pub struct SharedState {
    pub classes: Arc<ServiceClasses>,
    /// Training files and fine-tuning jobs of the first base.
    pub training: Arc<Training>,
    /// Files of requests that are answered in the background.
    pub batches: Arc<Batches>,
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
    /// Adapters of the first base that clients train step by step over Tinker's API.
    pub runs: Arc<Runs>,
    /// Responses that a client may continue with `previous_response_id`.
    pub kept: Arc<ResponseStore>,
    /// Threads that process long bodies.
    pub bodies: BodyWorkers,
    /// Key that signs the receipts of answers.
    pub receipt_key: Arc<SigningKey>,
    pub lifetime: GatewayLifetime,
}

/// Start and end of the process.
#[derive(Debug)]
pub struct GatewayLifetime {
    /// Time when the process began to listen, for its uptime.
    pub started: Instant,
    /// Random number of this process; another process at the same address has a different one.
    pub instance: u64,
    draining: AtomicBool,
}

/// State of the handlers of one base; dereferences to the state of all bases.
#[derive(Debug)]
pub struct App {
    pub shared: Arc<SharedState>,
    /// Name of the base, its users, and whether it sleeps.
    pub base: Arc<ServedBase>,
    /// Whether the base is the first, which alone has training.
    pub is_first: bool,
    /// Connections to the executors; clones share them.
    pub executors: Executors,
    pub routing: RoutingPolicy,
    /// Parsers of reasoning content and tool calls in the model's output.
    pub parsers: OutputParsers,
    /// Tokens and prompt of scoring requests that name none.
    pub scoring: ScoringDefaults,
    pub admission: AdmissionQueue,
    /// Whether requests can be served, and the tokenizer and base that serve them.
    pub status: watch::Receiver<GatewayReadiness>,
    /// Adapters by name, with the place of their files.
    pub registry: Arc<Registry>,
    /// Metrics that Prometheus reads.
    pub metrics: Arc<GatewayMetrics>,
    /// Adapter lists that `/v1/load` reports to the endpoint picker.
    pub(crate) listing: AdapterListing,
}

/// Web origins that may call the gateway, and host names under which it answers.
#[derive(Debug)]
pub struct AllowedOrigins {
    /// Host names under which a gateway without keys answers.
    pub hosts: AllowedHosts,
    /// Origins of foreign web pages that may call the gateway.
    pub allowed: Vec<String>,
}

impl GatewayLifetime {
    #[must_use]
    pub fn begin() -> Self {
        Self { started: Instant::now(), instance: random_u64(), draining: AtomicBool::new(false) }
    }
}

impl SharedState {
    /// Refuses all requests from now on.
    pub(crate) fn drain(&self) {
        self.lifetime.draining.store(true, Ordering::Relaxed);
    }

    /// True if the gateway refuses all requests.
    #[must_use]
    pub(crate) fn is_draining(&self) -> bool {
        self.lifetime.draining.load(Ordering::Relaxed)
    }
}

impl Deref for App {
    type Target = SharedState;

    fn deref(&self) -> &SharedState {
        &self.shared
    }
}

impl App {
    /// Returns the serving state, or the reason why no request can be served.
    pub(crate) fn serving(&self) -> Result<Arc<ServingState>, ServingUnavailable> {
        self.status.borrow().serving()
    }

    /// Returns the serving state of a base that serves, or its last one if the base sleeps.
    pub(crate) fn last_serving(&self) -> Result<Arc<ServingState>, ServingUnavailable> {
        match &*self.status.borrow() {
            GatewayReadiness::Asleep(Some(last)) => Ok(Arc::clone(last)),
            now => now.serving(),
        }
    }

    /// Whether fine-tuning jobs or models of Tinker's API need the base, which must be the first.
    pub(crate) fn trains(&self) -> bool {
        let is_active = |job: &JobInProgress| job.job.status != JobStatus::Paused;
        self.is_first
            && (self.training.under_way().iter().any(is_active) || !self.runs.book.active_models().is_empty())
    }

    /// Whether requests, training or split clients use the base.
    pub(crate) fn is_busy(&self) -> bool {
        self.admission.queued() > 0
            || self.executors.all().iter().any(|member| member.executor().load().held > 0)
            || self.metrics.reported().iter().any(|report| report.stats.layers.open > 0)
            || self.trains()
    }
}
