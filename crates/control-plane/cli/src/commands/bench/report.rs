//! Results of a run: rates, and percentiles of times.

use std::time::Duration;

use serde::Serialize;

use super::{
    load::{AnswerTiming, LoadPattern, LoadPlan, LoadResult, RequestResult},
    traffic::{Distribution, Selection},
};
use crate::client::ClientError;

/// Results of one run, with times as the callers saw them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct BenchReport {
    /// Text of the selection on the command line.
    pub(super) selection: String,
    /// Number of different models asked.
    pub(super) adapters: usize,
    /// Distribution of the requests over the models.
    pub(super) distribution: &'static str,
    /// Number of sent requests.
    pub(super) requests: usize,
    /// Number of requests without a complete answer, including refused ones.
    pub(super) failed: usize,
    /// Number of requests that the gateway refused because it was full (429, 503).
    pub(super) refused: usize,
    /// Maximum number of concurrent requests.
    pub(super) concurrency: usize,
    /// Arrival rate in requests per second; `None` in a closed loop.
    pub(super) rate_per_s: Option<f64>,
    /// Random seed of the prompts and of random selections.
    pub(super) seed: u64,
    /// Prompt tokens of all answers, as counted by the gateway.
    pub(super) prompt_tokens: u64,
    /// Generated tokens, as counted by the gateway.
    pub(super) completion_tokens: u64,
    /// Seconds from the first request to the last answer.
    pub(super) wall_s: f64,
    /// Goodput: tokens of complete answers per second of `wall_s`.
    pub(super) output_tokens_per_s: f64,
    /// Complete answers per second of `wall_s`.
    pub(super) requests_per_s: f64,
    /// Time from sending to the first text.
    pub(super) first_token_ms: Percentiles,
    /// Time between tokens, after the first one.
    pub(super) time_per_token_ms: Percentiles,
    /// Time from sending to the end.
    pub(super) request_ms: Percentiles,
    /// Time from sending to the refusal.
    pub(super) refusal_ms: Percentiles,
    /// Delay of sending after the planned time; large values mean that this machine was the limit.
    pub(super) late_ms: Percentiles,
}

/// Result of one request, as `--each` prints it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct RequestReport<'a> {
    request: usize,
    model: &'a str,
    /// Send time, counted from the start of the run.
    sent_s: f64,
    /// 200 for a complete answer, the gateway's status for a refusal, `None` for an interrupted answer.
    status: Option<u16>,
    /// Error code of the gateway.
    code: Option<&'a str>,
    /// Time from sending to the first text.
    first_token_ms: Option<f64>,
    /// Time from sending to the end of answer or error.
    request_ms: f64,
    /// Number of generated tokens.
    completion_tokens: u64,
}

impl<'a> RequestReport<'a> {
    /// Returns a report for each request, in order.
    pub(super) fn of(load: &'a LoadPlan, outcome: &'a LoadResult) -> impl Iterator<Item = Self> {
        outcome.results.iter().map(|result| {
            let answer = result.answer.as_ref().ok();
            let (status, code) = match &result.answer {
                Ok(_) => (Some(200), None),
                Err(ClientError::Refused { status, code, .. }) => (Some(*status), code.as_deref()),
                Err(_) => (None, None),
            };
            Self {
                request: result.request,
                model: &load.models[load.picks[result.request]],
                sent_s: result.sent.as_secs_f64(),
                status,
                code,
                first_token_ms: answer.map(|answer| milliseconds(answer.first_token)),
                request_ms: milliseconds(result.took),
                completion_tokens: answer.map_or(0, |answer| answer.usage.completion_tokens),
            }
        })
    }
}

/// Percentiles of measured values; all 0 without values.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl BenchReport {
    pub(super) fn new(
        selection: &Selection,
        load: &LoadPlan,
        distribution: Distribution,
        outcome: &LoadResult,
    ) -> Self {
        let results = &outcome.results;
        let answers: Vec<_> = results.iter().filter_map(|result| result.answer.as_ref().ok()).collect();
        let refusals = || results.iter().filter(|result| result.is_refusal());
        let (concurrency, rate_per_s) = match load.pattern {
            LoadPattern::Closed { concurrency } => (concurrency, None),
            LoadPattern::Open { per_s, callers } => (callers, Some(per_s)),
        };
        let wall_s = outcome.wall.as_secs_f64();
        let completion_tokens = answers.iter().map(|answer| answer.usage.completion_tokens).sum();
        Self {
            selection: selection.to_string(),
            adapters: load.models.len(),
            distribution: distribution.as_str(),
            requests: load.picks.len(),
            failed: results.len() - answers.len(),
            refused: refusals().count(),
            concurrency,
            rate_per_s,
            seed: load.seed,
            prompt_tokens: answers.iter().map(|answer| answer.usage.prompt_tokens).sum(),
            completion_tokens,
            wall_s,
            output_tokens_per_s: completion_tokens as f64 / wall_s,
            requests_per_s: answers.len() as f64 / wall_s,
            first_token_ms: Percentiles::of(answers.iter().map(|answer| milliseconds(answer.first_token))),
            time_per_token_ms: Percentiles::of(answers.iter().filter_map(|answer| time_per_token_ms(answer))),
            request_ms: Percentiles::of(answers.iter().map(|answer| milliseconds(answer.total))),
            refusal_ms: Percentiles::of(refusals().map(|result| milliseconds(result.took))),
            late_ms: Percentiles::of(results.iter().map(|result: &RequestResult| milliseconds(result.late))),
        }
    }
}

