//! Measures one generation request from its start until the meter is dropped.

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

#[derive(Debug, Clone, Default)]
struct Clock {
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: u32,
    ended: bool,
}

/// Waits of a sequence before admission.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct AdmissionWaits {
    /// Total wait, including the adapter's and the KV blocks'.
    pub queued: Duration,
    /// Wait until the adapter was on the device.
    pub adapter: Duration,
    /// Wait until KV blocks had returned from a lower tier.
    pub kv: Duration,
}

impl AdmissionWaits {
    /// Reads the waits from the first output of a sequence.
    #[must_use]
    pub(crate) fn of(output: &Output) -> Self {
        let [queued, adapter, kv] =
            [output.queued_us, output.load_wait_us, output.kv_wait_us].map(Duration::from_micros);
        Self { queued, adapter, kv }
    }

    /// Returns the wait in queues, without the waits for adapter and KV blocks.
    #[must_use]
    pub(crate) fn alone(&self) -> Duration {
        self.queued.saturating_sub(self.adapter + self.kv)
    }
}

/// Token counts that the metrics already contain.
#[derive(Debug, Clone, Copy, Default)]
struct CountedTokens {
    prompt: usize,
    generated: usize,
    cached: usize,
}

#[derive(Debug)]
pub(crate) struct Meter {
    metrics: Arc<GatewayMetrics>,
    adapter: Arc<AdapterMetrics>,
    classes: Arc<ServiceClasses>,
    class: ClassId,
    /// Whether the latency histograms have the request, as they have all but background requests.
    is_online: bool,
    /// `None` for the base, which is always on the device.
    load_wait: Option<Arc<Histogram>>,
    started: Instant,
    first_token: Option<Duration>,
    /// Waits of the sequence that was admitted first.
    waits: Option<AdmissionWaits>,
    clocks: Vec<Clock>,
    counted: CountedTokens,
    failed: bool,
}

impl Meter {
    /// Starts the measurement of a request with `choices` choices; `adapter` is `None` for the base.
    #[must_use]
    pub(crate) fn start(
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
            is_online: class != classes.background(),
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

    /// Records the waits of an admitted sequence.
    pub(crate) fn admitted(&mut self, waits: AdmissionWaits) {
        self.waits.get_or_insert(waits);
        if !self.is_online {
            return;
        }
        self.metrics.queue.record(waits.queued);
        self.adapter.queue.record(waits.queued);
        self.metrics.kv_wait.record(waits.kv);
        if let Some(load_wait) = &self.load_wait {
            load_wait.record(waits.adapter);
        }
    }

    /// Records that `count` tokens of `choice` arrived.
    pub(crate) fn tokens(&mut self, choice: usize, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count == 0 {
            return;
        }
        let now = Instant::now();
        if self.first_token.is_none() {
            let time = now - self.started;
            self.first_token = Some(time);
            if self.is_online {
                self.metrics.first_token.record(time);
                self.adapter.first_token.record(time);
            }
            self.classes.get(self.class).saw(Objective::FirstToken, time);
        }
        let clock = &mut self.clocks[choice];
        clock.first.get_or_insert(now);
        if let Some(last) = clock.last.replace(now)
            && self.is_online
        {
            self.metrics.inter_token.record((now - last) / count);
        }
        clock.tokens = clock.tokens.saturating_add(count);
    }

    /// Counts the tokens that `usage` adds to earlier calls, so metrics equal the usage that callers receive.
    pub(crate) fn usage(&mut self, usage: &Usage) {
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

    /// Records the normal end of a choice.
    pub(crate) fn finished(&mut self, choice: usize, reason: FinishReason) {
        let clock = &mut self.clocks[choice];
        clock.ended = true;
        if let (Some(first), Some(last), Some(rest @ 1..)) =
            (clock.first, clock.last, clock.tokens.checked_sub(1))
        {
            let time = (last - first) / rest;
            if self.is_online {
                self.metrics.per_token.record(time);
                self.adapter.per_token.record(time);
            }
            self.classes.get(self.class).saw(Objective::PerToken, time);
        }
        self.metrics.ended(match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        });
    }

    pub(crate) fn failed(&mut self) {
        self.failed = true;
    }

    /// Returns the waits of the sequence that was admitted first.
    #[must_use]
    pub(crate) fn waits(&self) -> Option<AdmissionWaits> {
        self.waits
    }

    /// Returns the time to first token, if a token has arrived.
    #[must_use]
    pub(crate) fn first_token(&self) -> Option<Duration> {
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
        if self.is_online {
            let time = self.started.elapsed();
            self.metrics.duration.record(time);
            self.adapter.duration.record(time);
        }
    }
}

impl GatewayMetrics {
    fn ended(&self, reason: &str) {
        self.store.number(Id::Finished, &[reason]).add(1.0);
    }
}
