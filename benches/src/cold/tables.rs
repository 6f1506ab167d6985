//! Aggregates the timings of requests into values per round and comparisons of the modes.

use anyhow::Result;

use super::{Mode, executor::ServedTiming};
use crate::{
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Metric {
    FirstToken,
    PerToken,
    Latency,
    LoadWait,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aggregate {
    Mean,
    Median,
    P99,
}

impl Metric {
    pub(super) const EACH: [Self; 4] = [Self::FirstToken, Self::PerToken, Self::Latency, Self::LoadWait];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::FirstToken => "first token",
            Self::PerToken => "time per token",
            Self::Latency => "request latency",
            Self::LoadWait => "wait for the load",
        }
    }

    /// Value in milliseconds; `None` if a request has no such value.
    pub(super) fn ms(self, served: &ServedTiming) -> Option<f64> {
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1000.0;
        match self {
            Self::FirstToken => Some(ms(served.first)),
            Self::Latency => Some(ms(served.last)),
            Self::LoadWait => Some(ms(served.load_wait)),
            Self::PerToken => {
                let further = served.tokens.checked_sub(1).filter(|&further| further > 0)?;
                Some(ms(served.last - served.first) / further as f64)
            }
        }
    }
}

impl Aggregate {
    pub(super) const EACH: [Self; 3] = [Self::Mean, Self::Median, Self::P99];

    fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Median => "median",
            Self::P99 => "p99",
        }
    }

    fn of(self, samples: &Samples) -> f64 {
        match self {
            Self::Mean => samples.mean(),
            Self::Median => samples.median(),
            Self::P99 => samples.quantile(0.99),
        }
    }
}

/// Timings of one mode: one list of requests per round.
#[derive(Debug, Clone, Default)]
pub(super) struct Rounds(pub(super) Vec<Vec<ServedTiming>>);

impl Rounds {
    pub(super) fn samples(&self, metric: Metric, over: Aggregate) -> Result<Samples> {
        let round = |served: &Vec<ServedTiming>| {
            let values = served.iter().filter_map(|served| metric.ms(served)).collect();
            Samples::new(values).map(|samples| over.of(&samples))
        };
        Samples::new(self.0.iter().map(round).collect::<Result<_>>()?)
    }

    pub(super) fn all(&self, metric: Metric) -> Result<Samples> {
        Samples::new(self.0.iter().flatten().filter_map(|served| metric.ms(served)).collect())
    }
}

pub(super) struct ModePair<'a> {
    pub(super) bench: &'static str,
    pub(super) case: &'a str,
    pub(super) ours: (Mode, &'a Rounds),
    pub(super) peer: (Mode, &'a Rounds),
}

impl ModePair<'_> {
    pub(super) fn compare(
        &self,
        metric: Metric,
        over: Aggregate,
        target: Option<BenchTarget>,
    ) -> Result<Comparison> {
        let (ours, peer) = (self.ours.0.name(), self.peer.0.name());
        Ok(Comparison {
            bench: self.bench,
            case: format!("{}, {}, {}, {ours}", self.case, metric.name(), over.name()),
            unit: "ms",
            better: Better::Lower,
            ours: self.ours.1.samples(metric, over)?,
            rival: PeerSamples {
                name: format!("holobiont, {peer}"),
                format: "Q4_1".to_owned(),
                samples: self.peer.1.samples(metric, over)?,
            },
            target,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_time_per_token_leaves_the_first_one_out() {
        let served = |tokens| ServedTiming {
            first: Duration::from_millis(100),
            last: Duration::from_millis(400),
            tokens,
            load_wait: Duration::from_millis(30),
            steps: Vec::new(),
        };
        assert_eq!(Metric::PerToken.ms(&served(4)), Some(100.0));
        assert_eq!(Metric::PerToken.ms(&served(1)), None);
        let rounds = Rounds(vec![vec![served(4), served(1)], vec![served(2)]]);
        assert_eq!(rounds.samples(Metric::PerToken, Aggregate::Mean).unwrap().values(), [100.0, 300.0]);
        assert_eq!(rounds.all(Metric::LoadWait).unwrap().values(), [30.0; 3]);
    }
}
