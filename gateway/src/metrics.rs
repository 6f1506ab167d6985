//! Figures for Prometheus: what the gateway sees itself, and what the executor reports each second.
//!
//! Names begin with `holobiont_` and use base units. The one exception is `vllm:lora_requests_info`, which
//! request routers know; its labels are lists, so it is written by hand instead of leaving a series behind for
//! every list there ever was. There is no global recorder: two gateways in one process do not mix their figures.

use std::{
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder as _, SharedString, Unit,
};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use shmproto::message::Stats;

use crate::{adapters::Registry, executor::Executor};

/// How often the executor is asked.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Most adapters named in `vllm:lora_requests_info`.
const MAX_NAMED_ADAPTERS: usize = 256;
/// Bounds of the histograms, in seconds.
const BUCKETS_S: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);

/// Every figure, ready to be changed.
pub struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    first_token: Histogram,
    between_tokens: Histogram,
    duration: Histogram,
    in_flight: Gauge,
    executor: ExecutorFigures,
    latest: Mutex<Option<Stats>>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// What the executor reports.
struct ExecutorFigures {
    up: Gauge,
    waiting: Gauge,
    running: Gauge,
    kv_total: Gauge,
    kv_used: Gauge,
    kv_cached: Gauge,
    adapter_bytes: Gauge,
    adapters: Gauge,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    preemptions: Counter,
    cancelled: Counter,
    steps: Counter,
}

impl Metrics {
    /// All figures at zero.
    #[must_use]
    pub fn new() -> Self {
        let builder = PrometheusBuilder::new().set_buckets(BUCKETS_S);
        // Fails only for an empty list of bounds.
        let recorder = builder.unwrap_or_default().build_recorder();
        let figures = Figures { recorder: &recorder };
        Self {
            handle: recorder.handle(),
            first_token: figures
                .seconds("holobiont_time_to_first_token_seconds", "From request to first token"),
            between_tokens: figures
                .seconds("holobiont_time_between_tokens_seconds", "From one output to the next, by token"),
            duration: figures.seconds("holobiont_request_duration_seconds", "From request to last token"),
            in_flight: figures.gauge(
                "holobiont_requests_in_flight",
                "Generation requests being answered",
                &[],
            ),
            executor: ExecutorFigures::new(&figures),
            latest: Mutex::new(None),
            recorder,
        }
    }

    /// Counts an answer.
    pub fn answered(&self, route: &'static str, status: u16) {
        let labels = vec![Label::from_static_parts("route", route), Label::new("status", status.to_string())];
        let key = Key::from_parts("holobiont_http_requests_total", labels);
        self.recorder.register_counter(&key, &METADATA).increment(1);
    }

    /// Takes over what the executor reported.
    pub fn report(&self, stats: Stats) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        self.executor.report(&stats, latest.as_ref());
        *latest = Some(stats);
        self.handle.run_upkeep();
    }

    /// Says that the executor is not there.
    pub fn executor_lost(&self) {
        self.executor.up.set(0.0);
    }

    /// The text that Prometheus reads.
    #[must_use]
    pub fn render(&self, registry: &Registry) -> String {
        let mut text = self.handle.render();
        self.write_lora_info(registry, &mut text);
        text
    }

    /// vLLM's gauge: its value is a time, its labels name the adapters in use. The executor does not say which
    /// requests wait, so all of them are listed as running.
    fn write_lora_info(&self, registry: &Registry, out: &mut String) {
        let entries = registry.entries();
        let busy = entries.values().filter(|entry| entry.requests() > 0);
        let names: Vec<String> =
            busy.take(MAX_NAMED_ADAPTERS).map(|entry| escape(&entry.record.name)).collect();
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "# HELP vllm:lora_requests_info Adapters in use; the value is the time of this line.\n\
             # TYPE vllm:lora_requests_info gauge\n\
             vllm:lora_requests_info{{max_lora=\"{}\",running_lora_adapters=\"{}\",waiting_lora_adapters=\"\"}} {}\n",
            entries.len(),
            names.join(","),
            crate::seconds_since_1970(),
        );
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// A label's value as Prometheus wants it.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Registers figures with their descriptions.
struct Figures<'a> {
    recorder: &'a PrometheusRecorder,
}

impl Figures<'_> {
    fn seconds(&self, name: &'static str, help: &'static str) -> Histogram {
        self.recorder.describe_histogram(
            KeyName::from(name),
            Some(Unit::Seconds),
            SharedString::const_str(help),
        );
        self.recorder.register_histogram(&Key::from_static_name(name), &METADATA)
    }

    fn gauge(&self, name: &'static str, help: &'static str, labels: &'static [Label]) -> Gauge {
        self.recorder.describe_gauge(KeyName::from(name), None, SharedString::const_str(help));
        self.recorder.register_gauge(&Key::from_static_parts(name, labels), &METADATA)
    }

    fn counter(&self, name: &'static str, help: &'static str) -> Counter {
        self.recorder.describe_counter(KeyName::from(name), None, SharedString::const_str(help));
        self.recorder.register_counter(&Key::from_static_name(name), &METADATA)
    }
}

