//! Metrics that an executor reports about itself.

use std::{sync::Arc, time::Instant};

use shmproto::message::{SpeculationStats, Stats, Welcome};

use super::{
    store::{Histogram, MetricStore, MetricValue},
    table::Id,
};

#[derive(Debug, Clone, Default)]
pub struct LastStats {
    pub stats: Arc<Stats>,
    /// Prompt tokens computed per second since the previous report.
    pub prompt_tokens_per_s: f64,
    /// Tokens generated per second since the previous report.
    pub generated_tokens_per_s: f64,
    at: Option<Instant>,
}

impl LastStats {
    /// Returns the last stats, if this executor process has reported before.
    pub(super) fn before(&self) -> Option<&Stats> {
        self.at.map(|_| &*self.stats)
    }

    /// Discards the last report: a new executor process counts from zero.
    pub(super) fn forget(&mut self) {
        self.at = None;
    }

    #[cfg(test)]
    pub(crate) fn of(stats: Arc<Stats>) -> Self {
        Self { stats, ..Self::default() }
    }

    pub(super) fn next(&self, stats: Stats, now: Instant) -> Self {
        let seconds = self.at.map(|at| now.duration_since(at).as_secs_f64()).filter(|seconds| *seconds > 0.0);
        let rate = |figure: fn(&Stats) -> u64| {
            let grown = grown(figure(&stats), self.before().map(figure));
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

#[derive(Debug)]
pub(super) struct ExecutorMetrics {
    up: Arc<MetricValue>,
    restarts: Arc<MetricValue>,
    waiting: Arc<MetricValue>,
    running: Arc<MetricValue>,
    kv_total: Arc<MetricValue>,
    kv_used: Arc<MetricValue>,
    kv_cached: Arc<MetricValue>,
    kv_usage: Arc<MetricValue>,
    adapter_bytes: Arc<MetricValue>,
    adapter_budget: Arc<MetricValue>,
    prompt_tokens: Arc<MetricValue>,
    cached_tokens: Arc<MetricValue>,
    generated_tokens: Arc<MetricValue>,
    draft_verifications: Arc<MetricValue>,
    draft_accepted: Arc<Histogram>,
    /// Indexed by drafter (text, model), then by verdict (accepted, rejected).
    drafted: [[Arc<MetricValue>; 2]; 2],
    ahead: [Arc<MetricValue>; 2],
    draft_hidden: Arc<MetricValue>,
    drafting: Arc<MetricValue>,
    least_confidence: Arc<MetricValue>,
    preemptions: Arc<MetricValue>,
    cancelled: Arc<MetricValue>,
    steps: Arc<MetricValue>,
}

const MICROS: f64 = 1e6;

/// Returns accepted and rejected draft tokens that no model drafted.
fn of_text(stats: &SpeculationStats) -> [u64; 2] {
    let accepted = stats.accepted.saturating_sub(stats.model_accepted);
    [accepted, stats.drafted.saturating_sub(stats.model_drafted).saturating_sub(accepted)]
}

impl ExecutorMetrics {
    pub(super) fn new(store: &MetricStore) -> Self {
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
            draft_verifications: number(Id::DraftVerifications),
            draft_accepted: store.histogram(Id::DraftAccepted, &[]),
            drafted: ["text", "model"].map(|by| {
                ["accepted", "rejected"].map(|verdict| store.number(Id::DraftedTokens, &[by, verdict]))
            }),
            ahead: ["drafted", "kept"].map(|what| store.number(Id::AheadTokens, &[what])),
            draft_hidden: number(Id::DraftHidden),
            drafting: number(Id::Drafting),
            least_confidence: number(Id::DraftLeastConfidence),
            preemptions: number(Id::Preemptions),
            cancelled: number(Id::Cancelled),
            steps: number(Id::EngineSteps),
        }
    }

    /// Updates the metrics from the executor's welcome message.
    pub(super) fn greeted(&self, welcome: &Welcome) {
        self.adapter_budget.set(float(welcome.adapter_budget_bytes));
    }

    pub(super) fn restarted(&self) {
        self.restarts.add(1.0);
    }

    /// Counts verifications by their number of accepted tokens.
    fn count_accepted(&self, now: &SpeculationStats, before: Option<&SpeculationStats>) {
        let counts = now.accepted_counts.iter().enumerate();
        let counts = counts.map(|(at, count)| grown(*count, before.map(|before| before.accepted_counts[at])));
        self.draft_accepted.add(counts, float(grown(now.accepted, before.map(|before| before.accepted))));
    }

    /// Updates the metrics with the report `now`; `before` is the previous report.
    pub(super) fn report(&self, now: &Stats, before: Option<&Stats>) {
        self.up.set(1.0);
        self.waiting.set(f64::from(now.waiting));
        self.running.set(f64::from(now.running));
        self.kv_total.set(f64::from(now.kv_blocks_total));
        self.kv_used.set(f64::from(now.kv_blocks_used));
        self.kv_cached.set(f64::from(now.kv_blocks_cached));
        self.kv_usage.set(f64::from(now.kv_blocks_used) / f64::from(now.kv_blocks_total.max(1)));
        self.adapter_bytes.set(float(now.adapter_bytes));
        self.least_confidence.set(f64::from(now.speculation.least_confidence));
        self.count_accepted(&now.speculation, before.map(|before| &before.speculation));
        let drafting = |stats: &Stats| stats.speculation.drafting_us;
        self.drafting.add(float(grown(drafting(now), before.map(drafting))) / MICROS);
        let [[by_text, not_by_text], [by_model, not_by_model]] = &self.drafted;
        let [ahead, kept] = &self.ahead;
        for (counter, figure) in [
            (&self.draft_verifications, (|stats| stats.speculation.verifications) as fn(&Stats) -> u64),
            (by_text, |stats| of_text(&stats.speculation)[0]),
            (not_by_text, |stats| of_text(&stats.speculation)[1]),
            (by_model, |stats| stats.speculation.model_accepted),
            (not_by_model, |stats| {
                stats.speculation.model_drafted.saturating_sub(stats.speculation.model_accepted)
            }),
            (ahead, |stats| stats.speculation.ahead),
            (kept, |stats| stats.speculation.kept),
            (&self.prompt_tokens, |stats| stats.prompt_tokens),
            (&self.cached_tokens, |stats| stats.cached_tokens),
            (&self.generated_tokens, |stats| stats.generated_tokens),
            (&self.preemptions, |stats| stats.preemptions),
            (&self.cancelled, |stats| stats.cancelled),
            (&self.steps, |stats| stats.steps),
        ] {
            counter.add(float(grown(figure(now), before.map(figure))));
        }
        let hidden_us = |stats: &Stats| stats.speculation.hidden_us;
        self.draft_hidden.add(float(grown(hidden_us(now), before.map(hidden_us))) * 1e-6);
    }

    /// Sets the gauges of a lost executor to zero.
    pub(super) fn lost(&self) {
        for gauge in [&self.up, &self.waiting, &self.running, &self.kv_used, &self.kv_usage] {
            gauge.set(0.0);
        }
    }
}

/// Returns the increase of a counter; a decrease means that a new executor counts from zero.
pub(super) fn grown(now: u64, before: Option<u64>) -> u64 {
    before.and_then(|before| now.checked_sub(before)).unwrap_or(now)
}

#[expect(clippy::cast_precision_loss, reason = "figures are floating point; counts stay below 2^53")]
pub(super) fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shmproto::message::ACCEPTED_BOUNDS;

    use super::{super::table::ACCEPTED, *};

    #[test]
    fn what_verifications_accept_is_told_in_the_classes_in_which_executors_count_it() {
        assert_eq!(ACCEPTED, ACCEPTED_BOUNDS.map(float));
    }

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
        let first = LastStats::default().next(stats(100), start);
        assert!(first.generated_tokens_per_s.abs() < f64::EPSILON, "one report has no rate");
        let second = first.next(stats(150), start + Duration::from_secs(2));
        assert!((second.generated_tokens_per_s - 25.0).abs() < 1e-9);
    }
}
