//! Prometheus metrics: the gateway's own, and those that executors report each second.
//!
//! # Modules
//!
//! - [`table`]: the definitions of all metrics; no other metric is written.
//! - [`store`]: the series; [`text`]: the text format.
//! - [`meter`]: measures one generation request; [`labels`]: metrics by adapter, for a bounded number of
//!   adapters.
//! - [`poll`]: polls executors each second. [`executor`]: an executor's own metrics; [`placement`]: adapters
//!   on the device and cold starts; [`layers`]: split clients.
//! - `memory`: tiers of the KV cache and host memory; `member`: all metrics of one executor.
//! - `classes`: service classes. [`residents`]: registered adapters; [`process`]: resources of the gateway
//!   process. `sleep`: the sleep of bases.
//! - [`aliases`], [`lora_info`]: vLLM's metric names.
//!
//! With several executors, their metrics have the label `executor`; with one, they have none. A sum over
//! executors is the same query in both cases.
//!
//! There is no global recorder: two gateways in one process do not mix their metrics. No metric has a tenant
//! label. Reading metrics needs a key of the role `metrics` or `admin`.

pub mod aliases;
mod classes;
pub mod executor;
pub(crate) mod labels;
mod layers;
mod lora_info;
mod member;
mod memory;
pub(crate) mod meter;
mod placement;
pub(crate) mod poll;
mod process;
mod residents;
mod sleep;
pub mod store;
pub mod table;
pub(crate) mod text;

use std::sync::{Arc, Mutex, PoisonError};

pub use self::executor::LastStats;
use self::{
    aliases::write_aliases,
    labels::AdapterLabels,
    member::PerExecutorMetrics,
    process::ProcessMetrics,
    store::{Histogram, MetricStore, MetricValue},
    table::{IDS, Id, MetricKind},
    text::{SeriesRows, write_family},
};
use crate::{
    adapters::Registry,
    admission_queue::AdmissionQueue,
    batches::Batches,
    config::{BaseConfig, MetricNames, TelemetryConfig},
    executors::ONLY,
    served_base::ServedBase,
    service_classes::ServiceClasses,
    training::Training,
};

/// Parts of one base that metrics report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReportedBase<'a> {
    pub base: &'a ServedBase,
    pub metrics: &'a GatewayMetrics,
    pub registry: &'a Registry,
    pub admission: &'a AdmissionQueue,
}

#[derive(Debug)]
pub struct GatewayMetrics {
    store: Arc<MetricStore>,
    names: MetricNames,
    adapters: Arc<AdapterLabels>,
    executors: Vec<PerExecutorMetrics>,
    process: ProcessMetrics,
    in_flight: Arc<MetricValue>,
    prompt_tokens: Arc<MetricValue>,
    generated_tokens: Arc<MetricValue>,
    cached_tokens: Arc<MetricValue>,
    redone: Arc<MetricValue>,
    first_token: Arc<Histogram>,
    per_token: Arc<Histogram>,
    inter_token: Arc<Histogram>,
    queue: Arc<Histogram>,
    load_wait: Arc<Histogram>,
    kv_wait: Arc<Histogram>,
    duration: Arc<Histogram>,
    base_model: Mutex<String>,
}

impl GatewayMetrics {
    /// Creates all metrics at zero; the metrics of a single executor have no label.
    #[must_use]
    pub fn new(telemetry: &TelemetryConfig, executors: &[&str]) -> Self {
        let store = Arc::new(MetricStore::new());
        let adapters = Arc::new(AdapterLabels::new(&store, telemetry.max_adapter_labels));
        let executors = match executors {
            [_] => vec![PerExecutorMetrics::new(Arc::clone(&store), None, telemetry, 0)],
            several => labelled(telemetry, several),
        };
        Self::with(store, telemetry.names, adapters, executors)
    }

    /// Creates the metrics of several bases. The bases share all metrics except those of their executors,
    /// which have labels.
    #[must_use]
    pub(crate) fn of_bases(telemetry: &TelemetryConfig, bases: &[BaseConfig]) -> Vec<Arc<Self>> {
        let store = Arc::new(MetricStore::new());
        let adapters = Arc::new(AdapterLabels::new(&store, telemetry.max_adapter_labels));
        let of_base = |base: &BaseConfig| {
            let telemetry =
                TelemetryConfig { expected_workers: base.expected_workers.clone(), ..telemetry.clone() };
            let names: Vec<&str> = base.executors.iter().map(|address| address.name.as_str()).collect();
            let executors = labelled(&telemetry, &names);
            Arc::new(Self::with(Arc::clone(&store), telemetry.names, Arc::clone(&adapters), executors))
        };
        bases.iter().map(of_base).collect()
    }

