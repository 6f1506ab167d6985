//! What the executor reports each second, and what its connection tells.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use shmproto::message::Stats;
use tokio::time::MissedTickBehavior;

use super::{
    Metrics,
    store::{Number, Store},
    table::Id,
};
use crate::{adapters::Registry, app::App, executor::link::Link, lifecycle::Status};

/// How often the executor is asked.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What the executor said last.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Its figures.
    pub stats: Arc<Stats>,
    /// Prompt tokens computed, a second, since the report before.
    pub prompt_tokens_per_s: f64,
    /// Tokens generated, a second, since the report before.
    pub generated_tokens_per_s: f64,
    at: Option<Instant>,
}

impl Report {
    fn next(&self, stats: Stats, now: Instant) -> Self {
        let seconds = self.at.map(|at| now.duration_since(at).as_secs_f64()).filter(|seconds| *seconds > 0.0);
        let rate = |figure: fn(&Stats) -> u64| {
            let grown = grown(figure(&stats), self.at.map(|_| figure(&self.stats)));
            seconds.map_or(0.0, |seconds| float(grown) / seconds)
        };
        let (prompt, generated) = (rate(|stats| stats.prompt_tokens), rate(|stats| stats.generated_tokens));
        Self {
            stats: Arc::new(stats),
            prompt_tokens_per_s: prompt,
            generated_tokens_per_s: generated,
            at: Some(now),
        }
    }
}

/// The figures, ready to be changed.
#[derive(Debug)]
pub(super) struct ExecutorFigures {
    up: Arc<Number>,
    restarts: Arc<Number>,
    waiting: Arc<Number>,
    running: Arc<Number>,
    kv_total: Arc<Number>,
    kv_used: Arc<Number>,
    kv_cached: Arc<Number>,
    kv_usage: Arc<Number>,
    adapter_bytes: Arc<Number>,
    adapter_budget: Arc<Number>,
    prompt_tokens: Arc<Number>,
    cached_tokens: Arc<Number>,
    generated_tokens: Arc<Number>,
    preemptions: Arc<Number>,
    cancelled: Arc<Number>,
    steps: Arc<Number>,
}

impl ExecutorFigures {
    pub(super) fn new(store: &Store) -> Self {
        let number = |id| store.number(id, &[]);
        let kv = |state| store.number(Id::KvBlocks, &[state]);
        Self {
            up: number(Id::ExecutorUp),
            restarts: number(Id::ExecutorRestarts),
            waiting: number(Id::Waiting),
            running: number(Id::Running),
            kv_total: kv("total"),
            kv_used: kv("used"),
            kv_cached: kv("cached"),
            kv_usage: number(Id::KvUsage),
            adapter_bytes: number(Id::AdapterBytes),
            adapter_budget: number(Id::AdapterBudget),
            prompt_tokens: number(Id::ComputedPromptTokens),
            cached_tokens: number(Id::ReusedTokens),
            generated_tokens: number(Id::ComputedTokens),
            preemptions: number(Id::Preemptions),
            cancelled: number(Id::Cancelled),
            steps: number(Id::EngineSteps),
        }
    }

    fn report(&self, now: &Stats, before: Option<&Stats>) {
        self.up.set(1.0);
        self.waiting.set(f64::from(now.waiting));
        self.running.set(f64::from(now.running));
        self.kv_total.set(f64::from(now.kv_blocks_total));
        self.kv_used.set(f64::from(now.kv_blocks_used));
        self.kv_cached.set(f64::from(now.kv_blocks_cached));
        self.kv_usage.set(f64::from(now.kv_blocks_used) / f64::from(now.kv_blocks_total.max(1)));
        self.adapter_bytes.set(float(now.adapter_bytes));
        for (counter, figure) in [
            (&self.prompt_tokens, (|stats| stats.prompt_tokens) as fn(&Stats) -> u64),
            (&self.cached_tokens, |stats| stats.cached_tokens),
            (&self.generated_tokens, |stats| stats.generated_tokens),
            (&self.preemptions, |stats| stats.preemptions),
            (&self.cancelled, |stats| stats.cancelled),
            (&self.steps, |stats| stats.steps),
        ] {
            counter.add(float(grown(figure(now), before.map(figure))));
        }
    }

