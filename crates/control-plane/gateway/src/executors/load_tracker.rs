//! Load and observed costs of an executor, on which the routing policy bases its choice.
//!
//! All values are measured in the gateway: when a sequence was sent, when its tokens arrived, and how long
//! adapters took to load. So they are independent of the kind of executor.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use scheduling::{
    perf::serving::{ColdStart, LoraForm, RequestLoad, ServingFit},
    routing::{cost_estimates::CostEstimate, in_flight::InFlightLoad},
};

use crate::lock::lock;

/// One of this many outputs is timed.
const TIMED_EVERY: u64 = 8;

/// Age after which the timings of an idle executor count as stale.
const FRESH: Duration = Duration::from_secs(10);

/// Load and timings of one executor; clones share them.
#[derive(Debug, Clone)]
pub(crate) struct LoadTracker(Arc<Mutex<LoadState>>);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Loads {
    /// Load of sequences without a token.
    pub waiting: RequestLoad,
    /// Load of sequences with tokens.
    pub running: RequestLoad,
    /// Strictest SLO target for the time per output token among all sequences, in microseconds.
    pub promised_tpot_us: Option<u64>,
}

#[derive(Debug)]
struct LoadState {
    fit: ServingFit,
    waiting: InFlightLoad,
    running: InFlightLoad,
    outputs: u64,
    timed_at: Instant,
}

impl Default for LoadTracker {
    fn default() -> Self {
        let fit = ServingFit::new(LoraForm::TrueRank, ColdStart::Assisted);
        let (waiting, running) = Default::default();
        Self(Arc::new(Mutex::new(LoadState { fit, waiting, running, outputs: 0, timed_at: Instant::now() })))
    }
}

impl LoadTracker {
    /// Records that a sequence with `prompt_tokens` to compute is sent to the executor. `promised_tpot_us` is
    /// the SLO target for the time per output token, if there is one.
    #[must_use]
    pub(crate) fn track(
        &self,
        rank: u64,
        promised_tpot_us: Option<u64>,
        prompt_tokens: u64,
    ) -> TrackedSequence {
        lock(&self.0).waiting.add_request(rank, promised_tpot_us, prompt_tokens);
        let stage = SequenceStage::Waiting(Instant::now());
        TrackedSequence { books: self.clone(), rank, promised_tpot_us, tokens: prompt_tokens, stage }
    }

    #[must_use]
    pub(crate) fn loads(&self) -> Loads {
        let LoadState { waiting, running, .. } = &*lock(&self.0);
        let promised = [waiting.promised_tpot_us(), running.promised_tpot_us()];
        Loads {
            waiting: waiting.load(),
            running: running.load(),
            promised_tpot_us: promised.into_iter().flatten().min(),
        }
    }

    /// Returns cost estimates from observed timings; `None` if there are too few.
    #[must_use]
    pub(crate) fn seen(&self) -> Option<CostEstimate> {
        self.seen_at(Instant::now())
    }

    fn seen_at(&self, now: Instant) -> Option<CostEstimate> {
        let LoadState { fit, waiting, running, timed_at, .. } = &*lock(&self.0);
        let is_idle = waiting.load().plus(running.load()).requests == 0;
        let is_stale = is_idle && now.saturating_duration_since(*timed_at) >= FRESH;
        fit.model().map(|model| CostEstimate { model, is_stale })
    }

    /// Records that an adapter of `bytes` bytes took `took` to load from the store.
    pub(crate) fn arrived(&self, bytes: u64, took: Duration) {
        lock(&self.0).fit.observe_store(bytes, took);
    }
}

#[derive(Debug, Clone, Copy)]
enum SequenceStage {
    /// Sent at this time, and without a token.
    Waiting(Instant),
    /// The last output arrived at this time.
    Running(Instant),
}

/// A sequence that counts in the executor's load until it is dropped.
#[derive(Debug)]
pub(crate) struct TrackedSequence {
    books: LoadTracker,
    rank: u64,
    promised_tpot_us: Option<u64>,
    tokens: u64,
    stage: SequenceStage,
}

impl TrackedSequence {
    /// Records an output of `tokens` tokens. Of the prompt, `cached` tokens came from the prefix cache; the
    /// sequence waited `queued` in the executor.
    pub(crate) fn output(&mut self, tokens: u64, cached: u64, queued: Duration) {
        let now = Instant::now();
        let mut pages = lock(&self.books.0);
        pages.timed_at = now;
        match self.stage {
            SequenceStage::Waiting(since) => {
                pages.waiting.remove_request(self.rank, self.promised_tpot_us, self.tokens);
                let computed = RequestLoad::of(self.rank, self.tokens.saturating_sub(cached));
                pages.fit.observe_prefill(computed, (now - since).saturating_sub(queued));
                self.tokens += tokens;
                pages.running.add_request(self.rank, self.promised_tpot_us, self.tokens);
            }
            SequenceStage::Running(last) => {
                pages.outputs += 1;
                if pages.outputs.is_multiple_of(TIMED_EVERY)
                    && let Ok(count) = u32::try_from(tokens.max(1))
                {
                    let load = pages.running.load();
                    pages.fit.observe_decode(load, (now - last) / count);
                }
                self.tokens += tokens;
                pages.running.grow(self.rank, tokens);
            }
        }
        self.stage = SequenceStage::Running(now);
    }
}

impl Drop for TrackedSequence {
    fn drop(&mut self) {
        let mut pages = lock(&self.books.0);
        match self.stage {
            SequenceStage::Waiting(_) => {
                pages.waiting.remove_request(self.rank, self.promised_tpot_us, self.tokens)
            }
            SequenceStage::Running(_) => {
                pages.running.remove_request(self.rank, self.promised_tpot_us, self.tokens)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_waits_then_runs_and_is_gone_when_dropped() {
        let books = LoadTracker::default();
        let seen = |books: &LoadTracker| {
            let Loads { waiting, running, promised_tpot_us } = books.loads();
            (waiting, running, promised_tpot_us)
        };
        let mut entry = books.track(8, Some(9), 100);
        assert_eq!(seen(&books), (RequestLoad::of(8, 100), RequestLoad::default(), Some(9)));
        entry.output(1, 64, Duration::ZERO);
        entry.output(2, 0, Duration::ZERO);
        let other = books.track(0, Some(7), 5);
        assert_eq!(seen(&books), (RequestLoad::of(0, 5), RequestLoad::of(8, 103), Some(7)));
        drop((entry, other));
        assert_eq!(seen(&books), (RequestLoad::default(), RequestLoad::default(), None));
    }

    #[test]
    fn there_is_a_model_once_prompts_and_steps_were_seen() {
        let books = LoadTracker::default();
        assert!(books.seen().is_none());
        for tokens in 1..=64 {
            let mut entry = books.track(0, None, tokens * 10);
            (0..20).for_each(|_| entry.output(1, 0, Duration::ZERO));
        }
        assert!(books.seen().is_some());
    }

    #[test]
    fn what_an_executor_takes_is_old_once_it_had_nothing_to_do_for_a_while() {
        let books = LoadTracker::default();
        let mut entry = books.track(0, None, 10);
        (0..=TIMED_EVERY).for_each(|_| entry.output(1, 0, Duration::ZERO));
        let is_stale_after = |seconds| {
            let seen = books.seen_at(Instant::now() + Duration::from_secs(seconds));
            seen.map(|seen| seen.is_stale)
        };
        assert_eq!([is_stale_after(1), is_stale_after(60)], [Some(false); 2]);
        drop(entry);
        assert_eq!([is_stale_after(1), is_stale_after(60)], [Some(false), Some(true)]);
    }
}