    fn with(
        store: Arc<MetricStore>,
        names: MetricNames,
        adapters: Arc<AdapterLabels>,
        executors: Vec<PerExecutorMetrics>,
    ) -> Self {
        let metrics = Self {
            names,
            adapters,
            executors,
            process: ProcessMetrics::new(&store),
            in_flight: store.number(Id::InFlight, &[]),
            prompt_tokens: store.number(Id::PromptTokens, &[]),
            generated_tokens: store.number(Id::GeneratedTokens, &[]),
            cached_tokens: store.number(Id::CachedTokens, &[]),
            redone: store.number(Id::RedoneSequences, &[]),
            first_token: store.histogram(Id::TimeToFirstToken, &[]),
            per_token: store.histogram(Id::TimePerOutputToken, &[]),
            inter_token: store.histogram(Id::InterToken, &[]),
            queue: store.histogram(Id::QueueTime, &[]),
            load_wait: store.histogram(Id::AdapterLoadWait, &[]),
            kv_wait: store.histogram(Id::KvWait, &[]),
            duration: store.histogram(Id::RequestDuration, &[]),
            base_model: Mutex::default(),
            store,
        };
        metrics.begin_at_zero();
        metrics.serves("");
        metrics
    }

    /// Creates all counters at zero, because `rate()` misses the first step of a counter that appears late.
    fn begin_at_zero(&self) {
        let is_told_by_executor = |id: Id| {
            let mut labelled = self.executors.iter().filter(|executor| executor.label().is_some());
            labelled.any(|executor| !executor.store.family(id).is_empty())
        };
        for id in IDS.iter().filter(|id| !is_told_by_executor(**id)) {
            let metric = id.metric();
            match metric.kind {
                MetricKind::Counter if metric.labels.is_empty() => drop(self.store.number(*id, &[])),
                MetricKind::Histogram(_) if metric.labels.is_empty() => drop(self.store.histogram(*id, &[])),
                _ => {}
            }
        }
        for reason in ["stop", "length", "tool_calls", "cancelled", "error"] {
            drop(self.store.number(Id::Finished, &[reason]));
        }
    }

    pub fn answered(&self, route: &str, status: u16) {
        self.store.number(Id::HttpRequests, &[route, &status.to_string()]).add(1.0);
    }

    /// Counts an error by its stable code.
    pub fn failed(&self, code: &'static str) {
        self.store.number(Id::Errors, &[code]).add(1.0);
    }

    pub fn refused(&self, reason: &'static str) {
        self.store.number(Id::Refusals, &[reason]).add(1.0);
    }

    /// Counts a sequence that resumes after its executor was lost.
    pub(crate) fn redone(&self) {
        self.redone.add(1.0);
    }

    pub(crate) fn serves(&self, base_model: &str) {
        let mut known = self.base_model.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *known, base_model.to_owned());
        self.store.retain(Id::Build, |labels| labels[1] != before);
        self.store.number(Id::Build, &[env!("CARGO_PKG_VERSION"), base_model]).set(1.0);
    }

    /// Returns the configured number of workers of the executor at `index`.
    #[must_use]
    pub fn expected_workers(&self, index: usize) -> u32 {
        self.executors.get(index).map_or(0, PerExecutorMetrics::expected_workers)
    }

    /// Returns the last stats of each executor, in order; zeros before the first report.
    #[must_use]
    pub fn reported(&self) -> Vec<LastStats> {
        self.executors.iter().map(|executor| executor.latest().clone()).collect()
    }

    /// Writes the metrics of all `bases`, of which this is the first.
    #[must_use]
    pub(crate) fn render(
        &self,
        bases: &[ReportedBase<'_>],
        (training, batches): (&Training, &Batches),
        classes: &ServiceClasses,
    ) -> String {
        self.process.refresh();
        let names = self.refresh_residents(bases);
        self.refresh_loads(bases);
        self.refresh_training(training);
        self.refresh_batches(batches);
        self.refresh_classes(classes, bases);
        self.refresh_sleep(bases);
        let mut text = String::with_capacity(32 * 1024);
        for id in IDS {
            write_family(&mut text, id.metric().name, id.metric(), None, &self.series(bases, *id));
        }
        if self.names == MetricNames::WithVllm {
            let base_model = self.base_model.lock().unwrap_or_else(PoisonError::into_inner).clone();
            write_aliases(&mut text, &base_model, |id| self.series(bases, id));
        }
        let executors = || bases.iter().flat_map(|base| &base.metrics.executors);
        let max_running = executors().map(PerExecutorMetrics::max_running).fold(0, u32::saturating_add);
        let reports: Vec<LastStats> = executors().map(|executor| executor.latest().clone()).collect();
        lora_info::write(&mut text, max_running, &reports, &names);
        text
    }

    /// Returns the series of a metric: unlabelled ones first, then those of each labelled executor.
    fn series<'a>(&'a self, bases: &[ReportedBase<'a>], id: Id) -> Vec<SeriesRows<'a>> {
        let own = SeriesRows { executor: None, family: self.store.family(id) };
        let executors = bases.iter().flat_map(|base| &base.metrics.executors);
        let labelled = executors.filter(|executor| executor.label().is_some());
        let rows = |of| SeriesRows { executor: PerExecutorMetrics::label(of), family: of.store.family(id) };
        std::iter::once(own).chain(labelled.map(rows)).collect()
    }
}

fn labelled(telemetry: &TelemetryConfig, executors: &[&str]) -> Vec<PerExecutorMetrics> {
    let of =
        |(index, name): (usize, &&str)| PerExecutorMetrics::new(Arc::default(), Some(name), telemetry, index);
    executors.iter().enumerate().map(of).collect()
}

impl Default for GatewayMetrics {
    fn default() -> Self {
        Self::new(&TelemetryConfig::default(), &[ONLY])
    }
}