    /// Nothing runs in an executor that is not there.
    fn lost(&self) {
        for gauge in [&self.up, &self.waiting, &self.running, &self.kv_used, &self.kv_usage] {
            gauge.set(0.0);
        }
    }
}

impl Metrics {
    /// Takes over what the executor reported about itself and about adapters of `registry`.
    pub fn report(&self, stats: Stats, registry: &Registry) {
        let mut latest = self.latest();
        let before = latest.at.map(|_| &*latest.stats);
        self.executor.report(&stats, before);
        self.report_placement(&stats, before, registry);
        self.report_layers(&stats, before);
        let next = latest.next(stats, Instant::now());
        *latest = next;
    }

    /// Takes over what the connected executor says of itself; `instance` is the one that was seen last.
    fn see(&self, link: &Link, instance: &mut Option<u64>) {
        let Link::Up { welcome, .. } = link else { return };
        self.executor.adapter_budget.set(float(welcome.adapter_budget_bytes));
        self.greeted(welcome);
        self.max_running.store(welcome.max_running, Relaxed);
        if instance.replace(welcome.instance).is_some_and(|before| before != welcome.instance) {
            self.executor_restarted();
        }
    }

    /// Says that the executor is not there.
    pub fn executor_lost(&self) {
        self.executor.lost();
        self.placement.lost();
        self.layers.lost();
        self.store.retain(Id::LayerWaitingRows, |_| false);
    }

    /// Says that another executor process is there than before: its counters began at zero.
    pub fn executor_restarted(&self) {
        self.latest().at = None;
        self.executor.restarts.add(1.0);
    }
}

/// Asks the executor for its figures, as long as there is one, and watches which process it is.
pub async fn poll(app: Arc<App>) {
    let metrics = &app.metrics;
    let (mut link, mut status) = (app.executor.link(), app.status.clone());
    let mut instance = None;
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        metrics.see(&link.borrow_and_update(), &mut instance);
        if let Status::Ready(serving) = &*status.borrow_and_update() {
            metrics.serves(&serving.base_name);
        }
        tokio::select! {
            _ = ticks.tick() => match app.executor.stats().await {
                Ok(stats) => {
                    // Whose figures they are must be known before they are counted.
                    metrics.see(&link.borrow(), &mut instance);
                    metrics.report(stats, &app.registry);
                }
                Err(_) => metrics.executor_lost(),
            },
            changed = link.changed() => if changed.is_err() { return },
            changed = status.changed() => if changed.is_err() { return },
        }
    }
}

/// What to add to a counter. A smaller figure than before is that of another executor, which began at zero.
pub(super) fn grown(now: u64, before: Option<u64>) -> u64 {
    before.and_then(|before| now.checked_sub(before)).unwrap_or(now)
}

#[expect(clippy::cast_precision_loss, reason = "figures are floating point; counts stay below 2^53")]
pub(super) fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_goes_on_growing_when_the_executor_starts_again() {
        assert_eq!(grown(10, None), 10);
        assert_eq!(grown(25, Some(10)), 15);
        assert_eq!(grown(3, Some(25)), 3);
    }

    #[test]
    fn rates_are_of_the_time_between_two_reports() {
        let (start, stats) =
            (Instant::now(), |generated_tokens| Stats { generated_tokens, ..Stats::default() });
        let first = Report::default().next(stats(100), start);
        assert!(first.generated_tokens_per_s.abs() < f64::EPSILON, "one report has no rate");
        let second = first.next(stats(150), start + Duration::from_secs(2));
        assert!((second.generated_tokens_per_s - 25.0).abs() < 1e-9);
    }
}
