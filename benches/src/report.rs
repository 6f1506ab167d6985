//! A comparison, its JSON line, and the outcome of a run.

use std::process::ExitCode;

use serde::Serialize;

use crate::measure::Samples;

/// Whether greater or smaller values win; decides the direction of `ratio`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Better {
    /// Rates: `ratio` is ours / peer.
    Higher,
    /// Times and sizes: `ratio` is peer / ours.
    Lower,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum BenchTarget {
    RatioAtLeast(f64),
    OursAtLeast(f64),
    OursAtMost(f64),
    ShareAtMost(f64),
    /// Our value is at least this share of the peer's: for a baseline with an inherent advantage.
    ShareAtLeast(f64),
    /// Our value differs from the peer's by at most this share: for forecasts.
    Near(f64),
    /// Our value differs from the peer's by at most this: for forecasts of a share.
    NearPoints(f64),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PeerSamples {
    /// The program and, if not the shipped file, its weights.
    pub(crate) name: String,
    pub(crate) format: String,
    pub(crate) samples: Samples,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Comparison {
    pub(crate) bench: &'static str,
    /// Variant of the benchmark; empty if there is only one.
    pub(crate) case: String,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    pub(crate) ours: Samples,
    pub(crate) rival: PeerSamples,
    pub(crate) target: Option<BenchTarget>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SuiteOutcome {
    Complete,
    /// Some failed; standard error gives the reasons.
    Partial,
}

impl From<SuiteOutcome> for ExitCode {
    fn from(outcome: SuiteOutcome) -> Self {
        match outcome {
            SuiteOutcome::Complete => Self::SUCCESS,
            SuiteOutcome::Partial => Self::FAILURE,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ReportRow {
    bench: &'static str,
    case: String,
    unit: &'static str,
    better: Better,
    ours: f64,
    peer: f64,
    peer_name: String,
    /// Format of the peer's weights; ours are always the shipped file's.
    format: String,
    /// Ratio of the medians; above 1 ours is better.
    ratio: f64,
    /// Smaller number of measurements of the two sides.
    runs: usize,
    /// Greater (max - min) / median of the two sides.
    spread: f64,
    ours_range: [f64; 2],
    peer_range: [f64; 2],
    threads: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
}

impl Comparison {
    pub(crate) fn into_row(self, threads: usize) -> ReportRow {
        let (ours, peer) = (self.ours.median(), self.rival.samples.median());
        let ratio = match self.better {
            Better::Higher => ours / peer,
            Better::Lower => peer / ours,
        };
        ReportRow {
            bench: self.bench,
            case: self.case,
            unit: self.unit,
            better: self.better,
            ours: rounded(ours),
            peer: rounded(peer),
            peer_name: self.rival.name,
            format: self.rival.format,
            ratio: rounded(ratio),
            runs: self.ours.count().min(self.rival.samples.count()),
            spread: rounded(self.ours.spread().max(self.rival.samples.spread())),
            ours_range: self.ours.range().map(rounded),
            peer_range: self.rival.samples.range().map(rounded),
            threads,
            target: self.target.map(BenchTarget::describe),
            met: self.target.map(|target| target.is_met([ours, peer], ratio)),
        }
    }
}

impl BenchTarget {
    fn describe(self) -> String {
        match self {
            Self::RatioAtLeast(least) => format!("ratio >= {least}"),
            Self::OursAtLeast(least) => format!("ours >= {least}"),
            Self::OursAtMost(most) => format!("ours <= {most}"),
            Self::ShareAtMost(most) => format!("ours <= {most} of the peer's"),
            Self::ShareAtLeast(least) => format!("ours >= {least} of the peer's"),
            Self::Near(share) => format!("ours within {share} of the peer's"),
            Self::NearPoints(points) => format!("ours within {points} of the peer, absolutely"),
        }
    }

    fn is_met(self, [ours, peer]: [f64; 2], ratio: f64) -> bool {
        match self {
            Self::RatioAtLeast(least) => ratio >= least,
            Self::OursAtLeast(least) => ours >= least,
            Self::OursAtMost(most) => ours <= most,
            Self::ShareAtMost(most) => ours <= most * peer,
            Self::ShareAtLeast(least) => ours >= least * peer,
            Self::Near(share) => (ours - peer).abs() <= share * peer.abs(),
            Self::NearPoints(points) => (ours - peer).abs() <= points,
        }
    }
}

/// Rounds to three decimals: no run has a higher precision.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(better: Better, target: BenchTarget) -> Comparison {
        Comparison {
            bench: "decode",
            case: "one stream".to_owned(),
            unit: "tokens/s",
            better,
            ours: Samples::new(vec![200.0, 300.0, 250.0]).unwrap(),
            rival: PeerSamples {
                name: "llama-bench".to_owned(),
                format: "Q4_1".to_owned(),
                samples: Samples::new(vec![125.0, 120.0]).unwrap(),
            },
            target: Some(target),
        }
    }

    #[test]
    fn a_rate_is_divided_by_the_peers_and_a_time_divides_it() {
        let rate = comparison(Better::Higher, BenchTarget::RatioAtLeast(2.0)).into_row(2);
        assert_eq!((rate.ratio, rate.met), (rounded(250.0 / 122.5), Some(true)));
        let time = comparison(Better::Lower, BenchTarget::RatioAtLeast(2.0)).into_row(2);
        assert_eq!((time.ratio, time.met), (rounded(122.5 / 250.0), Some(false)));
    }

    #[test]
    fn a_share_may_be_negative_and_is_met_then() {
        let mut slope = comparison(Better::Lower, BenchTarget::ShareAtMost(0.7));
        slope.ours = Samples::new(vec![-1.0]).unwrap();
        assert_eq!(slope.into_row(2).met, Some(true));
        let half = comparison(Better::Lower, BenchTarget::ShareAtMost(0.7)).into_row(2);
        assert_eq!((half.target.as_deref(), half.met), (Some("ours <= 0.7 of the peer's"), Some(false)));
    }

    #[test]
    fn a_line_has_the_promised_fields() {
        let row = comparison(Better::Higher, BenchTarget::OursAtMost(100.0)).into_row(2);
        let line = serde_json::to_value(&row).unwrap();
        for field in ["bench", "unit", "ours", "peer", "peer_name", "ratio", "runs", "spread", "threads"] {
            assert!(line.get(field).is_some(), "{field} is missing in {line}");
        }
        assert_eq!((line["runs"].as_u64(), line["spread"].as_f64()), (Some(2), Some(0.4)));
        assert_eq!((line["target"].as_str(), line["met"].as_bool()), (Some("ours <= 100"), Some(false)));
    }
}
