//! What a run came to: rates, and percentiles of times.

use std::time::Duration;

use serde::Serialize;

use super::{
    load::{Answer, Load, Outcome},
    traffic::Distribution,
};

/// Numbers of one run. Times are what callers saw.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    /// Different models asked.
    pub(super) adapters: usize,
    /// How requests were spread over them.
    pub(super) distribution: &'static str,
    /// Requests sent.
    pub(super) requests: usize,
    /// Requests without a complete answer.
    pub(super) failed: usize,
    /// Requests under way at once.
    pub(super) concurrency: usize,
    /// Chose prompts and, unless in turn, adapters.
    pub(super) seed: u64,
    /// Prompt tokens of all answers, as the gateway counted them.
    pub(super) prompt_tokens: u64,
    /// Answered tokens, as the gateway counted them.
    pub(super) completion_tokens: u64,
    /// From the first request to the last answer.
    pub(super) wall_s: f64,
    /// Answered tokens by that time.
    pub(super) output_tokens_per_s: f64,
    /// Answers by that time.
    pub(super) requests_per_s: f64,
    /// From sending to the first text.
    pub(super) first_token_ms: Percentiles,
    /// From one token to the next, once answering.
    pub(super) time_per_token_ms: Percentiles,
    /// From sending to the end.
    pub(super) request_ms: Percentiles,
}

/// Three percentiles and the largest value; all 0 if there was nothing to measure.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(super) struct Percentiles {
    /// Median.
    pub(super) p50: f64,
    /// Nine in ten are at most this.
    pub(super) p90: f64,
    /// 99 in 100 are at most this.
    pub(super) p99: f64,
    /// The largest.
    pub(super) max: f64,
}

impl Report {
    /// Sums up a run.
    pub(super) fn new(load: &Load, distribution: Distribution, outcome: &Outcome) -> Self {
        let answers = &outcome.answers;
        let wall_s = outcome.wall.as_secs_f64();
        let completion_tokens = answers.iter().map(|answer| answer.usage.completion_tokens).sum();
        Self {
            adapters: load.models.len(),
            distribution: distribution.word(),
            requests: load.picks.len(),
            failed: outcome.failures.len(),
            concurrency: load.concurrency,
            seed: load.seed,
            prompt_tokens: answers.iter().map(|answer| answer.usage.prompt_tokens).sum(),
            completion_tokens,
            wall_s,
            output_tokens_per_s: completion_tokens as f64 / wall_s,
            requests_per_s: answers.len() as f64 / wall_s,
            first_token_ms: Percentiles::of(answers.iter().map(|answer| milliseconds(answer.first_token))),
            time_per_token_ms: Percentiles::of(answers.iter().filter_map(time_per_token_ms)),
            request_ms: Percentiles::of(answers.iter().map(|answer| milliseconds(answer.total))),
        }
    }
}

impl Percentiles {
    /// Nearest-rank percentiles: each is a value that was measured.
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

/// An answer of one token has no time between tokens.
fn time_per_token_ms(answer: &Answer) -> Option<f64> {
    let later_tokens = answer.usage.completion_tokens.checked_sub(1).filter(|tokens| *tokens > 0)?;
    Some(milliseconds(answer.decode) / later_tokens as f64)
}

/// A table with a row for each run.
pub(super) fn markdown(reports: &[Report]) -> String {
    let mut text = String::from(
        "| adapters | requests | failed | tokens/s | requests/s | first token ms p50 / p90 / p99 | ms per token p50 / p90 / p99 |\n\
         |---:|---:|---:|---:|---:|---:|---:|",
    );
    for report in reports {
        let times = |p: Percentiles| format!("{:.1} / {:.1} / {:.1}", p.p50, p.p90, p.p99);
        text.push_str(&format!(
            "\n| {} | {} | {} | {:.1} | {:.2} | {} | {} |",
            report.adapters,
            report.requests,
            report.failed,
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

    fn answer(first_ms: u64, tokens: u64) -> Answer {
        Answer {
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
        let load = Load {
            models: vec!["a".into(), "b".into()],
            picks: vec![0, 1],
            concurrency: 2,
            prompt_tokens: 5,
            max_tokens: 11,
            seed: 0,
        };
        let outcome = Outcome {
            answers: vec![answer(10, 11), answer(30, 1)],
            failures: Vec::new(),
            wall: Duration::from_secs(2),
        };
        let report = Report::new(&load, Distribution::Zipf, &outcome);
        assert_eq!((report.prompt_tokens, report.completion_tokens), (10, 12));
        assert_eq!(report.output_tokens_per_s, 6.0);
        assert_eq!(report.first_token_ms.max, 30.0);
        // The one-token answer has no time between tokens and does not count there.
        assert_eq!(report.time_per_token_ms.p50, 10.0);
        assert!(
            markdown(&[report])
                .ends_with("| 2 | 2 | 0 | 6.0 | 1.00 | 10.0 / 30.0 / 30.0 | 10.0 / 10.0 / 10.0 |")
        );
    }
}
