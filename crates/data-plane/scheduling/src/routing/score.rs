//! Scores a candidate by Algorithm 1.
//!
//! As printed (C-14), with `exists` = running and waiting requests, `n` of them:
//!
//! ```text
//! cost  = (PrePerf(queue + req) - PrePerf(queue)) / avg_resp_len + DecPerf(exists + req) - DecPerf(exists)
//! cost += penalty, if DecPerf(exists + req) > SLO
//! total = cost · n
//! ```
//!
//! The printed form gives an idle executor the score 0, even if it would break a promise. In the corrected
//! form (C-15) `n` is at least 1, and candidates that break no promise come before all that break one. This
//! order acts as an infinite penalty, which a long queue cannot outweigh; among equals the costs decide. The
//! corrected form adds the request's own wait for its adapter, spread over its answer, and leaves out cached
//! prompt tokens.

use std::cmp::Ordering;

use super::{Candidate, Forecast, PlacementRequest, Residency, Slo};
use crate::perf::serving::{ColdStart, RequestLoad};

/// Penalty of the printed form for a broken promise, in multiples of the promised time (C-15).
const PENALTY_SLOS: f64 = 1e3;

/// Lower bound of the mean answer in tokens.
const SHORTEST_ANSWER: f64 = 1.0;

/// Rank of a candidate: the least is the best.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CandidateRank {
    pub(super) class: u32,
    /// Cost in seconds per token.
    pub(super) cost: f64,
    /// Requests of the executor. At equal cost fewer are better, and then the lower executor number.
    pub(super) requests: u64,
}

impl CandidateRank {
    pub(super) fn cmp(&self, other: &Self) -> Ordering {
        let class = self.class.cmp(&other.class);
        class.then(self.cost.total_cmp(&other.cost)).then(self.requests.cmp(&other.requests))
    }
}

/// Returns the total of the printed form, in seconds.
pub(super) fn printed(asked: &PlacementRequest, candidate: &Candidate) -> f64 {
    let Candidate { model, running, waiting, .. } = candidate;
    let (exists, req) = (running.plus(*waiting), whole(asked));
    let mut cost = model.added_prefill_s(*waiting, req) / answer(asked) + model.added_step_s(exists, req);
    if let Some(slo_us) = asked.slo.tpot_us
        && microseconds(model.step_s(exists.plus(req))) > slo_us
    {
        cost += PENALTY_SLOS * slo_us as f64 * 1e-6;
    }
    cost * exists.requests as f64
}

pub(super) fn mended(asked: &PlacementRequest, candidate: &Candidate) -> CandidateRank {
    let Candidate { model, running, waiting, .. } = candidate;
    let exists = running.plus(*waiting);
    let prefill = model.added_prefill_s(*waiting, to_compute(asked, candidate));
    let others = prefill / answer(asked) + model.added_step_s(exists, whole(asked));
    let own = cold_s(asked, candidate) / answer(asked);
    CandidateRank {
        class: violations(asked, candidate),
        cost: others * exists.requests.max(1) as f64 + own,
        requests: exists.requests,
    }
}

pub(super) fn violations(asked: &PlacementRequest, candidate: &Candidate) -> u32 {
    if asked.slo == Slo::default() && candidate.promised_tpot_us.is_none() {
        return 0;
    }
    let forecast = forecast(asked, candidate);
    let breaks = |us: u64, promised: Option<u64>| u32::from(promised.is_some_and(|promised| us > promised));
    breaks(forecast.ttft_us, asked.slo.ttft_us)
        + breaks(forecast.tpot_us, asked.slo.tpot_us)
        + breaks(forecast.tpot_us, candidate.promised_tpot_us)
}

pub(super) fn forecast(asked: &PlacementRequest, candidate: &Candidate) -> Forecast {
    let Candidate { model, running, waiting, .. } = candidate;
    let step_s = model.step_s(running.plus(*waiting).plus(whole(asked)));
    // A running step has half of its time left on average.
    let under_way_s = if running.requests > 0 { model.step_s(*running) / 2.0 } else { 0.0 };
    let prefill_s = model.prefill_s(waiting.plus(to_compute(asked, candidate)));
    // A prompt that is computed in a running step has no own pass and waits for that step.
    let beside_s = (model.decode.seconds_each[0] - model.prefill.seconds_each[0]).max(0.0);
    let ttft_s =
        under_way_s + beside_s + prefill_s + cold_s(asked, candidate) + place_s(asked, candidate, step_s);
    Forecast { ttft_us: microseconds(ttft_s), tpot_us: microseconds(step_s) }
}

/// Returns the wait for a slot in seconds: a running request ends every `answer / places` steps.
fn place_s(asked: &PlacementRequest, candidate: &Candidate, step_s: f64) -> f64 {
    let missing = candidate.requests().saturating_add(1).saturating_sub(candidate.places) as f64;
    missing * answer(asked) * step_s / candidate.places.max(1) as f64
}

/// Returns how long the request waits for its adapter beyond its other waiting times, in seconds.
fn cold_s(asked: &PlacementRequest, candidate: &Candidate) -> f64 {
    let model = &candidate.model;
    let (store_s, bytes) = match candidate.adapter {
        Residency::Device => return 0.0,
        Residency::Host { bytes } => (0.0, bytes),
        // Workers read the host's copy, so no request starts before the copy exists.
        Residency::Absent { bytes } => (model.store.at(bytes as f64), bytes),
    };
    match model.cold {
        ColdStart::Assisted => store_s,
        ColdStart::Waits => {
            let queue_s = model.prefill_s(candidate.waiting);
            let load_s = if bytes == 0 { 0.0 } else { model.link.at(bytes as f64) };
            // Queued prompts are computed while this adapter travels.
            store_s + (load_s - queue_s.min(load_s)) * f64::from(u8::from(asked.rank > 0))
        }
    }
}

fn whole(asked: &PlacementRequest) -> RequestLoad {
    RequestLoad::of(asked.rank, asked.prompt_tokens)
}

/// Returns the uncached part of the prompt; at least the last token is computed.
fn to_compute(asked: &PlacementRequest, candidate: &Candidate) -> RequestLoad {
    RequestLoad::of(asked.rank, asked.prompt_tokens.saturating_sub(candidate.cached_tokens).max(1))
}

fn answer(asked: &PlacementRequest) -> f64 {
    asked.answer_tokens.max(SHORTEST_ANSWER)
}

/// Converts to microseconds; the cast saturates, and NaN gives 0.
fn microseconds(seconds: f64) -> u64 {
    (seconds * 1e6).round() as u64
}