impl ExecutorFigures {
    fn new(figures: &Figures<'_>) -> Self {
        const TOTAL: &[Label] = &[Label::from_static_parts("state", "total")];
        const USED: &[Label] = &[Label::from_static_parts("state", "used")];
        const CACHED: &[Label] = &[Label::from_static_parts("state", "cached")];
        let kv = |labels| figures.gauge("holobiont_kv_blocks", "KV blocks of the pool, by state", labels);
        Self {
            up: figures.gauge("holobiont_executor_up", "1 while the base-executor is connected", &[]),
            waiting: figures.gauge("holobiont_requests_waiting", "Sequences waiting for admission", &[]),
            running: figures.gauge("holobiont_requests_running", "Sequences being computed", &[]),
            kv_total: kv(TOTAL),
            kv_used: kv(USED),
            kv_cached: kv(CACHED),
            adapter_bytes: figures.gauge("holobiont_adapter_bytes", "Bytes of resident adapters", &[]),
            adapters: figures.gauge("holobiont_adapters_resident", "Resident adapters", &[]),
            prompt_tokens: figures.counter("holobiont_prompt_tokens_total", "Prompt tokens computed"),
            cached_tokens: figures
                .counter("holobiont_cached_tokens_total", "Prompt tokens from the prefix cache"),
            generated_tokens: figures.counter("holobiont_generated_tokens_total", "Tokens generated"),
            preemptions: figures
                .counter("holobiont_preemptions_total", "Sequences put back for want of KV blocks"),
            cancelled: figures.counter("holobiont_cancelled_total", "Sequences cancelled by their callers"),
            steps: figures.counter("holobiont_engine_steps_total", "Engine steps"),
        }
    }

    fn report(&self, now: &Stats, before: Option<&Stats>) {
        self.up.set(1.0);
        self.waiting.set(f64::from(now.waiting));
        self.running.set(f64::from(now.running));
        self.kv_total.set(f64::from(now.kv_blocks_total));
        self.kv_used.set(f64::from(now.kv_blocks_used));
        self.kv_cached.set(f64::from(now.kv_blocks_cached));
        #[expect(clippy::cast_precision_loss, reason = "gauges are floating point; sizes stay below 2^53")]
        self.adapter_bytes.set(now.adapter_bytes as f64);
        self.adapters.set(u32::try_from(now.adapters.len()).map_or(f64::INFINITY, f64::from));
        for (counter, figure) in [
            (&self.prompt_tokens, (|stats| stats.prompt_tokens) as fn(&Stats) -> u64),
            (&self.cached_tokens, |stats| stats.cached_tokens),
            (&self.generated_tokens, |stats| stats.generated_tokens),
            (&self.preemptions, |stats| stats.preemptions),
            (&self.cancelled, |stats| stats.cancelled),
            (&self.steps, |stats| stats.steps),
        ] {
            counter.increment(grown(figure(now), before.map(figure)));
        }
    }
}

/// What to add to a counter. A smaller figure than before is that of another executor, which began at zero.
fn grown(now: u64, before: Option<u64>) -> u64 {
    before.and_then(|before| now.checked_sub(before)).unwrap_or(now)
}

/// Asks the executor for its figures as long as there is one.
pub async fn poll(metrics: Arc<Metrics>, executor: Executor) {
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match executor.stats().await {
            Ok(stats) => metrics.report(stats),
            Err(_) => metrics.executor_lost(),
        }
    }
}

/// Measures one generation request from its start until it is dropped.
#[derive(Debug)]
pub struct GenerationTimer {
    metrics: Arc<Metrics>,
    started: Instant,
    last: Option<Instant>,
}

impl GenerationTimer {
    /// A request that started at `started`.
    #[must_use]
    pub fn start(metrics: Arc<Metrics>, started: Instant) -> Self {
        metrics.in_flight.increment(1.0);
        Self { metrics, started, last: None }
    }

    /// Notes that `count` tokens have come.
    pub fn tokens(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let now = Instant::now();
        match self.last.replace(now) {
            None => self.metrics.first_token.record(now - self.started),
            Some(last) => {
                let count = u32::try_from(count).unwrap_or(u32::MAX);
                self.metrics.between_tokens.record((now - last) / count);
            }
        }
    }
}

impl Drop for GenerationTimer {
    fn drop(&mut self) {
        self.metrics.in_flight.decrement(1.0);
        self.metrics.duration.record(self.started.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::grown;

    #[test]
    fn a_counter_goes_on_growing_when_the_executor_starts_again() {
        assert_eq!(grown(10, None), 10);
        assert_eq!(grown(25, Some(10)), 15);
        assert_eq!(grown(3, Some(25)), 3);
    }
}
