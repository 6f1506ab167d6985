//! Opens the bases of the gateway: registry, connections, admission queue and metrics of each.

use std::sync::Arc;

use scheduling::{clock::SystemClock, routing::RoutingPolicy};
use tokio::sync::watch;

use super::RunError;
use crate::{
    adapters::{self, AdapterListing, Registry},
    admission_queue::AdmissionQueue,
    app::{App, SharedState},
    config::{BaseConfig, GatewayConfig, bases as bases_config},
    executor::SharedConnections,
    executors::Executors,
    lifecycle::{GatewayReadiness, Lifecycle, LoadText},
    metrics::GatewayMetrics,
    served_base::ServedBase,
    service_classes::ServiceClasses,
};

/// Returns the settings with which the registry of a base is opened.
fn options(config: &GatewayConfig, base: &BaseConfig) -> adapters::RegistryOptions {
    adapters::RegistryOptions {
        state: match base.is_first {
            true => config.state.clone(),
            false => bases_config::state_of(&config.state, &base.name),
        },
        adapter_root: config.adapter_root.clone(),
        max_adapters: config.max_adapters,
        max_adapter_file_bytes: config.max_adapter_file_bytes,
        tenant_bytes: config.training.tenant_state_bytes,
        ephemeral: config.ephemeral.clone(),
        remote: config.remote.clone(),
        fleet: config.fleet.clone(),
    }
}

/// Creates the metrics of all bases.
pub(super) fn metrics_of(config: &GatewayConfig) -> Vec<Arc<GatewayMetrics>> {
    if !config.bases.others.is_empty() {
        return GatewayMetrics::of_bases(&config.telemetry, &config.all_bases());
    }
    let names: Vec<_> = config.executors.iter().map(|address| address.name.as_str()).collect();
    vec![Arc::new(GatewayMetrics::new(&config.telemetry, &names))]
}

/// A base whose registry is open, and which does not serve yet.
pub(super) struct OpenBase {
    config: BaseConfig,
    base: Arc<ServedBase>,
    executors: Executors,
    pub(super) registry: Arc<Registry>,
    lifecycle: Lifecycle,
    pub(super) status: watch::Receiver<GatewayReadiness>,
    pub(super) admission: AdmissionQueue,
    metrics: Arc<GatewayMetrics>,
}

impl OpenBase {
    async fn open(
        config: &GatewayConfig,
        base_config: BaseConfig,
        (common, metrics): (SharedConnections, Arc<GatewayMetrics>),
        classes: &Arc<ServiceClasses>,
        load_text: LoadText,
    ) -> Result<Self, RunError> {
        let base = ServedBase::new(
            base_config.name.clone(),
            base_config.served_model_name.clone(),
            base_config.sleep.clone(),
            config.bases.supervisor.clone(),
        );
        let executors = Executors::connect(&base_config.executors, config.executor, &common);
        let registry = Registry::open(executors.clone(), options(config, &base_config)).await?;
        let (connected, known) = (executors.clone(), Arc::clone(&registry));
        let (lifecycle, status) =
            Lifecycle::new(&base_config, Arc::clone(&base), connected, known, load_text);
        let (classes, clock) = (Arc::clone(classes), Arc::new(SystemClock));
        let admission = AdmissionQueue::new(executors.clone(), classes, config.admission, clock);
        Ok(Self { config: base_config, base, executors, registry, lifecycle, status, admission, metrics })
    }

    /// Returns the state of the base's handlers, and the lifecycle that starts serving.
    pub(super) fn into_app(self, routing: RoutingPolicy, shared: &Arc<SharedState>) -> (Arc<App>, Lifecycle) {
        let app = App {
            shared: Arc::clone(shared),
            base: self.base,
            is_first: self.config.is_first,
            executors: self.executors,
            routing,
            parsers: self.config.parsers,
            scoring: self.config.scoring,
            admission: self.admission,
            status: self.status,
            registry: self.registry,
            metrics: self.metrics,
            listing: AdapterListing::default(),
        };
        (Arc::new(app), self.lifecycle)
    }
}

/// Opens all bases, the first one first.
pub(super) async fn open_bases(
    config: &GatewayConfig,
    metrics: Vec<Arc<GatewayMetrics>>,
    mut common: SharedConnections,
    classes: &Arc<ServiceClasses>,
    load_text: &LoadText,
) -> Result<Vec<OpenBase>, RunError> {
    let mut opened = Vec::new();
    for (base, metrics) in config.all_bases().into_iter().zip(metrics) {
        opened.push(OpenBase::open(config, base, (common, metrics), classes, Arc::clone(load_text)).await?);
        // Only the first base publishes KV events; the capacity of each base is its own.
        common = SharedConnections::default();
    }
    Ok(opened)
}
