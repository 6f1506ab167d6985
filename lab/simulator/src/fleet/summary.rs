//! Metrics of a fleet's run.

use scheduling::routing::Slo;
use serde::Serialize;

use super::{FleetRequest, Nanos, RequestEnd, RequestOutcome};
use crate::statistics::{mean, quantile};

/// Metrics of a run. Times are of requests that arrived after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Number of measured requests.
    pub requests: usize,
    /// Number of measured requests that ended without an answer.
    pub unanswered: usize,
    /// Share of answers of at least two tokens whose mean time per token meets the SLO target.
    pub attainment: f64,
    /// The attainment of answers of at least eight tokens, which one pass over another prompt does not
    /// dominate.
    pub attainment_8: f64,
    /// Share of requests whose first token met the SLO target.
    pub ttft_attainment: f64,
    /// Mean over requests of the mean time per token, in milliseconds.
    pub tpot_ms: f64,
    /// Median of the mean time per token.
    pub tpot_p50_ms: f64,
    /// 99th percentile of the mean time per token.
    pub tpot_p99_ms: f64,
    /// Mean time to first token in milliseconds.
    pub ttft_ms: f64,
    /// 99th percentile of the time to first token.
    pub ttft_p99_ms: f64,
    /// Mean time from arrival to the last token.
    pub latency_ms: f64,
}

impl Summary {
    /// Computes the metrics of `requests` with their results and SLO targets. Each request takes
    /// `outside_s` beyond the fleet.
    #[must_use]
    pub fn of(
        requests: &[FleetRequest],
        outcomes: &[RequestOutcome],
        warmup: Nanos,
        slo: &Slo,
        outside_s: f64,
    ) -> Self {
        let measured: Vec<(&FleetRequest, &RequestOutcome)> =
            requests.iter().zip(outcomes).filter(|(request, _)| request.at >= warmup).collect();
        let answered: Vec<(&FleetRequest, &RequestOutcome)> =
            measured.iter().filter(|(_, outcome)| outcome.end == RequestEnd::Answered).copied().collect();
        let begun = |outcome: &RequestOutcome| outcome.first_token.unwrap_or(outcome.ended);
        let since = |request: &FleetRequest, at: Nanos| ms(at - request.at) + outside_s * 1e3;
        let ttft: Vec<f64> =
            answered.iter().map(|(request, outcome)| since(request, begun(outcome))).collect();
        let latency: Vec<f64> =
            answered.iter().map(|(request, outcome)| since(request, outcome.ended)).collect();
        let tpot_of = |at_least: u32| -> Vec<f64> {
            let long = answered.iter().filter(|(request, _)| request.answer >= at_least);
            let each = |(request, outcome): &(&FleetRequest, &RequestOutcome)| {
                ms(outcome.ended - begun(outcome)) / f64::from(request.answer - 1)
            };
            long.map(each).collect()
        };
        let (tpot, tpot_8) = (tpot_of(2), tpot_of(8));
        let within = |values: &[f64], limit_us: Option<u64>, all: usize| {
            let good = values.iter().filter(|ms| limit_us.is_none_or(|us| **ms <= us as f64 * 1e-3)).count();
            good as f64 / all.max(1) as f64
        };
        let unanswered = measured.len() - answered.len();
        Self {
            requests: measured.len(),
            unanswered,
            attainment: within(&tpot, slo.tpot_us, tpot.len() + unanswered),
            attainment_8: within(&tpot_8, slo.tpot_us, tpot_8.len() + unanswered),
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