impl Percentiles {
    /// Returns nearest-rank percentiles, so that each is a measured value.
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let Some(max) = values.last().copied() else {
            return Self::default();
        };
        let at = |percent: usize| values[(values.len() * percent).div_ceil(100) - 1];
        Self { p50: at(50), p90: at(90), p99: at(99), max }
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Returns the mean time between tokens; `None` for an answer of one token.
fn time_per_token_ms(answer: &AnswerTiming) -> Option<f64> {
    let later_tokens = answer.usage.completion_tokens.checked_sub(1).filter(|tokens| *tokens > 0)?;
    Some(milliseconds(answer.decode) / later_tokens as f64)
}

/// Formats a Markdown table with one row per run.
pub(super) fn markdown(reports: &[BenchReport]) -> String {
    let mut text = String::from(
        "| asked | adapters | requests | failed | refused | tokens/s | requests/s | first token ms p50 / p90 / p99 | ms per token p50 / p90 / p99 |\n\
         |:---|---:|---:|---:|---:|---:|---:|---:|---:|",
    );
    for report in reports {
        let times = |p: Percentiles| format!("{:.1} / {:.1} / {:.1}", p.p50, p.p90, p.p99);
        text.push_str(&format!(
            "\n| {} | {} | {} | {} | {} | {:.1} | {:.2} | {} | {} |",
            report.selection,
            report.adapters,
            report.requests,
            report.failed,
            report.refused,
            report.output_tokens_per_s,
            report.requests_per_s,
            times(report.first_token_ms),
            times(report.time_per_token_ms),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Usage;

    fn result(request: usize, took_ms: u64, answer: Result<AnswerTiming, ClientError>) -> RequestResult {
        let late = Duration::from_millis(1);
        RequestResult { request, sent: Duration::ZERO, late, took: Duration::from_millis(took_ms), answer }
    }

    fn refused(status: u16) -> ClientError {
        ClientError::Refused { status, code: Some("queue_full".into()), message: String::new() }
    }

    fn answer(first_ms: u64, tokens: u64) -> AnswerTiming {
        AnswerTiming {
            first_token: Duration::from_millis(first_ms),
            total: Duration::from_millis(first_ms + 100),
            decode: Duration::from_millis(100),
            usage: Usage { prompt_tokens: 5, completion_tokens: tokens },
        }
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let percentiles = Percentiles::of((1..=100).rev().map(f64::from));
        assert_eq!(percentiles, Percentiles { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 });
        let one = Percentiles::of([3.0].into_iter());
        assert_eq!(one, Percentiles { p50: 3.0, p90: 3.0, p99: 3.0, max: 3.0 });
        assert_eq!(Percentiles::of([].into_iter()), Percentiles::default());
    }

    #[test]
    fn a_report_counts_what_was_answered_by_the_time_it_took() {
        let load = LoadPlan {
            models: vec!["a".into(), "b".into()],
            picks: vec![0, 1, 1, 0],
            pattern: LoadPattern::Open { per_s: 9.0, callers: 2 },
            prompt_tokens: 5,
            max_tokens: 11,
            seed: 0,
        };
        let outcome = LoadResult {
            results: vec![
                result(0, 110, Ok(answer(10, 11))),
                result(1, 130, Ok(answer(30, 1))),
                result(2, 4, Err(refused(429))),
                result(3, 50, Err(refused(500))),
            ],
            wall: Duration::from_secs(2),
        };
        let report = BenchReport::new(&"zipf:2".parse().unwrap(), &load, Distribution::Zipf, &outcome);
        assert_eq!((report.prompt_tokens, report.completion_tokens), (10, 12));
        assert_eq!((report.failed, report.refused, report.rate_per_s), (2, 1, Some(9.0)));
        assert_eq!((report.refusal_ms.max, report.late_ms.max), (4.0, 1.0));
        let each: Vec<_> = RequestReport::of(&load, &outcome).collect();
        assert_eq!(
            (each[0].status, each[0].first_token_ms, each[0].completion_tokens),
            (Some(200), Some(10.0), 11)
        );
        assert_eq!((each[2].status, each[2].code, each[2].model), (Some(429), Some("queue_full"), "b"));
        assert_eq!(report.output_tokens_per_s, 6.0);
        assert_eq!(report.first_token_ms.max, 30.0);
        // The one-token answer has no time between tokens and does not count there.
        assert_eq!(report.time_per_token_ms.p50, 10.0);
        assert!(
            markdown(&[report]).ends_with(
                "| zipf:2 | 2 | 4 | 2 | 1 | 6.0 | 1.00 | 10.0 / 30.0 / 30.0 | 10.0 / 10.0 / 10.0 |"
            )
        );
    }
}
