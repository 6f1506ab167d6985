//! The figures of a fleet's run.

use serde::Serialize;

use super::{End, Nanos, Outcome, Request};
use crate::statistics::{mean, quantile};

/// See the module. Times are of requests that came after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Requests that are measured.
    pub requests: usize,
    /// Of them, those that ended otherwise than with an answer.
    pub unanswered: usize,
    /// Part of answers of at least two tokens whose mean time for a token is within the promise.
    pub attainment: f64,
    /// Part of all whose first token came within the promise.
    pub ttft_attainment: f64,
    /// Mean over requests of the mean time for a token, and its quantiles.
    pub tpot_ms: f64,
    /// Half of them take no longer.
    pub tpot_p50_ms: f64,
    /// 99 of 100 take no longer.
    pub tpot_p99_ms: f64,
    /// To the first token.
    pub ttft_ms: f64,
    /// 99 of 100 take no longer.
    pub ttft_p99_ms: f64,
    /// From arrival to the last token.
    pub latency_ms: f64,
}

impl Summary {
    /// Of what `requests` came to, beside what they were promised, in microseconds.
    #[must_use]
    pub fn of(requests: &[Request], outcomes: &[Outcome], warmup: Nanos, slo: &policy::routing::Slo) -> Self {
        let measured: Vec<(&Request, &Outcome)> =
            requests.iter().zip(outcomes).filter(|(request, _)| request.at >= warmup).collect();
        let answered: Vec<(&Request, &Outcome)> =
            measured.iter().filter(|(_, outcome)| outcome.end == End::Answered).copied().collect();
        let first = |(request, outcome): &(&Request, &Outcome)| {
            ms(outcome.first_token.unwrap_or(outcome.ended) - request.at)
        };
        let ttft: Vec<f64> = answered.iter().map(first).collect();
        let tpot: Vec<f64> = answered
            .iter()
            .filter(|(request, _)| request.answer > 1)
            .map(|(request, outcome)| {
                let first = outcome.first_token.unwrap_or(outcome.ended);
                ms(outcome.ended - first) / f64::from(request.answer - 1)
            })
            .collect();
        let latency: Vec<f64> =
            answered.iter().map(|(request, outcome)| ms(outcome.ended - request.at)).collect();
        let within = |values: &[f64], limit_us: Option<u64>, all: usize| {
            let good = values.iter().filter(|ms| limit_us.is_none_or(|us| **ms <= us as f64 * 1e-3)).count();
            good as f64 / all.max(1) as f64
        };
        let unanswered = measured.len() - answered.len();
        Self {
            requests: measured.len(),
            unanswered,
            attainment: within(&tpot, slo.tpot_us, tpot.len() + unanswered),
            ttft_attainment: within(&ttft, slo.ttft_us, measured.len()),
            tpot_ms: mean(&tpot),
            tpot_p50_ms: quantile(&tpot, 0.5),
            tpot_p99_ms: quantile(&tpot, 0.99),
            ttft_ms: mean(&ttft),
            ttft_p99_ms: quantile(&ttft, 0.99),
            latency_ms: mean(&latency),
        }
    }
}

fn ms(time: Nanos) -> f64 {
    time as f64 * 1e-6
}
