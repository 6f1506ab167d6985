//! Measures one generation request from its start until it is dropped, however it ends.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use shmproto::message::Output;

use super::{GatewayMetrics, labels::AdapterMetrics, store::Histogram, table::Id};
use crate::{
    service_classes::{ClassId, Objective, ServiceClasses},
    usage::{FinishReason, Usage},
};

/// The tokens of one choice in time.
#[derive(Debug, Clone, Default)]
struct Clock {
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: u32,
    ended: bool,
}

/// What a sequence waited for before it was admitted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AdmissionWaits {
    /// All of it.
    pub queued: Duration,
    /// Until its adapter was on the device.
    pub adapter: Duration,
    /// Until keys and values had come back from a lower tier.
    pub kv: Duration,
}

impl AdmissionWaits {
    /// As the first output of a sequence says.
    #[must_use]
    pub fn of(output: &Output) -> Self {
        let [queued, adapter, kv] =
            [output.queued_us, output.load_wait_us, output.kv_wait_us].map(Duration::from_micros);
        Self { queued, adapter, kv }
    }

    /// The part that was a wait for its turn.
    #[must_use]
    pub fn alone(&self) -> Duration {
        self.queued.saturating_sub(self.adapter + self.kv)
    }
}

/// What is counted so far.
#[derive(Debug, Clone, Copy, Default)]
struct CountedTokens {
    prompt: usize,
    generated: usize,
    cached: usize,
}

/// See the module's description.
#[derive(Debug)]
pub struct Meter {
    metrics: Arc<GatewayMetrics>,
    adapter: Arc<AdapterMetrics>,
    classes: Arc<ServiceClasses>,
    class: ClassId,
    /// For requests that name an adapter: the base never has to be waited for.
    load_wait: Option<Arc<Histogram>>,
    started: Instant,
    first_token: Option<Duration>,
    /// Of the sequence that was admitted first.
    waits: Option<AdmissionWaits>,
    clocks: Vec<Clock>,
    counted: CountedTokens,
    failed: bool,
}

impl Meter {
    /// A request of a class for `choices` choices of `adapter` (`None` is the base) that started at `started`.
    #[must_use]
    pub fn start(
        metrics: &Arc<GatewayMetrics>,
        adapter: Option<&str>,
        (classes, class): (Arc<ServiceClasses>, ClassId),
        started: Instant,
        choices: usize,
    ) -> Self {
        metrics.in_flight.add(1.0);
        Self {
            adapter: metrics.adapters.of(&metrics.store, adapter),
            load_wait: adapter.map(|_| Arc::clone(&metrics.load_wait)),
            metrics: Arc::clone(metrics),
            classes,
            class,
            started,
            first_token: None,
            waits: None,
            clocks: vec![Clock::default(); choices],
            counted: CountedTokens::default(),
            failed: false,
        }
    }

    /// A sequence was admitted after it had waited.
    pub fn admitted(&mut self, waits: AdmissionWaits) {
        self.waits.get_or_insert(waits);
        self.metrics.queue.record(waits.queued);
        self.adapter.queue.record(waits.queued);
        self.metrics.kv_wait.record(waits.kv);
        if let Some(load_wait) = &self.load_wait {
            load_wait.record(waits.adapter);
        }
    }

    /// Tokens have come for `choice`.
    pub fn tokens(&mut self, choice: usize, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count == 0 {
            return;
        }
        let now = Instant::now();
        if self.first_token.is_none() {
            let time = now - self.started;
            self.first_token = Some(time);
            self.metrics.first_token.record(time);
            self.adapter.first_token.record(time);
            self.classes.get(self.class).saw(Objective::FirstToken, time);
        }
        let clock = &mut self.clocks[choice];
        clock.first.get_or_insert(now);
        if let Some(last) = clock.last.replace(now) {
            self.metrics.inter_token.record((now - last) / count);
        }
        clock.tokens = clock.tokens.saturating_add(count);
    }

    /// Counts what `usage` reports beyond what was counted before: what is counted is what callers are told.
    pub fn usage(&mut self, usage: &Usage) {
        let now = CountedTokens {
            prompt: usage.prompt_tokens,
            generated: usage.completion_tokens,
            cached: usage.prompt_tokens_details.cached_tokens,
        };
        let before = std::mem::replace(&mut self.counted, now);
        let (metrics, adapter) = (&self.metrics, &self.adapter);
        for (overall, by_adapter, now, before) in [
            (&metrics.prompt_tokens, &adapter.prompt_tokens, now.prompt, before.prompt),
            (&metrics.generated_tokens, &adapter.generated_tokens, now.generated, before.generated),
            (&metrics.cached_tokens, &adapter.cached_tokens, now.cached, before.cached),
        ] {
            let grown = f64::from(u32::try_from(now.saturating_sub(before)).unwrap_or(u32::MAX));
            overall.add(grown);
            by_adapter.add(grown);
        }
    }

    /// A choice ended well.
    pub fn finished(&mut self, choice: usize, reason: FinishReason) {
        let clock = &mut self.clocks[choice];
        clock.ended = true;
        if let (Some(first), Some(last), Some(rest @ 1..)) =
            (clock.first, clock.last, clock.tokens.checked_sub(1))
        {
            let time = (last - first) / rest;
            self.metrics.per_token.record(time);
            self.adapter.per_token.record(time);
            self.classes.get(self.class).saw(Objective::PerToken, time);
        }
        self.metrics.ended(match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        });
    }

    /// The request ended in an error.
    pub fn failed(&mut self) {
        self.failed = true;
    }

    /// What the sequence waited for that was admitted first.
    #[must_use]
    pub fn waits(&self) -> Option<AdmissionWaits> {
        self.waits
    }

    /// From the start to the first token, if one has come.
    #[must_use]
    pub fn first_token(&self) -> Option<Duration> {
        self.first_token
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let reason = if self.failed { "error" } else { "cancelled" };
        for _ in self.clocks.iter().filter(|clock| !clock.ended) {
            self.metrics.ended(reason);
        }
        self.metrics.in_flight.add(-1.0);
        if self.failed && self.first_token.is_none() {
            self.classes.get(self.class).failed();
        }
        let time = self.started.elapsed();
        self.metrics.duration.record(time);
        self.adapter.duration.record(time);
    }
}

impl GatewayMetrics {
    fn ended(&self, reason: &str) {
        self.store.number(Id::Finished, &[reason]).add(1.0);
    }
}
